"""Answers the requests of other sites about shards that they don't keep (`topicstore.shard.elsewhere`).

The asking site runs its own plugins on the answer, so messages are read in their stored form, without plugins.
"""

from __future__ import annotations

import time
from itertools import chain

import msgspec

from topicstore.contract.errors import (
    GenerationArchivedError,
    GenerationDroppedError,
    InvalidCursorError,
    PlaceAheadError,
)
from topicstore.contract.replay_plan import TimeRange
from topicstore.contract.requests import ReadRequest
from topicstore.contract.topics import TopicFilter
from topicstore.shard.elsewhere import (
    AskBegin,
    AskCounts,
    AskCursor,
    AskEnd,
    AskInfo,
    AskNewest,
    AskNext,
    AskPlace,
    AskPlan,
    AskRanks,
    AskSlabs,
    AskSpan,
    AskState,
    AskStreams,
    AskTimes,
    Contents,
    Counts,
    End,
    Error,
    Next,
    Plan,
    Ranks,
    Request,
    Selection,
    Values,
    counts_of,
    stream_of,
)
from topicstore.shard.shard import Shard
from topicstore.shard.state import ShardState
from topicstore.shard.tally_tables import Span

from .counting.contents import TopicCounts, clients_of_shard
from .counting.counting import read_counts
from .counting.histogram import parts_of
from .reading.history import History
from .replays import read_batch
from .reports import shard_info
from .storage import Storage

__all__ = ["answer"]

_PASSED = GenerationArchivedError, GenerationDroppedError, InvalidCursorError, PlaceAheadError
"""Errors that the answer carries, and the asking site raises. After any other error it asks another site."""


def answer(storage: Storage, shard: int, request: bytes) -> bytes:
    """Return the answer to another site's request about a shard.

    Raises `ShardElsewhereError` if this site doesn't keep the shard either, `msgspec.DecodeError` for a request of an
    unknown form, and the errors of reading and of `Site.refresh`.
    """
    storage.check_shard(shard)
    found = storage.shards[shard]
    if found.writer.elsewhere:
        raise found.writer.elsewhere_error()
    asked: Request = msgspec.msgpack.decode(request, type=Request)
    try:
        return msgspec.msgpack.encode((None, _answer(storage, found, asked)))
    except _PASSED as passed:
        return msgspec.msgpack.encode((Error(type(passed).__name__, str(passed)), None))


def _answer(storage: Storage, shard: Shard, asked: Request) -> object:
    reader = shard.reader
    match asked:
        case AskEnd(certain=certain):
            if certain:
                storage.catch_up([shard.number])
            oldest = next((record.number for record, _ in shard.generations.with_slabs()), 0)
            return End(reader.watermark, reader.displacement, (shard.writer.counters.deleted, oldest))
        case AskPlan():
            return _plan(storage, shard, asked)
        case AskNext():
            return _next(storage, shard, asked)
        case AskPlace(cursor=cursor):
            storage.check_place(cursor)
            return None
        case AskCursor(generation=generation, stream=stream, topic_filter=text, position=position):
            return reader.cursor(storage.id, generation, stream, TopicFilter(text), position)
        case AskBegin(cursors=cursors, position=position):
            return reader.begin(cursors, position)
        case AskNewest(cursor=cursor, first=first, last=last, rows=rows):
            return reader.newest(cursor, first, last, rows)
        case _:
            return _contents(storage, shard, asked)


def _contents(storage: Storage, shard: Shard, asked: Contents) -> object:
    match asked:
        case AskRanks(mark=mark):
            history = History.of(shard, mark)
            return Ranks(history.positions.tolist(), history.ranks.tolist())
        case AskCounts():
            return _counts(storage, shard, asked)
        case AskSpan(generation=generation, topic_filter=text):
            span = Span(asked.before, asked.last)
            return counts_of(
                read_counts(storage, shard, generation, TopicFilter(text), span, time.monotonic(), topics=True)
            )
        case AskTimes(topic_filter=text):
            return [part.rows() for part in parts_of(storage, shard, TopicFilter(text))]
        case AskStreams(topic_filter=text, first=first):
            return shard.reader.streams(TopicFilter(text), first)
        case AskSlabs(timestamps=times):
            return shard.reader.slabs(None if times is None else TimeRange(*times))
        case AskInfo():
            return shard_info(shard)
        case AskState():
            return _state(storage, shard, asked)


def _counts(storage: Storage, shard: Shard, asked: AskCounts) -> Counts:
    topic_filter = TopicFilter(asked.topic_filter)
    if asked.by_topic:
        return counts_of(storage.kept(TopicCounts).of_shard(storage, shard, topic_filter))
    return counts_of(clients_of_shard(storage, shard, topic_filter, time.monotonic()))


def _plan(storage: Storage, shard: Shard, asked: AskPlan) -> Plan:
    _reach(storage, shard, asked.bound)
    plan = shard.reader.plan(
        storage.id,
        TopicFilter(asked.topic_filter),
        asked.first,
        min(asked.bound, shard.reader.watermark),
        since=time.monotonic() if asked.waits else None,
        timestamps=None if asked.timestamps is None else TimeRange(*asked.timestamps),
    )
    return Plan(plan.bound, [(one.cursors, one.epoch, one.bound, one.first) for one in plan.generations])


def _next(storage: Storage, shard: Shard, asked: AskNext) -> Next:
    cursor, bound = asked.cursor, asked.bound
    if (cursor.database, cursor.shard) != (storage.id, shard.number):
        raise InvalidCursorError(f"the cursor is not one of shard {shard.number} of this database")
    if bound is not None:
        _reach(storage, shard, bound)
    request = ReadRequest(db=storage, cursor=cursor, limit=asked.rows, bound=bound, timeout=asked.timeout)
    result = read_batch(request, storage.shards)
    return Next(stream_of(result.batch), result.cursor, result.end_of_stream, result.caught_up)


def _state(storage: Storage, shard: Shard, asked: AskState) -> Values:
    writer, log = shard.writer, shard.writer.log
    if asked.certain or (log is not None and log.applied < asked.applied):
        storage.catch_up([shard.number])

    def read() -> Values:
        # The progress is read before the values, so that the values are at least as new as the reported progress.
        applied = 0 if log is None else log.applied
        changes = [writer.last_applied(head) for head in asked.selection.watched]
        if changes == asked.known:
            return Values(applied, changes, None)
        with writer.open_engine().snapshot() as snapshot:
            state = ShardState(shard.number, lambda: snapshot, writer.write_state)
            return Values(applied, changes, _selected(state, asked.selection))

    found: Values = shard.generations.undisturbed(read)
    if writer.elsewhere:  # the copy was dropped during the call, so the values may be incomplete
        raise writer.elsewhere_error()
    return found


def _selected(state: ShardState, selection: Selection) -> list[tuple[bytes, bytes]]:
    """Return the selected keys and values, ascending."""
    owners = {key.partition(b"\0")[2] for key, _ in state.scan(selection.owners)}
    heads = (
        *selection.heads,
        selection.owners,
        *(part + owner + b"\0" for part in selection.parts for owner in owners),
    )
    found = dict(chain.from_iterable(map(state.scan, heads)))
    keys = [head + owner for head in selection.owned for owner in owners]
    values = state.get_many(keys) if keys else []
    found |= {key: value for key, value in zip(keys, values, strict=True) if value is not None}
    return sorted(found.items())


def _reach(storage: Storage, shard: Shard, bound: int) -> None:
    """Apply the log up to a position that the asking site has learned from a site that is ahead of this one."""
    if bound > shard.reader.watermark:
        storage.catch_up([shard.number])
