"""Making, changing, ending and resuming subscriptions. Unless stated, the caller holds the sessions' mutex.

Members of a shared subscription must be stored, so a session that was kept in memory becomes a stored one. When a
member ends, also because the process dies, the messages that it received but did not acknowledge go to another member.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from functools import partial

import attrs

from topicstore.contract.errors import InvalidArgumentError, InvalidFilterError, ShardElsewhereError, TopicstoreError
from topicstore.contract.state import StateWrite
from topicstore.contract.topics import TopicFilter
from topicstore.runtime.closing import do_all
from topicstore.shard.state import FrameworkWrite

from .cursors import FilterCursor
from .model import Start, SubscribeOptions, SubscribeResult, is_shared, places_of, reached, read_filter
from .qos2 import Refused, check_sessions
from .records import VERSION, OptionsPeriod, SubscriptionRecord, put_all
from .registry import SessionRegistry
from .retained_cursor import RetainedCursor
from .session import Session
from .session_store import encode_session
from .shared.cursor import SharedCursor

__all__ = [
    "begin_resuming",
    "resume",
    "resume_rows",
    "store",
    "subscribe_rows",
    "unsubscribe_rows",
]


def store(registry: SessionRegistry, session: Session) -> None:
    """Store a session and all its state with one commit, unless it is stored already. Raises the errors of writing.

    The expiry interval stays 0, so that nothing changes for the client.
    """
    if session.stored:
        return
    found = encode_session(session.client_id, session.stored_session.record)
    writes: list[StateWrite] = [
        *registry.states.change(session.client_id, None, found),
        *session.in_flight.everything(),
    ]
    for cursor in session.cursors.values():
        writes += cursor.everything()
    for sending in session.retained.values():
        writes += sending.everything()
    writes += put_all(list(map(session.keys.incoming, list(session.incoming))), (VERSION,))
    registry.states.write_for(session.client_id, writes)
    registry.states.counts.add(found.record.user, 1)
    session.stored_session, session.guard = found, found.guard
    session.in_flight.stored = True


_READ = 20
"""Number of stored subscriptions that are read in the time that starting one of them takes."""

_Asked = tuple[Session, TopicFilter, SubscribeOptions]
"""A subscription to make or to change: the session, the filter and the options."""


@attrs.frozen
class _Change:
    """A subscription that is being made or changed: its writes, and the calls after their commit or their failure."""

    created: bool
    writes: Sequence[StateWrite]
    done: Callable[[], object]
    undo: Callable[[], object]


def subscribe_rows(
    registry: SessionRegistry,
    sessions: Sequence[Session],
    wanted: Sequence[tuple[str, SubscribeOptions]],
    start: Start,
    *,
    partial: bool,
) -> list[SubscribeResult | TopicstoreError]:
    """Check all rows, then subscribe; see `Sessions.subscribe`. Acquires the sessions' locks."""
    try:
        registry.publisher.storage().check_readable()  # all shards, so that the session misses no message
    except ShardElsewhereError as elsewhere:
        if not partial:
            raise
        return [elsewhere] * len(sessions)
    refused: Refused = {}
    asked: dict[int, _Asked] = {}
    for row, (session, (text, options)) in enumerate(zip(sessions, wanted, strict=True)):
        try:
            if not isinstance(options, SubscribeOptions):
                raise InvalidArgumentError(f"row {row}: options are SubscribeOptions, not {options!r}")
            asked[row] = session, TopicFilter(text), options.checked()
        except TopicstoreError as error:
            if not partial:
                raise
            refused[row] = error

    def locked() -> list[SubscribeResult | TopicstoreError]:
        check_sessions(registry, sessions, refused, partial=partial)
        left = {row: one for row, one in asked.items() if row not in refused}
        for session, _, _ in left.values():
            resume(session)
        outcome = refused | _subscribe(registry, left, start, partial=partial)
        return [outcome[row] for row in range(len(sessions))]

    filters = [_followed(topic_filter) for _, topic_filter, _ in asked.values()]
    with nullcontext() if start is None else registry.replays.making():
        outcome = registry.dispatcher.following(filters, lambda: registry.locks.hold(dict.fromkeys(sessions), locked))
    return outcome if start is None else _noted(registry, sessions, outcome, partial=partial)


