"""Answers the questions of other sites about shards that they don't keep (`topicstore.shard.elsewhere`).

The asking site runs its own plugins on the answer, so messages are read in their stored form, without plugins.
"""

from __future__ import annotations

import time

import msgspec

from topicstore.contract.errors import (
    GenerationArchivedError,
    GenerationDroppedError,
    InvalidCursorError,
)
from topicstore.contract.replay_plan import TimeRange
from topicstore.contract.requests import ReadRequest
from topicstore.contract.topics import TopicFilter
from topicstore.shard.elsewhere import (
    AskBegin,
    AskCounts,
    AskEnd,
    AskNewest,
    AskNext,
    AskPlan,
    AskRanks,
    End,
    Error,
    Next,
    Plan,
    Question,
    Ranks,
    counts_of,
    stream_of,
)
from topicstore.shard.shard import Shard

from .counting.contents import TopicCounts, clients_of_shard
from .reading.history import History
from .replays import read_batch
from .storage import Storage

__all__ = ["answer"]

_PASSED = GenerationArchivedError, GenerationDroppedError, InvalidCursorError
"""Errors that the answer carries, and the asking site raises. After any other error it asks another site."""


def answer(storage: Storage, shard: int, question: bytes) -> bytes:
    """Return the answer to a question about a shard.

    Raises `ShardElsewhereError` if this site doesn't keep the shard either, `msgspec.DecodeError` for a question of an
    unknown form, and the errors of reading and of `Site.refresh`.
    """
    storage.check_shard(shard)
    found = storage.shards[shard]
    if found.writer.elsewhere:
        raise found.writer.elsewhere_error()
    asked: Question = msgspec.msgpack.decode(question, type=Question)
    try:
        return msgspec.msgpack.encode((None, _answer(storage, found, asked)))
    except _PASSED as passed:
        return msgspec.msgpack.encode((Error(type(passed).__name__, str(passed)), None))


def _answer(storage: Storage, shard: Shard, asked: Question) -> object:
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
        case AskBegin(cursors=cursors, position=position):
            return reader.begin(cursors, position)
        case AskNewest(cursor=cursor, first=first, last=last, rows=rows):
            return reader.newest(cursor, first, last, rows)
        case AskRanks(mark=mark):
            history = History.of(shard, mark)
            return Ranks(history.positions.tolist(), history.ranks.tolist())
        case AskCounts(topic_filter=text, by_topic=True):
            return counts_of(storage.kept(TopicCounts).of_shard(storage, shard, TopicFilter(text)))
        case AskCounts(topic_filter=text):
            return counts_of(clients_of_shard(storage, shard, TopicFilter(text), time.monotonic()))


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


def _reach(storage: Storage, shard: Shard, bound: int) -> None:
    """Apply the log up to a position that the asking site has learned from a site that is ahead of this one."""
    if bound > shard.reader.watermark:
        storage.catch_up([shard.number])
