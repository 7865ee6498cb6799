"""The command ``topicstore rules``: the access rules in a server's settings."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import click

import topicstore
from topicstore.cli.connecting import connected
from topicstore.cli.terminal.options import PATH, json_option

if TYPE_CHECKING:
    from topicstore.server.config.model import Rule, ServerSettings

__all__ = ["rules"]

_DIRECTORY = Path("topicstore-data")
_config = click.option("--config", "file", type=PATH, required=True, metavar="FILE", help="The server's settings.")


@click.group()
def rules() -> None:
    """List and change the access rules of a server, in the file of its settings.

    The first rule that applies to a client, an action and a topic decides. A server that runs on the database of the
    settings reads them again at once.
    """


@rules.command("list")
@_config
@json_option
def list_(file: Path, *, as_json: bool) -> None:
    """List the rules with their numbers, in the order in which they are evaluated."""
    from topicstore.server.config.load import read_settings

    _print(read_settings(file).authorization.rules, as_json=as_json)


@rules.command()
@click.argument("permission", type=click.Choice(["allow", "deny"]))
@click.argument("topics", nargs=-1, required=True)
@_config
@click.option("--action", type=click.Choice(["publish", "subscribe", "both"]), default="both", show_default=True)
@click.option("--user", "users", multiple=True, metavar="NAME", help="Only these users; * stands for any text.")
@click.option("--client", "clients", multiple=True, metavar="ID", help="Only these client ids; * as for users.")
@click.option(
    "--before", type=click.IntRange(min=1), metavar="NUMBER", help="Put it before this rule; by default it is the last."
)
@json_option
def add(
    permission: Literal["allow", "deny"],
    topics: tuple[str, ...],
    file: Path,
    action: Literal["publish", "subscribe", "both"],
    users: tuple[str, ...],
    clients: tuple[str, ...],
    before: int | None,
    *,
    as_json: bool,
) -> None:
    """Add a rule that allows or denies TOPICS, which are topic filters.

    In a filter, %u stands for the user name and %c for the client id.
    """
    from topicstore.server.config.load import read_settings
    from topicstore.server.config.model import Rule

    made = Rule(permission=permission, topics=topics, action=action, users=users or ("*",), clients=clients or ("*",))
    known = list(read_settings(file).authorization.rules)
    known.insert(len(known) if before is None else before - 1, made)
    _change(file, known, as_json=as_json)


@rules.command()
@click.argument("number", type=click.IntRange(min=1))
@_config
@json_option
def remove(number: int, file: Path, *, as_json: bool) -> None:
    """Remove the rule with this NUMBER of the list."""
    from topicstore.server.config.load import read_settings

    known = list(read_settings(file).authorization.rules)
    if number > len(known):
        raise topicstore.InvalidArgumentError(f"{file} has {len(known)} rules, and so none with the number {number}")
    del known[number - 1]
    _change(file, known, as_json=as_json)


def _change(file: Path, rules: Sequence[Rule], *, as_json: bool) -> None:
    """Replace the rules in the file, and have a running server read it; if that fails, restore the file."""
    from topicstore.server.access.permissions import AccessList
    from topicstore.server.config.edit import replace_rules, restore
    from topicstore.server.config.load import read_settings
    from topicstore.server.config.model import SettingsError

    before = replace_rules(file, rules)
    try:
        settings = read_settings(file)
        AccessList(settings.authorization)
        if tuple(settings.authorization.rules) != tuple(rules):
            raise SettingsError("rules of the environment count before those of the file")
        reply = _reload(settings)
    except BaseException:
        restore(file, before)
        raise
    _print(rules, as_json=as_json)
    click.echo(reply, err=True)


def _reload(settings: ServerSettings) -> str:
    """Have the server that has the settings' database open read its settings; return a sentence for people."""
    try:
        connection = connected(settings.messages.data_dir or _DIRECTORY)
    except (topicstore.DatabaseLockedError, OSError):
        return "the server that has the database open can't be asked: let it read its settings, by SIGHUP"
    if connection is None:
        return "no server has the database of these settings open; the next one reads them"
    with connection:
        changed = connection.change("POST", "/config/reload", dict[str, Any])["changed"]
    if "authorization.rules" in changed:
        return "the running server has read them"
    return "a server has the database open, but with settings of another file"


def _print(rules: Sequence[Rule], *, as_json: bool) -> None:
    if as_json:
        import msgspec

        click.echo(msgspec.json.format(msgspec.json.encode({"rules": rules}), indent=2).decode())
        return
    for number, rule in enumerate(rules, 1):
        whose = [f"users {', '.join(rule.users)}"] * (rule.users != ("*",))
        whose += [f"clients {', '.join(rule.clients)}"] * (rule.clients != ("*",))
        what = "" if rule.action == "both" else f" {rule.action}"
        click.echo(f"{number}  {rule.permission}{what} {' '.join(rule.topics)}{''.join(f'  ({one})' for one in whose)}")