def _noted(
    registry: SessionRegistry,
    sessions: Sequence[Session],
    outcome: Sequence[SubscribeResult | TopicstoreError],
    *,
    partial: bool,
) -> list[SubscribeResult | TopicstoreError]:
    """Commit notes of the subscriptions that begin in the past, for other sites; return the results by row."""
    made = {session for session, one in zip(sessions, outcome, strict=True) if isinstance(one, SubscribeResult)}
    failures = registry.note_begun_in_past(made)
    for failure in () if partial else failures.values():
        raise failure
    return [failures.get(session, one) for session, one in zip(sessions, outcome, strict=True)]


def _followed(topic_filter: TopicFilter) -> TopicFilter:
    """Return the filter by which the messages of a subscription are read; of an invalid shared one, its whole text."""
    if not is_shared(topic_filter.text):
        return topic_filter
    try:
        return read_filter(topic_filter.text)
    except InvalidFilterError:  # `_share` raises the error, for the row
        return topic_filter


def _subscribe(
    registry: SessionRegistry, asked: Mapping[int, _Asked], start: Start, *, partial: bool
) -> dict[int, SubscribeResult | TopicstoreError]:
    """Make or change the subscriptions of the given rows; return by row the result, or the error.

    Without ``partial`` the first error is raised; an error before the commit changes nothing. If a filter occurs again
    for the same session, the later row is applied by a separate commit.
    """
    registry.dispatcher.listen_locked()  # earlier messages count for the old subscriptions and options
    outcome: dict[int, SubscribeResult | TopicstoreError] = {}
    left = dict(asked)
    while left:
        now: dict[int, _Asked] = {}
        seen: set[tuple[Session, str]] = set()
        for row, (session, topic_filter, options) in left.items():
            if (session, topic_filter.text) not in seen:
                seen.add((session, topic_filter.text))
                now[row] = session, topic_filter, options
        _subscribe_once(registry, now, start, outcome, partial=partial)
        left = {row: one for row, one in left.items() if row not in now}
    return outcome


def _subscribe_once(
    registry: SessionRegistry,
    asked: Mapping[int, _Asked],
    start: Start,
    outcome: dict[int, SubscribeResult | TopicstoreError],
    *,
    partial: bool,
) -> None:
    """Make or change subscriptions that all differ, with one commit for each shard."""
    changes: dict[int, _Change] = {}
    any_retained = len(asked) == 1 or registry.mutex.released(registry.retained.any)  # checked once
    asked = _stored_members(registry, asked, outcome, partial=partial)
    try:
        for row, (session, topic_filter, options) in asked.items():
            try:
                changes[row] = _prepare(registry, session, topic_filter, options, start, any_retained=any_retained)
            except TopicstoreError as error:
                if not partial:
                    raise
                outcome[row] = error
        writes: dict[Session, list[StateWrite]] = {}
        for row, change in changes.items():
            session = asked[row][0]
            writes.setdefault(session, [session.guard]).extend(change.writes)
        errors = registry.commits.together(writes)
    except BaseException:
        do_all([change.undo for change in changes.values()], "could not be undone")
        raise
    for row, change in changes.items():
        failure = errors.get(asked[row][0])
        if failure is None:
            change.done()
            outcome[row] = SubscribeResult(created=change.created)
        else:
            change.undo()
            outcome[row] = failure
    for failure in () if partial else errors.values():
        raise failure


def _stored_members(
    registry: SessionRegistry,
    asked: Mapping[int, _Asked],
    outcome: dict[int, SubscribeResult | TopicstoreError],
    *,
    partial: bool,
) -> Mapping[int, _Asked]:
    """Store the in-memory sessions that request a shared subscription; return the rows of which this didn't fail.

    Called before `_prepare`, which depends on whether a session is stored.
    """
    failed: dict[int, TopicstoreError] = {}
    for row, (session, topic_filter, _) in asked.items():
        if not session.stored and is_shared(topic_filter.text):
            try:
                store(registry, session)
            except TopicstoreError as failure:
                if not partial:
                    raise
                failed[row] = failure
    outcome.update(failed)
    return {row: one for row, one in asked.items() if row not in failed} if failed else asked


