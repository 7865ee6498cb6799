"""Publishing by clients through their sessions: messages of one client or many, with one commit for each shard.

Messages are given as objects or as columns.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Iterable, Mapping, Sequence

import attrs
import numpy as np

from topicstore.contract.batch import FIELDS, MessageBatch
from topicstore.contract.columns import to_list
from topicstore.contract.errors import InvalidMessageError, StateConflictError, TopicstoreError
from topicstore.contract.model import Message
from topicstore.contract.validation import check_equal_lengths
from topicstore.pubsub.publish import PublishResult

from .in_flight import MAX_PACKET_ID
from .model import PublishedRows
from .qos2 import NewIds, Refused, adopt_committed, check_sessions, exchanges_of, new_messages, writes_of
from .registry import SessionRegistry
from .session import Session

__all__ = [
    "Incoming",
    "publish",
]


@attrs.frozen
class Incoming:
    """Messages by row, with the columns that sessions check. The other fields are checked on publishing."""

    messages: Sequence[Message] | MessageBatch
    topics: list[str]
    client_ids: list[str]
    qos: list[int]

    @classmethod
    def of_objects(cls, messages: Sequence[Message], refused: Refused, *, partial: bool) -> Incoming:
        """Return messages given as objects. Without ``partial``, a row that is no `Message` raises its error.

        With ``partial``, such rows are refused.
        """
        if not set(map(type, messages)) <= {Message}:
            messages = list(messages)
            for row, message in enumerate(messages):
                if not isinstance(message, Message):
                    error = InvalidMessageError(f"a {type(message).__name__} is not a Message", row)
                    if not partial:
                        raise error
                    refused[row], messages[row] = error, Message("", b"")
        return cls(messages, [m.topic for m in messages], [m.client_id for m in messages], [m.qos for m in messages])

    @classmethod
    def of_batch(cls, batch: MessageBatch) -> Incoming:
        """Return messages given as columns. Raises `InvalidMessageError` if the columns have different lengths."""
        check_equal_lengths(len(getattr(batch, name)) for name in FIELDS)
        return cls(batch, to_list(batch.topics), to_list(batch.client_ids), to_list(batch.qos))

    def __len__(self) -> int:
        return len(self.topics)

    def batch(self, rows: Sequence[int]) -> MessageBatch:
        """Return some rows as a checked batch. Raises `InvalidMessageError`."""
        if not isinstance(self.messages, MessageBatch):
            return MessageBatch.from_messages([self.messages[row] for row in rows])
        whole = len(rows) == len(self.topics)
        return (self.messages if whole else self.messages.take(np.array(rows, np.intp))).checked()

    def fault(self, row: int) -> TopicstoreError | None:
        """Return the error because of which a row alone can't be stored; None if it can be."""
        try:
            self.batch([row])
        except InvalidMessageError as bad:
            return type(bad)(bad.reason, row)
        return None


def publish(
    registry: SessionRegistry,
    sessions: Sequence[Session],
    messages: Incoming,
    ids: Sequence[int],
    refused: Refused,
    *,
    partial: bool,
) -> PublishedRows:
    """Publish messages as `Sessions.publish` does.

    sessions: the session of each message.
    ids:      the packet id of each message at QoS 2; 0 for a message without one.
    refused:  the rows that were refused before, with their errors; newly refused rows are added.

    Holds the locks of the QoS 2 exchanges of the packet ids, and not the mutex, while publishing.
    """
    _check_rows(sessions, messages, ids, refused, partial=partial)
    registry.load_filters()

    publishing = functools.partial(_publish, registry, sessions, messages, ids, refused, partial=partial)

    def locked() -> PublishedRows:
        check_sessions(registry, sessions, refused, partial=partial)
        return registry.mutex.released(publishing)

    exchanges = exchanges_of(sessions, ids, messages.qos)
    if exchanges:
        return registry.locks.hold((), locked, exchanges)
    check_sessions(registry, sessions, refused, partial=partial)  # without exchanges, no lock is needed
    return publishing()


def _publish(
    registry: SessionRegistry,
    sessions: Sequence[Session],
    messages: Incoming,
    ids: Sequence[int],
    refused: Refused,
    *,
    partial: bool,
) -> PublishedRows:
    result: PublishResult | None = None
    while result is None:
        failures: dict[int, TopicstoreError] | None = {} if registry.shared else None
        rows, new = new_messages(sessions, messages.qos, ids, _some(range(len(messages)), refused))
        try:
            result = registry.publisher.publish(messages.batch(rows), writes_of(registry, new), failures=failures)
        except InvalidMessageError as bad:
            _refuse_message(bad, sessions, messages, ids, rows, refused, partial=partial)
        except StateConflictError as conflict:
            _refuse_overtaken(registry, conflict, sessions, new, refused, partial=partial)
        except BaseException:
            adopt_committed(registry, new)
            registry.mutex.hold(registry.end_moved)
            raise
    if failures:
        new = _refuse_failed(registry, failures, sessions, rows, new, refused, partial=partial)
    for session, some in new.items():
        session.incoming.update(some)
    published = set(rows) if failures or len(rows) + len(refused) < len(messages) else None
    repeated = [] if published is None else [row for row in range(len(messages)) if row not in published]
    return PublishedRows(
        result=result,
        matched=_matched(registry, messages, refused),
        repeated=frozenset(repeated).difference(refused),
        refused=refused,
    )


