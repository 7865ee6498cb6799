"""The command ``topicstore tokens``."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Literal

import click

from .command import check_installed, json_option, print_json

if TYPE_CHECKING:
    from topicstore.server.http.tokens import Tokens

__all__ = ["tokens"]

_DIRECTORY = Path("topicstore-data")

_path = click.argument("path", type=click.Path(path_type=Path), required=False)
_config = click.option(
    "--config", type=click.Path(path_type=Path), metavar="FILE", help="Settings of a server; their [http] is meant."
)


@click.group()
def tokens() -> None:
    """Add, revoke and list the tokens by which programs use a server over HTTP.

    PATH is the directory of the server's database, by default topicstore-data in the current directory. Only hashes of
    tokens are kept. A server that runs uses the changed file from the next request on.
    """


@tokens.command()
@click.argument("name")
@_path
@_config
@click.option(
    "--scope",
    type=click.Choice(["read", "write", "admin"]),
    default="read",
    show_default=True,
    help="What it may do, each also all before it: see what is there; publish, and change messages, sessions and "
    "queues; change how the server runs and what is kept.",
)
@json_option
def add(
    name: str, path: Path | None, config: Path | None, scope: Literal["read", "write", "admin"], *, as_json: bool
) -> None:
    """Make a token called NAME, and print it, this one time."""
    found = _tokens(path, config)
    text = found.add(name, scope)
    if as_json:
        print_json({"file": str(found.path), "name": name, "scope": scope, "token": text})
        return
    click.echo(text)
    click.echo(f"added {name} ({scope}) to {found.path}; this was the only time that the token is shown", err=True)


@tokens.command()
@click.argument("name")
@_path
@_config
@json_option
def revoke(name: str, path: Path | None, config: Path | None, *, as_json: bool) -> None:
    """Revoke the token called NAME. The next request with it is refused."""
    found = _tokens(path, config)
    found.revoke(name)
    if as_json:
        print_json({"file": str(found.path), "revoked": name})
    else:
        click.echo(f"revoked {name} in {found.path}")


@tokens.command("list")
@_path
@_config
@json_option
def list_(path: Path | None, config: Path | None, *, as_json: bool) -> None:
    """List the tokens' names and scopes, a line each."""
    found = _tokens(path, config)
    if as_json:
        rows = [{"name": token.name, "scope": token.scope} for token in found.read()]
        print_json({"file": str(found.path), "tokens": rows})
        return
    for token in found.read():
        click.echo(f"{token.name} {token.scope}")


def _tokens(path: Path | None, config: Path | None) -> Tokens:
    check_installed()
    from topicstore.server.config.load import read_settings
    from topicstore.server.http.tokens import Tokens, token_file
    from topicstore.storage.directory.manifest import existing_manifest

    named, directory = None, path
    if config is not None:
        settings = read_settings(config)
        named = settings.http.token_file if settings.http is not None else None
        directory = directory or settings.messages.data_dir
    directory = directory or _DIRECTORY
    if named is None:
        existing_manifest(directory)  # a token file in an empty directory would prevent creating a database
    return Tokens(token_file(named, directory))
