"""The command ``topicstore config``."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from .command import check_installed, json_option, print_json

if TYPE_CHECKING:
    from topicstore.server.config.load import Configuration
    from topicstore.server.config.model import ServerSettings, StorageSettings

__all__ = ["config"]

_DIRECTORY = Path("topicstore-data")

_file = click.option(
    "--config",
    "file",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="The file of settings; without it, what a server without a file has.",
)


@click.group()
def config() -> None:
    """Check and show the settings of a server, and make a file of them.

    Settings of the environment count before those of the file, as in TOPICSTORE__LIMITS__CONNECTIONS=500.
    """
    check_installed()


@config.command()
@_file
@click.argument("path", type=click.Path(path_type=Path), required=False)
@json_option
def check(file: Path | None, path: Path | None, *, as_json: bool) -> None:
    """Read the settings, and print "ok", what a start would change in the database PATH, and who may connect.

    Files that they name, of users and of TLS, and plugins are looked for too; addresses are not tried. Exits with 2 if
    they can't be used, and says where and why. PATH is by default the one that the settings name.
    """
    from topicstore.server.databases import places
    from topicstore.server.reload import check_files
    from topicstore.server.running import access

    settings = _read(file).settings
    check_files(settings)
    storages = places(settings, path or settings.messages.data_dir or _DIRECTORY)
    coming = [line for name, one, directory in storages for line in _coming(settings, name, one, directory)]
    if as_json:
        print_json({"ok": True, "changes": coming, "access": access(settings)})
    else:
        click.echo("\n".join(["ok", *coming, access(settings)]))


def _coming(settings: ServerSettings, name: str, storage: StorageSettings, path: Path) -> Iterator[str]:
    """Yield a line for each change of a storage's database at a start. Raises `SettingsError` for fixed settings."""
    import topicstore
    from topicstore.server.config.model import MESSAGES
    from topicstore.server.databases import changed_limits, check_fixed, check_new, missing_rules, next_layout
    from topicstore.storage.directory.manifest import read_manifest

    manifest = read_manifest(path)
    if manifest is None:
        check_new(name, storage)
        yield f"a start creates the database {path}"
        return
    check_fixed(name, storage, manifest)
    try:
        with topicstore.open(path, "r") as db:
            current = db.generations()[-1]
            following = next_layout(name, storage, manifest, current)
            rules, limits = missing_rules(db, settings), changed_limits(db, settings)
    except topicstore.DatabaseLockedError:
        yield f"what a start changes in {path} can't be seen: it is open elsewhere"
        return
    if following is not None:
        yield f"a start begins generation {current.number + 1} with the layout {following[0]!r} in {path}"
    if name != MESSAGES:
        return
    for rule in rules:
        yield f"a start adds the rule of persistence {rule.topic_filter!r}"
    for limit, value in limits.items():
        yield f"a start sets {limit} of retention to {_written(value)}"


def _written(limit: Any) -> str:
    """Return a retention limit in the notation of the settings."""
    from topicstore.server.config.units import Duration, Size

    if isinstance(limit, dict):
        return ", ".join(f"{name}={_written(length)}" for name, length in limit.items())
    if limit is None:
        return "infinity"
    if isinstance(limit, (int, float)):
        return str(Duration(limit) if isinstance(limit, float) else Size(limit))
    return str(limit)


@config.command()
@_file
@click.option("--json", "as_json", is_flag=True, help="Print JSON: a list of place, value and origin.")
def show(file: Path | None, *, as_json: bool) -> None:
    """Print the settings in force, and where each comes from: default, file, or the name of a variable.

    Secrets are printed as ***.
    """
    import msgspec

    from topicstore.server.config.show import leaves, shown, shown_as_toml

    found = _read(file)
    if not as_json:
        click.echo(shown_as_toml(found), nl=False)
        return
    rows: list[dict[str, Any]] = [
        {"setting": ".".join(place), "value": value, "origin": found.origin(place)}
        for place, value in leaves(shown(found.settings))
    ]
    click.echo(msgspec.json.encode(rows).decode())


@config.command()
def schema() -> None:
    """Print the JSON Schema of the file, by which editors complete and check it."""
    import msgspec

    from topicstore.server.config.show import json_schema

    click.echo(msgspec.json.format(msgspec.json.encode(json_schema()), indent=2).decode())


@config.command()
def init() -> None:
    """Print a file of all settings with their defaults and what they mean."""
    from topicstore.server.config.show import default_file

    click.echo(default_file(), nl=False)


def _read(file: Path | None) -> Configuration:
    from topicstore.server.config.load import read_configuration

    return read_configuration(file)
