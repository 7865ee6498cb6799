"""The command ``topicstore ds``: the sites of a durable storage, and the replicas of its shards.

Names and output have the form that EMQX's command line gives them, so that scripts written for EMQX work here.
"""

from __future__ import annotations

import copy
import functools
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import attrs
import click

import topicstore
from topicstore.cli.connecting import connected
from topicstore.cli.terminal.options import PATH, json_option
from topicstore.client.paths import part
from topicstore.files.text import read_text
from topicstore.storage.directory.manifest import existing_manifest

if TYPE_CHECKING:
    from topicstore.client.connection import Connection
    from topicstore.client.sites import Placement

__all__ = ["ds", "sections"]

_DIRECTORY = Path("topicstore-data")
"""The default directory of the database that `topicstore serve` opens."""
_SITE, _GAP = 16, "      "
_SHARD, _TRANSITION = 34, 30
"""The widths of the columns that name a shard."""


def _check_url(_: click.Context, __: click.Parameter, url: str | None) -> str | None:
    if url is None:
        return None
    try:
        parts = urlsplit(url)
        known = parts.scheme in ("http", "https") and parts.hostname is not None and parts.port != 0
        why = "" if parts.port != 0 else ": a port is 1 to 65535"
    except ValueError as bad:  # a port that is no number or out of its range, or an IPv6 address without its bracket
        known, why = False, f": {bad}"
    if not known:
        raise click.BadParameter(f"{url!r} is no URL of a server, such as http://127.0.0.1:18083{why}")
    return url


_url_option = click.option(
    "--url",
    metavar="URL",
    callback=_check_url,
    help="A server's HTTP interface, such as http://127.0.0.1:18083, instead of one that is found.",
)
_token_option = click.option(
    "--token-file", type=PATH, metavar="FILE", help="A file with a token for --url, as `topicstore tokens` made it."
)
_database_option = click.option(
    "--database",
    "path",
    type=PATH,
    default=_DIRECTORY,
    show_default=True,
    metavar="PATH",
    help="The directory of the database that the server has open.",
)


def _asks_a_server(command: Callable[..., None]) -> Callable[..., None]:
    """Add the options that select a server, and call ``command`` with a connection to it; print ``ok`` afterwards."""

    @_database_option
    @_url_option
    @_token_option
    @functools.wraps(command)
    def run(*, path: Path, url: str | None, token_file: Path | None, **given: Any) -> None:
        with _connection(path, url, token_file) as connection:
            if connection is None:
                existing_manifest(path)
                raise topicstore.UnsupportedError(
                    f"no server has {path} open: replicas are changed by one that runs; start it with "
                    f"'topicstore serve {path}'"
                )
            command(connection, **given)
        click.echo("ok")

    return run


@click.group()
def ds() -> None:
    """Show and change which sites keep the shards of a durable storage.

    A site is a server that keeps replicas of shards. Its id is its name in the cluster, or 16 hexadecimal digits if
    there is no cluster. DS is the name of a storage, such as messages. The server is found by the directory of its
    database, or by --url.
    """


@ds.command()
@click.argument("path", type=PATH, default=_DIRECTORY)
@_url_option
@_token_option
@json_option
def info(path: Path, url: str | None, token_file: Path | None, *, as_json: bool) -> None:
    """Print the sites and the replicas of each shard, from a running server or from the database in PATH.

    If no server has the database open, its own site is shown as down. PATH is topicstore-data by default.

    \b
    SITES                all sites; (x) down marks a site that doesn't answer,
                         "backs off" one whose writes have failed: for some
                         seconds the others take shards over first
    SHARDS               the sites that hold a replica of each shard
    FAILED REPLICAS      sites that are up, and whose replica of a shard takes
                         no writes since one failed
    REPLICA TRANSITIONS  sites that will receive (+) or release (-) a shard
    """  # noqa: D301 - click wants the character
    from topicstore.client.sites import placement_at_rest, placement_of

    with _connection(path, url, token_file) as connection:
        found = placement_at_rest(path) if connection is None else placement_of(connection)
    if as_json:
        from topicstore.cli.terminal.display import print_json

        print_json(attrs.asdict(found))
    else:
        click.echo("\n".join(sections(found)))


