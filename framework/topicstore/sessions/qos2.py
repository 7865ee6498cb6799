"""Exactly-once storing of the messages that clients publish at QoS 2, and PUBRECs and PUBRELs of many sessions.

The packet id of such a message is committed in the same engine write as the message. Until its PUBREL comes, a message
with the same id is a repetition (MQTT 5, section 4.3.3). An exchange is identified by session and packet id. The
callers hold the locks of the exchanges, which therefore don't change before the commit.

In calls for many sessions, rows of sessions that have ended are refused.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Sequence
from itertools import repeat

from topicstore.contract.errors import InvalidArgumentError, TopicstoreError
from topicstore.contract.state import StateWrite
from topicstore.shard.state import FrameworkWrite

from .batches import Acknowledged
from .context import SessionContext
from .live_session import LiveSession
from .records import VERSION, put_all

__all__ = [
    "NewIds",
    "Refused",
    "adopt_committed",
    "check_sessions",
    "exchanges_of",
    "free_all",
    "new_messages",
    "pubrel",
    "receive_all",
    "writes_of",
]

Refused = dict[int, TopicstoreError]
"""The errors of the rows that were refused."""


def check_sessions(context: SessionContext, lives: Iterable[LiveSession], refused: Refused, *, partial: bool) -> None:
    """Refuse the rows of sessions that have ended, and record for keep alive that the other clients sent a packet.

    Refused rows are added to ``refused``; without ``partial``, the first error is raised.
    """
    context.dispatcher.check_open()
    now = context.dispatcher.steady()
    ended: dict[LiveSession, TopicstoreError] = {}
    for live in set(lives):
        if live.keep_alive:
            live.seen = now
        if live.ended is not None:
            try:
                live.check()
            except TopicstoreError as error:
                if not partial:
                    raise
                ended[live] = error
    if ended:
        for row, live in enumerate(lives):
            if live in ended:
                refused.setdefault(row, ended[live])


NewIds = dict[LiveSession, dict[int, None]]
"""The packet ids that come into use, by session."""


def exchanges_of(
    lives: Sequence[LiveSession], ids: Sequence[int], qos: Sequence[int] | None = None
) -> list[tuple[LiveSession, int]]:
    """Return the exchanges to lock: of the rows with a packet id that are of QoS 2 (without ``qos``, all of them)."""
    rows = zip(lives, ids, repeat(2) if qos is None else qos, strict=False)
    return [(live, number) for live, number, level in rows if level == 2 and number and type(number) is int]


def new_messages(
    lives: Sequence[LiveSession], qos: Sequence[int], ids: Sequence[int], rows: Iterable[int]
) -> tuple[list[int], NewIds]:
    """Return the rows that are not repetitions, and the packet ids that they bring into use."""
    chosen: list[int] = []
    new: NewIds = {}
    for row in rows:
        packet_id = ids[row]
        if packet_id and qos[row] == 2:
            live = lives[row]
            if packet_id in live.incoming:
                continue
            some = new.get(live)
            if some is None:
                new[live] = {packet_id: None}
            elif packet_id in some:
                continue
            else:
                some[packet_id] = None
        chosen.append(row)
    return chosen, new


def writes_of(context: SessionContext, new: NewIds) -> dict[int, list[StateWrite]]:
    """Return, by shard, the writes that commit packet ids, conditional on the guards of their sessions."""
    shard_of = context.states.shard_of
    guards: dict[int, list[StateWrite]] = {}
    keys: dict[int, list[bytes]] = {}
    for live, ids in new.items():
        if not live.stored:
            continue
        shard = shard_of(live.client_id)
        guards.setdefault(shard, []).append(live.guard)
        keys.setdefault(shard, []).extend(map(live.keys.incoming, ids))
    return {shard: guards[shard] + put_all(keys[shard], (VERSION,)) for shard in guards}


def adopt_committed(context: SessionContext, new: NewIds) -> None:
    """After a failed call, read which packet ids were committed nevertheless: only some of the shards may have failed.

    For a session that is kept in memory this can't be known; none of its new ids is in use after a failed call.
    """
    for live, ids in new.items():
        if not live.stored:
            continue
        keys = list(map(live.keys.incoming, ids))
        with contextlib.suppress(TopicstoreError):  # a shard that can't be read takes no messages either
            stored = context.states.states[context.states.shard_of(live.client_id)].get_many(keys)
            live.incoming.update((packet_id, None) for packet_id, value in zip(ids, stored, strict=True) if value)


def pubrel(
    context: SessionContext, lives: Sequence[LiveSession], ids: Sequence[int], refused: Refused, *, partial: bool
) -> Acknowledged:
    """Free the packet ids of received PUBRELs, with one commit for each shard; ``refused`` rows were refused before."""
    freed: NewIds = {}
    known: list[bool] = []
    for row, (live, packet_id) in enumerate(zip(lives, ids, strict=True)):
        used = row not in refused and packet_id in live.incoming and packet_id not in freed.get(live, ())
        known.append(used)
        if used:
            freed.setdefault(live, {})[packet_id] = None
    changes = {live: [live.guard, *_removals(live, some)] for live, some in freed.items() if live.stored}
    errors = context.commits.together(changes)
    for live, some in freed.items():
        if live not in errors:
            for packet_id in some:
                live.incoming.pop(packet_id, None)
    for failure in errors.values():
        if not partial:
            raise failure
    if errors:
        known = [used and live not in errors for live, used in zip(lives, known, strict=True)]
    failed = {row: errors[live] for row, live in enumerate(lives) if live in errors}
    return Acknowledged(known=known, refused=failed | refused)


def _removals(live: LiveSession, ids: Iterable[int]) -> list[StateWrite]:
    return [FrameworkWrite(key, None) for key in map(live.keys.incoming, ids)]


def free_all(
    context: SessionContext, lives: Sequence[LiveSession], ids: Sequence[int], *, partial: bool
) -> Acknowledged:
    """Free the packet ids of incoming PUBRELs; see `Sessions.pubrel`."""
    refused = _checked(ids, partial=partial)

    def free() -> Acknowledged:
        check_sessions(context, lives, refused, partial=partial)
        return pubrel(context, lives, ids, refused, partial=partial)

    return context.locks.hold((), free, exchanges_of(lives, ids))


def receive_all(
    context: SessionContext, lives: Sequence[LiveSession], ids: Sequence[int], *, accepted: bool, partial: bool
) -> Acknowledged:
    """Record PUBRECs; see `Sessions.pubrec`."""
    refused = _checked(ids, partial=partial)
    check_sessions(context, lives, refused, partial=partial)
    known = [
        row not in refused and live.window.pubrec(packet_id, accepted=accepted)
        for row, (live, packet_id) in enumerate(zip(lives, ids, strict=True))
    ]
    for live in {live for live, due in zip(lives, known, strict=True) if due}:
        live.acknowledged()
    return Acknowledged(known=known, refused=refused)


def _checked(ids: Sequence[int], *, partial: bool) -> Refused:
    """Return the errors, by row, of packet ids that are no integers; without ``partial``, raise the first."""
    refused: Refused = {}
    for row, packet_id in enumerate(ids):
        if type(packet_id) is not int:
            refused[row] = InvalidArgumentError(f"row {row}: a packet id is a number, not {packet_id!r}")
            if not partial:
                raise refused[row]
    return refused
