"""The command ``topicstore plugins``."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any

import click

from topicstore.cli.app import ForeignCommand, foreign_commands
from topicstore.cli.skeletons import KINDS, write_skeleton
from topicstore.cli.terminal.display import console, make_table, print_json
from topicstore.cli.terminal.options import PATH, json_option
from topicstore.contract.plugin_specs import BackendSpec, LayoutSpec, PluginSpec
from topicstore.plugins import FailedPlugin, Registry, missing_modules, registry

__all__ = ["plugins"]

_HOOKS_OF_THE_DATA_PATH = (
    "topicstore_store",
    "topicstore_read",
    "topicstore_replay",
    "topicstore_opened",
    "topicstore_closed",
)


_COLUMNS = {
    "backends": {"backend": "name", "state~": "available", "capabilities~": "capabilities", "summary~": "summary"},
    "layouts": {
        "layout": "name",
        "state~": "available",
        "capabilities~": "capabilities",
        "needs~": "requires",
        "summary~": "summary",
    },
    "workloads": {"workload": "name", "state~": "available", "summary~": "summary"},
    "commands": {"command": "name", "state~": "available", "of": "distribution"},
    "plugins": {"plugin": "name", "of": "distribution", "wraps the data path by~": "wraps"},
    "failed": {"failed plugin": "name", "of": "distribution", "why~": "reason"},
}
"""The tables for people: for each list of the document, the keys of its objects by the headers of their columns."""


_NAME = re.compile(r"[a-z][a-z0-9]*(_[a-z0-9]+)*")


@click.group(invoke_without_command=True, subcommand_metavar="[new NAME …]")
@json_option
@click.pass_context
def plugins(ctx: click.Context, *, as_json: bool) -> None:
    """List every plugin with what it provides and supports, or why it can't be used. Loads no engine."""
    if ctx.invoked_subcommand is not None:
        return
    known, commands = registry(), foreign_commands()
    document = {
        "plugins": [_plugin(known, name) for name in sorted(known.plugins)],
        "backends": [_described(known, spec) for _, spec in sorted(known.backends().items())],
        "layouts": [_described(known, spec) for _, spec in sorted(known.layouts().items())],
        "workloads": [_described(known, spec) for _, spec in sorted(known.workloads().items())],
        "commands": [
            {
                "name": one.name,
                "distribution": one.distribution,
                "available": one.command is not None,
                "why": one.reason,
            }
            for one in commands
        ],
        "failed": [{"name": f.name, "distribution": f.distribution, "reason": f.reason} for f in known.failed],
    }
    if as_json:
        print_json(document)
    else:
        _print(document)
    _warn(known.failed, commands)


@plugins.command()
@click.argument("name")
@click.option("--kind", type=click.Choice(KINDS), default="backend", show_default=True, help="What it will be.")
@click.option(
    "--directory", type=PATH, metavar="DIRECTORY", help="Where it goes, a new folder.  [default: topicstore-NAME]"
)
def new(name: str, kind: str, directory: Path | None) -> None:
    """Write the skeleton of a backend or layout called NAME, with its tests.

    It is a distribution of its own, with everything that each of its kind needs. Its tests are the conformance suite;
    those that need a method which is still to be written are expected to fail, so the run is green from the beginning.

    \b
    Examples:
      topicstore plugins new sled
      topicstore plugins new by_day --kind layout
    """  # noqa: D301 - click wants the character
    if not _NAME.fullmatch(name):
        raise click.UsageError(f"{name!r} is no name of a plugin: lower-case letters, digits and single underscores")
    known = registry()
    taken = known.backends() if kind == "backend" else known.layouts()
    if name in taken:
        raise click.UsageError(f"there is a {kind} {name!r} already; 'topicstore plugins' lists all")
    folder = directory if directory is not None else Path(f"topicstore-{name.replace('_', '-')}")
    for file in write_skeleton(kind, name, folder):
        click.echo(file)
    click.echo(f"\nThen: cd {shlex.quote(str(folder))}, pip install -e '.[test]', and pytest -n auto", err=True)


def _plugin(known: Registry, name: str) -> dict[str, Any]:
    wraps = [hook for hook in _HOOKS_OF_THE_DATA_PATH if hasattr(known.plugins[name], hook)]
    return {"name": name, "distribution": known.distributions[name], "wraps": wraps}


def _described(known: Registry, spec: PluginSpec) -> dict[str, Any]:
    missing = missing_modules(spec)
    hint = f': pip install "{spec.install}"' if spec.install else ""
    described = {
        "name": spec.name,
        "plugin": known.origins[type(spec), spec.name],
        "summary": spec.summary,
        "available": not missing,
        "why": f"needs {', '.join(missing)}{hint}" if missing else "",
    }
    if isinstance(spec, (BackendSpec, LayoutSpec)):
        described["capabilities"] = sorted(spec.capabilities)
    if isinstance(spec, LayoutSpec):
        described["requires"] = sorted(spec.requires)
    if isinstance(spec, BackendSpec):
        described["durability"] = spec.durability_note
    return described


def _print(document: dict[str, list[dict[str, Any]]]) -> None:
    for number, kind in enumerate(kind for kind in _COLUMNS if document[kind]):
        rows = ([_cell(one, key) for key in _COLUMNS[kind].values()] for one in document[kind])
        if number:
            click.echo()
        console().print(make_table(*_COLUMNS[kind], rows=rows))


def _cell(one: dict[str, Any], key: str) -> Any:
    from rich.text import Text

    if key == "available":
        return Text("ready", style="green") if one[key] else Text(one["why"], style="yellow")
    return (", ".join(one[key]) or None) if isinstance(one[key], list) else one[key]


def _warn(failed: list[FailedPlugin], commands: list[ForeignCommand]) -> None:
    for plugin in failed:
        is_ = " is" if plugin.reason.startswith("disabled by ") else ":"
        reason = " ".join(plugin.reason.split())
        click.echo(f"warning: plugin {plugin.name!r} of {plugin.distribution}{is_} {reason}", err=True)
    for one in commands:
        if one.command is None:
            click.echo(f"warning: command {one.name!r} of {one.distribution}: {one.reason}", err=True)
