"""The command ``topicstore sessions``, which lists, shows and ends durable sessions."""

from __future__ import annotations

from collections.abc import Mapping

import attrs
import click
import msgspec

from topicstore.cli.command import Answer, GroupWithDefault, answers
from topicstore.cli.connecting import AnyDatabase
from topicstore.cli.terminal.display import count_of, fields, make_table, short_time, visible
from topicstore.cli.terminal.options import or_end, yes_option
from topicstore.contract.positions import span_text
from topicstore.sessions import SessionInfo
from topicstore.storage.counting.lag import Lag

__all__ = ["sessions"]

_BEHIND = ("messages behind>", "time behind>")
_client_argument = click.argument("client_id", metavar="CLIENT")


@click.group(cls=GroupWithDefault, default="list", subcommand_metavar="[list|show|groups|kick|expire] PATH …")
def sessions() -> None:
    """List, show or end durable sessions, which wait for clients that are away. `sessions PATH` lists them."""


@sessions.command("list")
@answers("r")
@click.option("--lag/--no-lag", default=True, help="Tell how far each is behind, which takes longer.")
def list_(db: AnyDatabase, *, lag: bool) -> Answer:
    """List the sessions in PATH, sorted by client id, with their lag behind the stored messages.

    A number with a ~ is an estimate.
    """
    found, lags = list(db.sessions), db.sessions.lag() if lag else {}
    yield {"sessions": [_plain(one, lags.get(one.client_id, {})) for one in found]}
    rows = []
    for one in found:
        behind = _lag(*lags.get(one.client_id, {}).values()) if lag else ()  # the session may have ended meanwhile
        rows.append((one.client_id, _state(one), short_time(one.created), _expiry(one), *behind))
    yield make_table("client~", "state", "created", "expires", *(_BEHIND if lag else ()), rows=rows)
    yield count_of(len(found), "session")


@sessions.command()
@answers("r")
@_client_argument
def show(db: AnyDatabase, client_id: str) -> Answer:
    """Show the session of CLIENT in PATH: its subscriptions, the lag of each, and the messages in flight.

    A number with a ~ is an estimate.
    """
    one, lags = db.sessions[client_id], db.sessions.lag(client_id)[client_id]
    yield _plain(one, lags)
    yield fields(
        [
            ("client", one.client_id),
            ("state", _state(one)),
            ("created", short_time(one.created)),
            ("expires", _expiry(one)),
            ("will", "none is pending" if one.will_due is None else f"published {short_time(one.will_due)}"),
            ("in flight", one.in_flight),
            ("awaiting PUBREL", one.awaiting_pubrel),
        ]
    )
    rows = [
        (text, o.qos, o.no_local, o.retain_as_published, o.identifier or None, *_lag(lags.get(text, Lag.none())))
        for text, o in one.subscriptions
    ]
    yield ""
    headers = ("filter~", "QoS>", "no local", "retain as published", "identifier>", *_BEHIND)
    yield make_table(*headers, title="Subscriptions", rows=rows)


@sessions.command()
@answers("r")
def groups(db: AnyDatabase) -> Answer:
    """List the shared subscriptions in PATH, with the members of each."""
    found = list(db.sessions.groups)
    yield {"groups": [attrs.asdict(one) for one in found]}
    rows = [
        (one.name, one.topic_filter, ", ".join(member.client_id for member in one.members), one.returned)
        for one in found
    ]
    yield make_table("group~", "filter~", "members~", "returned>", rows=rows)
    yield count_of(len(found), "group")


@sessions.command()
@answers("r+", auto_compact=False)
@_client_argument
def kick(db: AnyDatabase, client_id: str) -> Answer:
    """End the connection of CLIENT's session in PATH, as if it were lost; the session stays.

    A server that has PATH open notifies the client. If no program has PATH open, the command ends the connection
    that a program that died has left. A program that has PATH open must end connections itself (`Sessions.kick`).
    """
    kicked = db.sessions.kick(client_id)
    yield {"client_id": client_id, "kicked": kicked}
    yield f"{visible(client_id)} {'is disconnected' if kicked else 'was not connected'}"


@sessions.command()
@answers("r+", auto_compact=False)
@_client_argument
@yes_option("ending a session")
def expire(db: AnyDatabase, client_id: str, *, yes: bool) -> Answer:
    """Remove the session of CLIENT in PATH for good, with its subscriptions and its unacknowledged messages.

    The command asks for confirmation; without a terminal, --yes is required.
    """
    db.sessions[client_id]  # raises an error for a missing session, before the question
    if not yes:
        or_end(f"End the session of {visible(client_id)}?", "nothing was ended")
    db.sessions.expire(client_id)
    yield {"client_id": client_id, "expired": True}
    yield f"the session of {visible(client_id)} is over"


def _plain(info: SessionInfo, lags: Mapping[str, Lag]) -> dict[str, object]:
    subscriptions = [
        {"filter": text, **msgspec.structs.asdict(options), "lag": attrs.asdict(lags[text]) if text in lags else None}
        for text, options in info.subscriptions
    ]
    return {**attrs.asdict(info, recurse=False), "subscriptions": subscriptions}


def _lag(*lags: Lag) -> tuple[str, str]:
    """Return, as texts, the sum of lags: the messages and the time that a session is behind."""
    lag = sum(lags, Lag.none())
    messages = f"{'' if lag.exact else '~'}{lag.messages:,}"
    return messages, span_text(round(lag.seconds * 1e6)) if lag.messages else ""


def _state(info: SessionInfo) -> str:
    return "connected" if info.connected else "away"


def _expiry(info: SessionInfo) -> str:
    if info.expires is not None:
        return short_time(info.expires)
    if info.expiry_interval is None:
        return "never"
    return f"{span_text(round(info.expiry_interval * 1e6))} after it disconnects"