@ds.command("set-replicas")
@click.argument("storage", metavar="DS")
@click.argument("sites", metavar="SITE…", nargs=-1, required=True)
@_asks_a_server
def set_replicas(connection: Connection, storage: str, sites: tuple[str, ...]) -> None:
    """Make the SITEs, and no others, keep the shards of DS; shards are moved in the background."""
    connection.change("PUT", f"/ds/storages/{part(storage)}/replicas", json=list(sites))


_as_emqx_spells_it = copy.copy(set_replicas)
_as_emqx_spells_it.hidden = True
ds.add_command(_as_emqx_spells_it, "set_replicas")


@ds.command()
@click.argument("storage", metavar="DS")
@click.argument("site", metavar="SITE")
@_asks_a_server
def join(connection: Connection, storage: str, site: str) -> None:
    """Let SITE keep shards of DS again, after it has left."""
    connection.change("PUT", f"/ds/storages/{part(storage)}/replicas/{part(site)}")


@ds.command()
@click.argument("storage", metavar="DS")
@click.argument("site", metavar="SITE")
@_asks_a_server
def leave(connection: Connection, storage: str, site: str) -> None:
    """Let SITE pass its shards of DS on to other sites; `ds info` shows when it has none."""
    connection.change("DELETE", f"/ds/storages/{part(storage)}/replicas/{part(site)}")


@ds.command()
@click.argument("site", metavar="SITE")
@_asks_a_server
def forget(connection: Connection, site: str) -> None:
    """Remove SITE, which has been shut down permanently, from the list of sites."""
    connection.change("PUT", f"/ds/sites/{part(site)}/forget")


@contextmanager
def _connection(path: Path, url: str | None, token_file: Path | None) -> Iterator[Connection | None]:
    """Connect to the server at ``url`` or, without it, to the server that has ``path`` open; yield None if none has."""
    if url is None:
        if token_file is not None:
            raise click.UsageError("--token-file is for --url; a server that is found tells its token itself")
        connection = connected(path)
    else:
        from topicstore.client.connection import Connection

        connection = Connection(url, None if token_file is None else _token(token_file))
    if connection is None:
        yield None
        return
    with connection:
        yield connection


def _token(file: Path) -> str:
    try:
        return read_text(file).strip()
    except (OSError, UnicodeError) as bad:
        raise click.BadParameter(f"{file}: {bad}", param_hint="'--token-file'") from bad


def sections(found: Placement) -> Iterator[str]:
    """Yield the lines of ``ds info``; failed replicas and transitions have sections only if there are any."""
    from topicstore.cli.terminal.display import visible

    yield from ("THIS SITE:", found.this, "", "SITES:")
    for site in found.sites:
        back_off = f"    backs off for {math.ceil(site.back_off)} s" if site.up and site.back_off else ""
        yield f"{site.id}    '{visible(site.node)}'    {'    up' if site.up else '(x) down'}{back_off}"
    yield from ("", "SHARDS:", f"{'Shard':<{_SHARD}}Replicas")
    for shard in found.shards:
        yield f"{shard.id:<{_SHARD}}{_GAP.join(shard.replicas)}".rstrip()
    broken = [shard for shard in found.shards if shard.failed]
    if broken:
        yield from ("", "FAILED REPLICAS:", f"{'Shard':<{_SHARD}}Replicas")
        for shard in broken:
            yield f"{shard.id:<{_SHARD}}{_GAP.join(shard.failed)}"
    pending = [shard for shard in found.shards if shard.transitions]
    if pending:
        yield from ("", "REPLICA TRANSITIONS:", f"{'Shard':<{_TRANSITION}}Transitions")
        for shard in pending:
            yield f"{shard.id:<{_TRANSITION}}{'  '.join(shard.transitions)}"
