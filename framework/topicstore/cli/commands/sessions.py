"""``topicstore sessions``: look at durable sessions, and end them."""

from __future__ import annotations

from pathlib import Path

import attrs
import click
import msgspec

import topicstore
from topicstore.cli.terminal.asking import check_can_ask, confirmed, yes_option
from topicstore.cli.terminal.groups import GroupWithDefault
from topicstore.cli.terminal.options import PATH, json_option
from topicstore.contract.positions import span_text
from topicstore.sessions import SessionInfo

__all__ = ["sessions"]


@click.group(cls=GroupWithDefault, default="list", subcommand_metavar="[list|show|groups|kick|expire] PATH …")
def sessions() -> None:
    """List, show or end durable sessions: what clients that were away are to get. `sessions PATH` lists them."""


@sessions.command("list")
@click.argument("path", type=PATH)
@json_option
def list_(path: Path, *, as_json: bool) -> None:
    """List the sessions in PATH, sorted by client id."""
    from topicstore.cli.terminal import display

    with topicstore.open_existing(path, auto_compact=False) as db:
        found = db.sessions.list()
    if as_json:
        display.print_json({"path": str(path), "sessions": [_plain(one) for one in found]})
        return
    rows = [(one.client_id, _state(one), display.short_time(one.created), _expiry(one)) for one in found]
    display.console().print(display.make_table("client~", "state", "created", "expires", rows=rows))
    click.echo(display.count_of(len(found), "session"))


@sessions.command()
@click.argument("path", type=PATH)
@click.argument("client_id", metavar="CLIENT")
@json_option
def show(path: Path, client_id: str, *, as_json: bool) -> None:
    """Show the session of CLIENT in PATH: its subscriptions, and what is in flight."""
    from topicstore.cli.terminal import display

    with topicstore.open_existing(path, auto_compact=False) as db:
        one = db.sessions.inspect(client_id)
    if as_json:
        display.print_json({"path": str(path), **_plain(one)})
        return
    pairs = [
        ("client", one.client_id),
        ("state", _state(one)),
        ("created", display.short_time(one.created)),
        ("expires", _expiry(one)),
        ("will", "none is pending" if one.will_due is None else f"published {display.short_time(one.will_due)}"),
        ("in flight", one.in_flight),
        ("awaiting release", one.awaiting_release),
    ]
    out = display.console()
    out.print(display.fields(pairs))
    rows = [(text, o.qos, o.no_local, o.retain_as_published, o.identifier or None) for text, o in one.subscriptions]
    click.echo()
    headers = ("filter~", "QoS>", "no local", "retain as published", "identifier>")
    out.print(display.make_table(*headers, title="Subscriptions", rows=rows))


@sessions.command()
@click.argument("path", type=PATH)
@json_option
def groups(path: Path, *, as_json: bool) -> None:
    """List the shared subscriptions in PATH, and who shares each."""
    from topicstore.cli.terminal import display

    with topicstore.open_existing(path, auto_compact=False) as db:
        found = db.sessions.groups()
    if as_json:
        display.print_json({"path": str(path), "groups": [attrs.asdict(one) for one in found]})
        return
    rows = [
        (one.name, one.topic_filter, ", ".join(member.client_id for member in one.members), one.returned)
        for one in found
    ]
    display.console().print(display.make_table("group~", "filter~", "members~", "returned>", rows=rows))
    click.echo(display.count_of(len(found), "group"))


@sessions.command()
@click.argument("path", type=PATH)
@click.argument("client_id", metavar="CLIENT")
@json_option
def kick(path: Path, client_id: str, *, as_json: bool) -> None:
    """End the connection of CLIENT's session in PATH, as if it were lost; the session stays.

    For one whose program died: a program that has PATH open ends connections itself (`Sessions.kick`).
    """
    from topicstore.cli.terminal.display import print_json, visible

    with topicstore.open_existing(path, auto_compact=False) as db:
        kicked = db.sessions.kick(client_id)
    if as_json:
        print_json({"path": str(path), "client_id": client_id, "kicked": kicked})
    else:
        click.echo(f"{visible(client_id)} {'is disconnected' if kicked else 'was not connected'}")


@sessions.command()
@click.argument("path", type=PATH)
@click.argument("client_id", metavar="CLIENT")
@yes_option
@json_option
def expire(path: Path, client_id: str, *, yes: bool, as_json: bool) -> None:
    """End the session of CLIENT in PATH now, for good: its subscriptions, and what it had not acknowledged.

    Asks first; where nobody can answer, --yes is needed.
    """
    from topicstore.cli.terminal.display import print_json, visible

    check_can_ask("ending a session", yes=yes)
    with topicstore.open_existing(path, auto_compact=False) as db:
        db.sessions.inspect(client_id)  # first, so that nobody is asked about one that is not there
        if not yes and not confirmed(f"End the session of {visible(client_id)}?", "nothing was ended"):
            return
        db.sessions.expire(client_id)
    if as_json:
        print_json({"path": str(path), "client_id": client_id, "expired": True})
    else:
        click.echo(f"the session of {visible(client_id)} is over")


def _plain(info: SessionInfo) -> dict[str, object]:
    subscriptions = [{"filter": text, **msgspec.structs.asdict(options)} for text, options in info.subscriptions]
    return {**attrs.asdict(info, recurse=False), "subscriptions": subscriptions}


def _state(info: SessionInfo) -> str:
    return "connected" if info.connected else "away"


def _expiry(info: SessionInfo) -> str:
    from topicstore.cli.terminal.display import short_time

    if info.expires is not None:
        return short_time(info.expires)
    if info.expiry_interval is None:
        return "never"
    return f"{span_text(round(info.expiry_interval * 1e6))} after it disconnects"
