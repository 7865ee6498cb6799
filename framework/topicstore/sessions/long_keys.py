"""Migration of keys with long client ids, written by older releases, to digests (`topicstore.sessions.records`).

The session's own record is replaced last: if the process dies before, the next opening finds it and continues.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from topicstore.contract.checksums import add_checksum, strip_checksum
from topicstore.contract.errors import CorruptionError
from topicstore.contract.state import StateWrite
from topicstore.shard.state import FrameworkWrite, ShardState
from topicstore.storage.storage import Storage

from .locks import Around
from .records import (
    EXPIRY,
    LONGEST,
    NEVER,
    SESSION,
    VERSION,
    WILL,
    Keys,
    SessionRecord,
    decode,
    owner_in,
    owner_of,
    put,
)
from .session_store import SessionState, encode_session, will_key
from .shared.records import MEMBER

__all__ = ["opened"]

_BYTES = 4 << 20
"""Approximate size of one write in bytes."""


def _clients(state: ShardState) -> list[str]:
    """Return the long client ids that occur in keys of sessions of a shard."""
    return [owner_in(key, SESSION) for key, _ in state.scan(SESSION) if len(key) > len(SESSION) + LONGEST]


def _replace_all(states: Sequence[ShardState]) -> None:
    """Replace the keys of all sessions with long client ids, and of their memberships in shared subscriptions."""
    found = [(state, client_id) for state in states for client_id in _clients(state)]
    for state in states if found else ():
        _write_in_parts(state, _members(state))
    for state, client_id in found:
        _replace(state, client_id)


def opened(storage: Storage, released: Around) -> SessionState:
    """Return the stored sessions of a database. If the database is writable, long keys are replaced first."""
    if storage.mode is None:
        states = [storage.state(shard) for shard in range(len(storage.shards))]
        _replace_all([state for state in states if storage.shards[state.shard].writer.owned])
        return SessionState(storage, states, released)
    states = [ShardState(shard.number, shard.writer.open_engine, _write_nothing) for shard in storage.shards]
    found = SessionState(storage, states, released)
    found.old = frozenset(client_id for state in states for client_id in _clients(state))
    return found


def _write_nothing(writes: Iterable[StateWrite]) -> None:
    """Discard the clean-up of a read-only database; a process that opens it for writing repeats the clean-up."""


def _replace(state: ShardState, client_id: str) -> None:
    old, new = Keys(client_id, old=True), Keys(client_id)
    stored = state.get(old.session)
    if stored is None or new.name is None:
        return
    state.write([put(new.name, (VERSION, client_id))])
    prefixes = zip(old.prefixes().values(), new.prefixes().values(), strict=True)
    _write_in_parts(
        state,
        (
            write
            for before, after in prefixes
            for key, value in state.scan(before)
            for write in _moved(key, value, after + key[len(before) :])
        ),
    )
    record = decode(old.session, stored, SessionRecord)
    single = [(old.live, new.live), (will_key(old), will_key(new))]
    single += [
        (old.timer(time, kind), new.timer(time, kind))
        for time, kind in ((record.expires, EXPIRY), (record.will_due, WILL))
        if time != NEVER
    ]
    last: list[StateWrite] = [
        write
        for before, after in single
        if (value := state.get(before)) is not None
        for write in _moved(before, value, after)
    ]
    session = encode_session(client_id, record).stored
    state.write([*last, FrameworkWrite(new.session, session), FrameworkWrite(old.session, None, expect=stored)])


def _members(state: ShardState) -> Iterator[StateWrite]:
    for key, value in state.scan(MEMBER):
        group, _, client = key.rpartition(b"\0")
        if len(client) > LONGEST:
            yield from _moved(key, value, b"%b\0%b" % (group, owner_of(client.decode())))


def _moved(before: bytes, value: bytes, after: bytes) -> list[StateWrite]:
    """Return the writes that move a value to another key. A corrupt value is moved unchanged, and stays corrupt."""
    try:
        moved = add_checksum(after, strip_checksum(before, value))
    except CorruptionError:
        moved = value
    return [FrameworkWrite(after, moved), FrameworkWrite(before, None)]


def _write_in_parts(state: ShardState, writes: Iterable[StateWrite]) -> None:
    part: list[StateWrite] = []
    size = 0
    for write in writes:
        part.append(write)
        size += len(write.key) + len(write.value or b"")
        if size > _BYTES and write.value is None:  # a commit ends after a whole move: a put and a delete
            state.write(part)
            part, size = [], 0
    if part:
        state.write(part)
