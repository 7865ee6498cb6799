"""The command ``topicstore bans``: client ids, users and addresses that may not connect to a server."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

import topicstore
from topicstore.cli.connecting import connected
from topicstore.cli.terminal.options import PATH, json_option

if TYPE_CHECKING:
    from topicstore.client.connection import Connection
    from topicstore.server.access.bans import Ban, BanFile, Banned

__all__ = ["bans"]

_DIRECTORY = Path("topicstore-data")
_KIND = click.argument("kind", type=click.Choice(["client", "user", "address"]))
_VALUE = click.argument("value")
_path = click.option(
    "--database",
    "path",
    type=PATH,
    default=_DIRECTORY,
    show_default=True,
    metavar="PATH",
    help="The directory of the server's database.",
)


@click.group()
def bans() -> None:
    """Ban client ids, users and addresses from a server, and lift or list bans.

    Bans are kept in the file `bans` in the database's directory. A server that runs reads it within two seconds, and
    ends the connections of clients that are banned.
    """


@bans.command()
@_KIND
@_VALUE
@_path
@click.option("--for", "period", metavar="TIME", help="How long, such as 10min or 7d.  [default: until it is lifted]")
@click.option("--reason", default="", metavar="TEXT", help="Why, for operators; clients don't see it.")
@json_option
def add(kind: Banned, value: str, path: Path, period: str | None, reason: str, *, as_json: bool) -> None:
    """Ban VALUE, a client id, a user name, or an address or network such as 192.0.2.0/24.

    An earlier ban of the same VALUE is replaced.
    """
    from topicstore.server.access.bans import Bans
    from topicstore.server.config.units import Duration

    try:
        seconds = None if period is None else float(Duration.read(period))
    except ValueError as bad:
        raise click.BadParameter(str(bad), param_hint="'--for'") from bad
    ban = Bans(_file(path)).put(kind, value, seconds=seconds, reason=reason)
    _print([ban], f"banned {_written(ban)}", as_json=as_json)


@bans.command()
@_KIND
@_VALUE
@_path
@json_option
def remove(kind: Banned, value: str, path: Path, *, as_json: bool) -> None:
    """Lift the ban of VALUE, also one of a flapping client, which a running server keeps in memory."""
    from topicstore.server.access.bans import Ban, Bans

    file, connection = _file(path), _connected(path)
    found: Ban | None
    if connection is None:
        found = Bans(file).remove(kind, value)
        if found is None:
            raise topicstore.InvalidArgumentError(f"the {kind} {value!r} is not banned")
    else:
        with connection:
            found = connection.change("DELETE", "/bans", Ban, parameters={"kind": kind, "value": value})
    _print([found], f"lifted the ban of {found.kind} {found.value}", as_json=as_json)


@bans.command("list")
@_path
@json_option
def list_(path: Path, *, as_json: bool) -> None:
    """List the bans that are not over, a line each; of a running server also those of flapping clients."""
    from topicstore.server.access.bans import Ban, Bans

    file, connection = _file(path), _connected(path)
    if connection is None:
        found = Bans(file).listed()
    else:
        with connection:
            found = connection.items("/bans", Ban)
    _print(found, "\n".join(map(_written, found)), as_json=as_json)


def _print(bans: list[Ban], text: str, *, as_json: bool) -> None:
    if as_json:
        import msgspec

        document: Any = {"bans": bans}
        click.echo(msgspec.json.format(msgspec.json.encode(document), indent=2).decode())
    elif text:
        click.echo(text)


def _written(ban: Ban) -> str:
    until = "until it is lifted" if ban.until is None else f"until {ban.until.isoformat(timespec='seconds')}"
    return f"{ban.kind} {ban.value} {until}{ban.reason and f': {ban.reason}'}"


def _file(path: Path) -> BanFile:
    """Return the file of bans; raise the errors of a directory without a database, where no server would read it."""
    from topicstore.server.access.bans import FILE, BanFile
    from topicstore.storage.directory.manifest import existing_manifest

    existing_manifest(path)
    return BanFile(path / FILE)


def _connected(path: Path) -> Connection | None:
    """Return a connection to the server that has the database open; None if none serves HTTP."""
    try:
        return connected(path)
    except topicstore.DatabaseLockedError:
        return None
