"""The command ``topicstore sessions``, which lists, shows and ends durable sessions."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import attrs
import click
import msgspec

from topicstore.cli.connecting import opened
from topicstore.cli.terminal.asking import check_can_ask, confirmed, yes_option
from topicstore.cli.terminal.groups import GroupWithDefault
from topicstore.cli.terminal.options import PATH, json_option
from topicstore.contract.positions import span_text
from topicstore.sessions import SessionInfo
from topicstore.storage.lag import Lag

__all__ = ["sessions"]

_BEHIND = ("messages behind>", "time behind>")


@click.group(cls=GroupWithDefault, default="list", subcommand_metavar="[list|show|groups|kick|expire] PATH …")
def sessions() -> None:
    """List, show or end durable sessions, which wait for clients that are away. `sessions PATH` lists them."""


@sessions.command("list")
@click.argument("path", type=PATH)
@click.option("--lag/--no-lag", default=True, help="Tell how far each is behind, which takes longer.")
@json_option
def list_(path: Path, *, lag: bool, as_json: bool) -> None:
    """List the sessions in PATH, sorted by client id, and how far each is behind the stored messages.

    A number with a ~ is an estimate.
    """
    from topicstore.cli.terminal import display

    with opened(path, "r") as db:
        found, lags = list(db.sessions), db.sessions.lag() if lag else {}
    if as_json:
        plain = [_plain(one, lags.get(one.client_id, {})) for one in found]
        display.print_json({"path": str(path), "sessions": plain})
        return
    rows = []
    for one in found:
        behind = _lag(*lags.get(one.client_id, {}).values()) if lag else ()  # it may have ended meanwhile
        rows.append((one.client_id, _state(one), display.short_time(one.created), _expiry(one), *behind))
    headers = ("client~", "state", "created", "expires", *(_BEHIND if lag else ()))
    display.console().print(display.make_table(*headers, rows=rows))
    click.echo(display.count_of(len(found), "session"))


@sessions.command()
@click.argument("path", type=PATH)
@click.argument("client_id", metavar="CLIENT")
@json_option
def show(path: Path, client_id: str, *, as_json: bool) -> None:
    """Show the session of CLIENT in PATH: its subscriptions, how far each is behind, and what is in flight.

    A number with a ~ is an estimate.
    """
    from topicstore.cli.terminal import display

    with opened(path, "r") as db:
        one, lags = db.sessions[client_id], db.sessions.lag(client_id)[client_id]
    if as_json:
        display.print_json({"path": str(path), **_plain(one, lags)})
        return
    pairs = [
        ("client", one.client_id),
        ("state", _state(one)),
        ("created", display.short_time(one.created)),
        ("expires", _expiry(one)),
        ("will", "none is pending" if one.will_due is None else f"published {display.short_time(one.will_due)}"),
        ("in flight", one.in_flight),
        ("awaiting PUBREL", one.awaiting_pubrel),
    ]
    out = display.console()
    out.print(display.fields(pairs))
    rows = [
        (text, o.qos, o.no_local, o.retain_as_published, o.identifier or None, *_lag(lags.get(text, Lag.none())))
        for text, o in one.subscriptions
    ]
    click.echo()
    headers = ("filter~", "QoS>", "no local", "retain as published", "identifier>", *_BEHIND)
    out.print(display.make_table(*headers, title="Subscriptions", rows=rows))


@sessions.command()
@click.argument("path", type=PATH)
@json_option
def groups(path: Path, *, as_json: bool) -> None:
    """List the shared subscriptions in PATH, and who shares each."""
    from topicstore.cli.terminal import display

    with opened(path, "r") as db:
        found = list(db.sessions.groups)
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

    A server that has PATH open tells the client. Without one, it is for a client whose program died; a program that
    has PATH open ends connections itself (`Sessions.kick`).
    """
    from topicstore.cli.terminal.display import print_json, visible

    with opened(path, "r+", auto_compact=False) as db:
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
    """End the session of CLIENT in PATH now, for good: its subscriptions, and its unacknowledged messages.

    Asks first; without a terminal, --yes is needed.
    """
    from topicstore.cli.terminal.display import print_json, visible

    check_can_ask("ending a session", yes=yes)
    with opened(path, "r+", auto_compact=False) as db:
        db.sessions[client_id]  # before asking, so that no question is asked about a missing session
        if not yes and not confirmed(f"End the session of {visible(client_id)}?", "nothing was ended"):
            return
        db.sessions.expire(client_id)
    if as_json:
        print_json({"path": str(path), "client_id": client_id, "expired": True})
    else:
        click.echo(f"the session of {visible(client_id)} is over")


def _plain(info: SessionInfo, lags: Mapping[str, Lag]) -> dict[str, object]:
    subscriptions = [
        {"filter": text, **msgspec.structs.asdict(options), "lag": attrs.asdict(lags[text]) if text in lags else None}
        for text, options in info.subscriptions
    ]
    return {**attrs.asdict(info, recurse=False), "subscriptions": subscriptions}


def _lag(*lags: Lag) -> tuple[str, str]:
    """Return, for people, the messages and the time that a session is behind by all of these."""
    lag = sum(lags, Lag.none())
    messages = f"{'' if lag.exact else '~'}{lag.messages:,}"
    return messages, span_text(round(lag.seconds * 1e6)) if lag.messages else ""


def _state(info: SessionInfo) -> str:
    return "connected" if info.connected else "away"


def _expiry(info: SessionInfo) -> str:
    from topicstore.cli.terminal.display import short_time

    if info.expires is not None:
        return short_time(info.expires)
    if info.expiry_interval is None:
        return "never"
    return f"{span_text(round(info.expiry_interval * 1e6))} after it disconnects"