def _prepare(
    registry: SessionRegistry,
    session: Session,
    topic_filter: TopicFilter,
    options: SubscribeOptions,
    start: Start,
    *,
    any_retained: bool,
) -> _Change:
    known = session.cursors.get(topic_filter.text)
    if is_shared(topic_filter.text):
        return _share(registry, session, topic_filter.text, options, start)
    if isinstance(known, FilterCursor):
        return _change(registry, session, known, options, start, retained=any_retained and options.retain_handling == 0)
    retained = any_retained and options.retain_handling < 2
    return _add(registry, session, topic_filter, options, start, retained=retained)


def unsubscribe_rows(
    registry: SessionRegistry, sessions: Sequence[Session], filters: Sequence[str], *, partial: bool
) -> list[bool | TopicstoreError]:
    """End subscriptions with one commit for each shard; return by row whether there was one.

    Acquires the sessions' locks. Without ``partial`` the first error is raised, after the subscriptions of all other
    sessions have ended.
    """
    refused: Refused = {}

    def locked() -> list[bool | TopicstoreError]:
        check_sessions(registry, sessions, refused, partial=partial)
        outcome: dict[int, bool | TopicstoreError] = {**refused}
        ending: dict[Session, dict[str, FilterCursor | SharedCursor]] = {}
        for row, (session, topic_filter) in enumerate(zip(sessions, filters, strict=True)):
            if row not in refused:
                resume(session)
                cursor = session.cursors.get(topic_filter)
                outcome[row] = cursor is not None and topic_filter not in ending.get(session, ())
                if cursor is not None:
                    ending.setdefault(session, {})[topic_filter] = cursor
        errors = _end(registry, ending)
        for failure in () if partial else errors.values():
            raise failure
        there = [outcome[row] for row in range(len(sessions))]
        return [errors.get(session, one) if one is True else one for session, one in zip(sessions, there, strict=True)]

    return registry.locks.hold(dict.fromkeys(sessions), locked)


def _end(
    registry: SessionRegistry, ending: Mapping[Session, Mapping[str, FilterCursor | SharedCursor]]
) -> dict[Session, TopicstoreError]:
    """End subscriptions, by session and filter; return the errors of the sessions whose subscriptions all remain."""
    writes: dict[Session, list[StateWrite]] = {}
    errors: dict[Session, TopicstoreError] = {}
    for session, cursors in ending.items():
        keys, left = session.keys, list[StateWrite]()
        try:
            for cursor in cursors.values():
                if isinstance(cursor, SharedCursor):
                    left += registry.groups.left(cursor)  # the group takes over the places, which are removed below
        except TopicstoreError as failure:
            errors[session] = failure
        else:
            kinds = (keys.subscription, keys.place, keys.retained, keys.leases)
            gone = [FrameworkWrite(key(cursor.number), None) for cursor in cursors.values() for key in kinds]
            writes[session] = [session.guard, *gone, *left]
    errors |= registry.commits.together(writes)
    for session, cursors in ending.items():
        for topic_filter, cursor in () if session in errors else cursors.items():
            _forget(registry, session, topic_filter, cursor)
    return errors


def _forget(
    registry: SessionRegistry, session: Session, topic_filter: str, cursor: FilterCursor | SharedCursor
) -> None:
    """Stop reading a subscription, after its end was committed."""
    session.cursors.pop(topic_filter)
    for gone in (cursor, session.retained.pop(cursor.number, None)):
        if gone is not None:
            session.forget(gone)
            gone.close()
    if isinstance(cursor, SharedCursor):
        registry.groups.leave(cursor)
        registry.filters.remove(cursor.group.filter.topic_filter)
    elif cursor.needs_packet_id:
        registry.filters.remove(cursor.topic_filter)


