"""The command ``topicstore plugins``."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import click

from topicstore.cli.app import ForeignCommand, foreign_commands
from topicstore.cli.terminal.options import json_option
from topicstore.contract.plugin_specs import BackendSpec, LayoutSpec, PluginSpec
from topicstore.plugins import FailedPlugin, Registry, missing_modules, registry

if TYPE_CHECKING:
    from rich.text import Text

__all__ = ["plugins"]

_HOOKS_OF_THE_DATA_PATH = (
    "topicstore_store",
    "topicstore_streams",
    "topicstore_read",
    "topicstore_replay",
    "topicstore_opened",
    "topicstore_generation_added",
    "topicstore_generation_dropped",
    "topicstore_closed",
)


@click.command()
@json_option
def plugins(*, as_json: bool) -> None:
    """List every plugin with what it provides and supports, or why it can't be used. Loads no engine."""
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
        from topicstore.cli.terminal.display import print_json

        print_json(document)
    else:
        _print(document)
    _warn(known.failed, commands)


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
    from topicstore.cli.terminal.display import console, make_table

    tables: dict[str, tuple[tuple[str, ...], Callable[[dict[str, Any]], tuple[Any, ...]]]] = {
        "backends": (
            ("backend", "state~", "capabilities~", "summary~"),
            lambda one: (one["name"], _state(one), ", ".join(one["capabilities"]), one["summary"]),
        ),
        "layouts": (
            ("layout", "state~", "capabilities~", "needs~", "summary~"),
            lambda one: (
                one["name"],
                _state(one),
                ", ".join(one["capabilities"]),
                ", ".join(one["requires"]) or None,
                one["summary"],
            ),
        ),
        "workloads": (("workload", "state~", "summary~"), lambda one: (one["name"], _state(one), one["summary"])),
        "commands": (("command", "state~", "of"), lambda one: (one["name"], _state(one), one["distribution"])),
        "plugins": (
            ("plugin", "of", "wraps the data path by~"),
            lambda one: (one["name"], one["distribution"], ", ".join(one["wraps"]) or None),
        ),
        "failed": (("failed plugin", "of", "why~"), lambda one: (one["name"], one["distribution"], one["reason"])),
    }
    out = console()
    for number, kind in enumerate(kind for kind in tables if document[kind]):
        headers, row = tables[kind]
        if number:
            click.echo()
        out.print(make_table(*headers, rows=map(row, document[kind])))


def _state(one: dict[str, Any]) -> Text:
    from rich.text import Text

    return Text("ready", style="green") if one["available"] else Text(one["why"], style="yellow")


def _warn(failed: list[FailedPlugin], commands: list[ForeignCommand]) -> None:
    for plugin in failed:
        is_ = " is" if plugin.reason.startswith("disabled by ") else ":"
        reason = " ".join(plugin.reason.split())
        click.echo(f"warning: plugin {plugin.name!r} of {plugin.distribution}{is_} {reason}", err=True)
    for one in commands:
        if one.command is None:
            click.echo(f"warning: command {one.name!r} of {one.distribution}: {one.reason}", err=True)