def _refuse_failed(
    registry: SessionRegistry,
    failures: Mapping[int, TopicstoreError],
    sessions: Sequence[Session],
    rows: Sequence[int],
    new: NewIds,
    refused: Refused,
    *,
    partial: bool,
) -> NewIds:
    """Refuse the published rows of shards that have failed; return the packet ids of the other shards.

    Sessions of shards that have moved end, and so do those whose packet ids may still be stored.
    """
    shard_of = registry.states.shard_of
    failed = {session: ids for session, ids in new.items() if shard_of(session.client_id) in failures}
    for shard, failure in failures.items():
        _lose(registry, [session for session in failed if shard_of(session.client_id) == shard], failure)
    adopt_committed(registry, {session: ids for session, ids in failed.items() if session.ended is None})
    registry.mutex.hold(registry.end_moved)
    if not partial:
        raise next(iter(failures.values()))
    for row in rows:
        why = failures.get(shard_of(sessions[row].client_id))
        if why is not None:
            refused[row] = why
    return {session: ids for session, ids in new.items() if session not in failed}


def _lose(registry: SessionRegistry, sessions: Sequence[Session], failure: TopicstoreError) -> None:
    registry.mutex.hold(lambda: registry.commits.lose(sessions, failure))


def _refuse_message(
    bad: InvalidMessageError,
    sessions: Sequence[Session],
    messages: Incoming,
    ids: Sequence[int],
    rows: Sequence[int],
    refused: Refused,
    *,
    partial: bool,
) -> None:
    """Refuse the message that an error names, and all other messages that are invalid.

    All of them are searched for here, because every attempt to publish costs as much as the whole batch.
    """
    if bad.index is None:
        raise bad
    error = type(bad)(bad.reason, rows[bad.index])
    if not partial:
        raise error from bad
    refused[rows[bad.index]] = error
    begun: set[tuple[Session, int]] = set()
    for row in list(_some(range(len(messages)), refused)):
        exchange = (sessions[row], ids[row]) if ids[row] and messages.qos[row] == 2 else None
        if exchange is not None and (ids[row] in sessions[row].incoming or exchange in begun):
            continue  # a repetition is left out, even if the message is invalid
        fault = messages.fault(row)
        if fault is not None:
            refused[row] = fault
        elif exchange is not None:
            begun.add(exchange)


def _refuse_overtaken(
    registry: SessionRegistry,
    conflict: StateConflictError,
    sessions: Sequence[Session],
    new: NewIds,
    refused: Refused,
    *,
    partial: bool,
) -> None:
    """Refuse the rows of the sessions that were opened elsewhere. Raises ``conflict`` if there are none."""
    overtaken = registry.mutex.hold(lambda: registry.commits.taken_over(new))
    if not overtaken:
        raise conflict
    for taken in overtaken.values():
        taken.__cause__ = conflict
        if not partial:
            raise taken
    refused.update({row: overtaken[session] for row, session in enumerate(sessions) if session in overtaken})


def _matched(registry: SessionRegistry, messages: Incoming, refused: Refused) -> list[bool]:
    """Return for each message whether a subscription matches, or may match; each topic is looked up once."""
    wants, following = registry.filters.match, registry.dispatcher.hub.matching
    topics = messages.topics
    if registry.shared:  # subscribers on other sites are not known here
        return [True] * len(topics)
    if refused:
        topics = ["" if row in refused else topic for row, topic in enumerate(topics)]
    known = {topic: bool(topic and (wants(topic) or following(topic))) for topic in set(topics)}
    return list(map(known.__getitem__, topics))


# --- checks ---


def _check_rows(
    sessions: Sequence[Session],
    messages: Incoming,
    ids: Sequence[int],
    refused: Refused,
    *,
    partial: bool,
) -> None:
    """Refuse messages of a client other than their session's, and invalid packet ids."""
    if not len(messages):
        return
    # One check of whole columns is much faster than a check of each row.
    mine = all(map(operator.eq, messages.client_ids, [session.client_id for session in sessions]))
    if mine and set(map(type, ids)) == {int} and min(ids) >= 0 and max(ids) <= MAX_PACKET_ID:
        return
    for row, session in enumerate(sessions):
        if row in refused:
            continue
        try:
            _check_row(session, messages, ids[row], row)
        except TopicstoreError as error:
            if not partial:
                raise
            refused[row] = error


def _check_row(session: Session, messages: Incoming, packet_id: int, row: int) -> None:
    if messages.client_ids[row] != session.client_id:
        raise InvalidMessageError(f"a session publishes messages of its own client, {session.client_id!r}", row)
    if messages.qos[row] == 2 and (type(packet_id) is not int or not 0 <= packet_id <= MAX_PACKET_ID):
        raise InvalidMessageError(f"a packet id is a number from 1 to {MAX_PACKET_ID:,}, not {packet_id!r}", row)


def _some(rows: Iterable[int], refused: Refused) -> Iterable[int]:
    """Return the rows that are not refused."""
    return (row for row in rows if row not in refused) if refused else rows