def _add(
    registry: SessionRegistry,
    session: Session,
    topic_filter: TopicFilter,
    options: SubscribeOptions,
    start: Start,
    *,
    retained: bool,
) -> _Change:
    places = _places(registry, start)
    cursor = _cursor(registry, session, session.numbers, topic_filter, (OptionsPeriod(options),))
    session.numbers += 1

    def undo() -> None:
        session.forget(cursor)
        cursor.close()

    def added() -> None:
        session.cursors[topic_filter.text] = cursor
        session.merge_overlapping(cursor)
        if cursor.needs_packet_id:
            registry.filters.add(topic_filter)

    try:
        cursor.start(places)
        replays = start is not None
        return _stored(registry, session, cursor, added, undo, created=True, retained=retained, replays=replays)
    except BaseException:
        undo()
        raise


def _change(
    registry: SessionRegistry,
    session: Session,
    cursor: FilterCursor,
    options: SubscribeOptions,
    start: Start,
    *,
    retained: bool,
) -> _Change:
    periods, needed_packet_id = cursor.periods, cursor.needs_packet_id
    marks = registry.dispatcher.hub.watermarks()
    if start is not None:
        cursor.restart(options, places_of(start, marks, registry.dispatcher.hub, registry.instant))
    elif options != cursor.options:
        cursor.change(options, marks)

    def undo() -> None:
        if session.ended is None:  # an ended session has closed the cursor
            cursor.undo(periods)

    def changed() -> None:
        if cursor.needs_packet_id and not needed_packet_id:
            registry.filters.add(cursor.topic_filter)
        elif needed_packet_id and not cursor.needs_packet_id:
            registry.filters.remove(cursor.topic_filter)

    try:
        replays = start is not None
        return _stored(registry, session, cursor, changed, undo, created=False, retained=retained, replays=replays)
    except BaseException:
        undo()
        raise


def _share(registry: SessionRegistry, session: Session, text: str, options: SubscribeOptions, start: Start) -> _Change:
    """Join a shared subscription, or change this member's options."""
    if options.no_local:
        raise InvalidArgumentError("a shared subscription can't have no_local [MQTT-3.8.3-4]")
    known = session.cursors.get(text)
    if isinstance(known, SharedCursor):
        before = known.options
        known.change(options)
        return _Change(False, known.everything(), _nothing, partial(known.change, before))
    groups, places = registry.groups, _places(registry, start)
    guard = session.stored_session.record.guard
    cursor = groups.join(session.keys, session.numbers, text, options, places, session.wake, guard)
    session.numbers += 1

    def joined() -> None:
        session.cursors[text] = cursor
        cursor.committed()
        registry.filters.add(cursor.group.filter.topic_filter)
        cursor.group.attach(cursor)

    return _Change(True, cursor.everything(), joined, partial(groups.leave, cursor))


def _nothing() -> None:
    """Do nothing."""


def _places(registry: SessionRegistry, start: Start) -> list[int]:
    hub = registry.dispatcher.hub
    return places_of(start, hub.watermarks(), hub, registry.instant)


def _stored(
    registry: SessionRegistry,
    session: Session,
    cursor: FilterCursor,
    done: Callable[[], object],
    undo: Callable[[], object],
    *,
    created: bool,
    retained: bool,
    replays: bool,
) -> _Change:
    """Return the change that stores a subscription and, if retained messages match, starts sending them.

    ``replays``: whether the subscription begins in the past.
    """
    sending = None
    if retained and registry.mutex.released(lambda: registry.retained.may_match(cursor.topic_filter)):
        sending = RetainedCursor(session.keys, cursor, registry.retained, replays=replays)

    def stored() -> None:
        cursor.committed()
        if sending is not None:
            _send(session, sending)
        done()

    writes = [*cursor.everything(), *(() if sending is None else sending.everything())] if session.stored else []
    return _Change(created, writes, stored, undo)


def _send(session: Session, sending: RetainedCursor) -> None:
    """Start sending retained messages, replacing an unfinished sending of the same subscription."""
    session.forget(session.retained.get(sending.number, sending))
    session.retained[sending.number] = sending
    sending.begin()
    session.wake(sending)


