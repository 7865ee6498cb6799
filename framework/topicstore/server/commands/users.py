"""The command ``topicstore users``."""

from __future__ import annotations

import sys
from pathlib import Path

import click

from .command import check_installed, json_option, print_json

__all__ = ["users"]

_file = click.option(
    "--file", "file", type=click.Path(path_type=Path), metavar="FILE", help="The file of users, a line each."
)
_config = click.option(
    "--config",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="Settings of a server; their authentication.password_file is meant.",
)


@click.group()
def users() -> None:
    """Add, remove and list the users who may connect to a server with a password.

    Passwords are stored as argon2id hashes. A running server uses the changed file for all later connections.
    """


@users.command()
@click.argument("name")
@_file
@_config
@json_option
def add(name: str, file: Path | None, config: Path | None, *, as_json: bool) -> None:
    """Add the user NAME, or give it another password.

    On a terminal the command prompts for the password. Otherwise it reads the password from the first line of standard
    input. The password is never an argument, which other users of the machine could see.
    """
    check_installed()
    from topicstore.server.access.passwords import PasswordFile

    path = _path(file, config)
    new = PasswordFile(path).put(name, _password(name))
    if as_json:
        print_json({"file": str(path), "name": name, "new": new})
        return
    click.echo(f"{'added' if new else 'changed the password of'} {name} in {path}")


@users.command()
@click.argument("name")
@_file
@_config
@json_option
def remove(name: str, file: Path | None, config: Path | None, *, as_json: bool) -> None:
    """Remove the user NAME. Connections that are there stay."""
    check_installed()
    from topicstore.server.access.passwords import PasswordFile

    path = _path(file, config)
    PasswordFile(path).remove(name)
    if as_json:
        print_json({"file": str(path), "removed": name})
    else:
        click.echo(f"removed {name} from {path}")


@users.command("list")
@_file
@_config
@json_option
def list_(file: Path | None, config: Path | None, *, as_json: bool) -> None:
    """List the users' names, a line each."""
    check_installed()
    from topicstore.server.access.passwords import PasswordFile

    path = _path(file, config)
    names = list(PasswordFile(path).names())
    if as_json:
        print_json({"file": str(path), "users": names})
        return
    for name in names:
        click.echo(name)


def _path(file: Path | None, config: Path | None) -> Path:
    if (file is None) == (config is None):
        raise click.UsageError("give either --file or --config")
    if config is None:
        return file  # type: ignore[return-value]
    from topicstore.server.config.load import read_settings

    path = read_settings(config).authentication.password_file
    if path is None:
        raise click.UsageError(f"{config} names no authentication.password_file")
    return path


def _password(name: str) -> bytes:
    if sys.stdin.isatty():
        text: str = click.prompt(f"Password of {name}", hide_input=True, confirmation_prompt=True, err=True)
        return text.encode()
    from topicstore.files.text import without_mark

    line = sys.stdin.buffer.readline()
    return without_mark(line).removesuffix(b"\n").removesuffix(b"\r")
