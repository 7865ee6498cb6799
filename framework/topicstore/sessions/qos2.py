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

from .model import Acknowledged
from .records import VERSION, put_all
from .registry import SessionRegistry
from .session import Session

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


def check_sessions(registry: SessionRegistry, sessions: Iterable[Session], refused: Refused, *, partial: bool) -> None:
    """Refuse the rows of sessions that have ended, and record for keep alive that the other clients sent a packet.

    Refused rows are added to ``refused``; without ``partial``, the first error is raised.
    """
    registry.dispatcher.check_open()
    ended: dict[Session, TopicstoreError] = {}
    for session in set(sessions):
        if session.keep_alive:
            session.seen = registry.dispatcher.steady()
        if session.ended is not None:
            try:
                session.check()
            except TopicstoreError as error:
                if not partial:
                    raise
                ended[session] = error
    if ended:
        for row, session in enumerate(sessions):
            if session in ended:
                refused.setdefault(row, ended[session])


NewIds = dict[Session, dict[int, None]]
"""The packet ids that come into use, by session."""


def exchanges_of(
    sessions: Sequence[Session], ids: Sequence[int], qos: Sequence[int] | None = None
) -> list[tuple[Session, int]]:
    """Return the exchanges to lock: those of rows that have a packet id and, if ``qos`` is given, are of QoS 2."""
    rows = zip(sessions, ids, repeat(2) if qos is None else qos, strict=False)
    return [(session, number) for session, number, level in rows if level == 2 and number and type(number) is int]


def new_messages(
    sessions: Sequence[Session], qos: Sequence[int], ids: Sequence[int], rows: Iterable[int]
) -> tuple[list[int], NewIds]:
    """Return the rows that are not repetitions, and the packet ids that they bring into use."""
    chosen: list[int] = []
    new: NewIds = {}
    for row in rows:
        packet_id = ids[row]
        if packet_id and qos[row] == 2:
            session = sessions[row]
            if packet_id in session.incoming:
                continue
            some = new.get(session)
            if some is None:
                new[session] = {packet_id: None}
            elif packet_id in some:
                continue
            else:
                some[packet_id] = None
        chosen.append(row)
    return chosen, new


def writes_of(registry: SessionRegistry, new: NewIds) -> dict[int, list[StateWrite]]:
    """Return, by shard, the writes that commit packet ids, conditional on the guards of their sessions."""
    shard_of = registry.states.shard_of
    guards: dict[int, list[StateWrite]] = {}
    keys: dict[int, list[bytes]] = {}
    for session, ids in new.items():
        if not session.stored:
            continue
        shard = shard_of(session.client_id)
        guards.setdefault(shard, []).append(session.guard)
        keys.setdefault(shard, []).extend(map(session.keys.incoming, ids))
    return {shard: guards[shard] + put_all(keys[shard], (VERSION,)) for shard in guards}


def adopt_committed(registry: SessionRegistry, new: NewIds) -> None:
    """After a failed call, read which packet ids were committed nevertheless: only some of the shards may have failed.

    For a session that is kept in memory this can't be known; none of its new ids is in use after a failed call.
    """
    for session, ids in new.items():
        if not session.stored:
            continue
        keys = list(map(session.keys.incoming, ids))
        with contextlib.suppress(TopicstoreError):  # an unreadable shard accepts no messages either
            stored = registry.states.states[registry.states.shard_of(session.client_id)].get_many(keys)
            session.incoming.update((packet_id, None) for packet_id, value in zip(ids, stored, strict=True) if value)


def pubrel(
    registry: SessionRegistry, sessions: Sequence[Session], ids: Sequence[int], refused: Refused, *, partial: bool
) -> Acknowledged:
    """Free the packet ids of received PUBRELs, with one commit for each shard; ``refused``: the rows refused before."""
    freed: NewIds = {}
    known: list[bool] = []
    for row, (session, packet_id) in enumerate(zip(sessions, ids, strict=True)):
        used = row not in refused and packet_id in session.incoming and packet_id not in freed.get(session, ())
        known.append(used)
        if used:
            freed.setdefault(session, {})[packet_id] = None
    changes = {session: [session.guard, *_removals(session, some)] for session, some in freed.items() if session.stored}
    errors = registry.commits.together(changes)
    for session, some in freed.items():
        if session not in errors:
            for packet_id in some:
                session.incoming.pop(packet_id, None)
    for failure in errors.values():
        if not partial:
            raise failure
    if errors:
        known = [used and session not in errors for session, used in zip(sessions, known, strict=True)]
    failed = {row: errors[session] for row, session in enumerate(sessions) if session in errors}
    return Acknowledged(known=known, refused=failed | refused)


def _removals(session: Session, ids: Iterable[int]) -> list[StateWrite]:
    return [FrameworkWrite(key, None) for key in map(session.keys.incoming, ids)]


def free_all(
    registry: SessionRegistry, sessions: Sequence[Session], ids: Sequence[int], *, partial: bool
) -> Acknowledged:
    """Free the packet ids of incoming PUBRELs; see `Sessions.pubrel`."""
    refused = _checked(ids, partial=partial)

    def free() -> Acknowledged:
        check_sessions(registry, sessions, refused, partial=partial)
        return pubrel(registry, sessions, ids, refused, partial=partial)

    return registry.locks.hold((), free, exchanges_of(sessions, ids))


def receive_all(
    registry: SessionRegistry, sessions: Sequence[Session], ids: Sequence[int], *, accepted: bool, partial: bool
) -> Acknowledged:
    """Record PUBRECs; see `Sessions.pubrec`."""
    refused = _checked(ids, partial=partial)
    check_sessions(registry, sessions, refused, partial=partial)
    known = [
        row not in refused and session.in_flight.pubrec(packet_id, accepted=accepted)
        for row, (session, packet_id) in enumerate(zip(sessions, ids, strict=True))
    ]
    for session in {session for session, due in zip(sessions, known, strict=True) if due}:
        session.acknowledged()
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