def begin_resuming(registry: SessionRegistry, session: Session) -> None:
    """Prepare a session for `resume`, which loads its stored subscriptions. Until then it delivers nothing."""
    session.resuming = _resuming(registry, session)


def resume(session: Session, limit: int | None = None) -> int:
    """Load about ``limit`` of the remaining stored subscriptions, None: all of them; return the number loaded.

    After an error, the session can't be resumed any more.
    """
    done = 0
    while session.resuming is not None and (limit is None or done < limit):
        done += next(session.resuming)
    return done


def resume_rows(registry: SessionRegistry, sessions: Sequence[Session], limit: int) -> list[bool | TopicstoreError]:
    """Load about ``limit`` more stored subscriptions of sessions; see `Sessions.resume`. Acquires their locks."""
    refused: Refused = {}

    def locked() -> list[bool | TopicstoreError]:
        check_sessions(registry, sessions, refused, partial=True)
        outcome: list[bool | TopicstoreError] = []
        left, share = limit, max(limit // max(len(sessions), 1), 1)
        for row, session in enumerate(sessions):
            try:
                if row not in refused and left > 0:
                    left -= resume(session, min(share, left))
                outcome.append(refused.get(row) or session.resuming is None)
            except TopicstoreError as failure:
                outcome.append(failure)
        return outcome

    return registry.locks.hold(dict.fromkeys(sessions), locked)


def _resuming(registry: SessionRegistry, session: Session) -> Iterator[int]:
    """Load the stored subscriptions, and yield after each step its cost, in loaded subscriptions."""
    states, marks = registry.states, registry.dispatcher.hub.watermarks()
    ends = registry.dispatcher.hub.last_positions()
    stored = states.followed(session.client_id)
    for number in stored:
        session.numbers = number + 1
    yield len(stored) // _READ + 1
    for number, following in stored.items():
        record, place, sent = following()
        topic_filter = read_filter(record.topic_filter)
        followed = registry.mutex.released(partial(registry.dispatcher.follow, topic_filter))
        try:
            _load(registry, session, number, topic_filter, record, place, sent, marks, ends)
        finally:
            registry.dispatcher.unfollow(followed)
        yield 1
    session.resuming = None
    session.ask()
    yield 0


def _load(
    registry: SessionRegistry,
    session: Session,
    number: int,
    topic_filter: TopicFilter,
    record: SubscriptionRecord,
    place: list[int] | None,
    sent: str | None,
    marks: list[int],
    ends: list[int],
) -> None:
    """Load a stored subscription: its record, its place, and the last topic whose retained message was sent.

    topic_filter: the filter by which its messages are read.
    marks, ends:  by shard, the watermark and the last position when loading began.
    """
    text, options = record.topic_filter, record.periods[-1].options
    if is_shared(text):
        guard = session.stored_session.record.guard
        shared = registry.groups.join(session.keys, number, text, options, marks, session.wake, guard)
        session.cursors[text] = shared
        shared.group.attach(shared)
    else:
        cursor = _cursor(registry, session, number, topic_filter, record.periods)
        begun = marks if place is None or not cursor.needs_packet_id else place
        if any(map(operator.gt, begun, ends)):
            registry.catch_up(enumerate(begun))
            ends = registry.dispatcher.hub.last_positions()
        cursor.start(reached(begun, ends))
        cursor.committed()
        session.cursors[text] = cursor
        session.merge_overlapping(cursor)
        if sent is not None:
            registry.retained.may_match(cursor.topic_filter)  # raises an error if retained messages are unreadable
            _send(session, RetainedCursor(session.keys, cursor, registry.retained, replays=True, behind=sent))


def _cursor(
    registry: SessionRegistry,
    session: Session,
    number: int,
    topic_filter: TopicFilter,
    periods: tuple[OptionsPeriod, ...],
) -> FilterCursor:
    return FilterCursor(registry.dispatcher, session.keys, number, topic_filter, periods, session.wake)
