"""`ReplayPlace`: the progress of a replay in order of time, with which a later call yields exactly the next messages.

A replay in order of time is ordered by position and then by shard, and excludes messages stored after it began. Its
place consists of the arguments, the watermark of each shard at the beginning, and the last returned message.
The database keeps no state for the place, which stays valid after restarts and compaction. Messages that are deleted
in between are missing from later calls.

Stored form, version 1: ``0x01 | xxh64 of the rest, little-endian | msgpack array`` of the fields.
"""

from __future__ import annotations

from collections.abc import Generator
from typing import Annotated, Self

import msgspec
import numpy as np
import xxhash

from topicstore.contract.batch import MessageBatch
from topicstore.contract.columns import to_integers
from topicstore.contract.errors import InvalidCursorError, InvalidFilterError, WrongDatabaseError
from topicstore.contract.positions import time_of
from topicstore.contract.replay_plan import By, Order, TimeRange
from topicstore.contract.requests import ReplayRequest
from topicstore.contract.topics import TopicFilter
from topicstore.storage.replays import run
from topicstore.storage.storage import Storage

from .message_times import displacement
from .ordering import newest_first

__all__ = ["ReplayPlace"]

_VERSION = b"\x01"
_Time = Annotated[int, msgspec.Meta(ge=-(1 << 63), le=(1 << 63) - 1)]
_Position = Annotated[int, msgspec.Meta(ge=0)]
"""A position. It has no upper bound here, because msgspec can't express that of unsigned 64-bit numbers."""


class ReplayPlace(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, kw_only=True):
    """The arguments and the progress of a replay in order of time. Times are in microseconds since the epoch."""

    database: bytes
    topic_filter: str
    start: _Time
    until: _Time | None
    by: By
    reverse: bool
    bounds: tuple[_Position, ...]
    """The highest position of each shard that the replay returns."""
    last: tuple[_Position, _Position] | None = None
    """The position and the shard of the last returned message; None at the beginning."""

    @classmethod
    def beginning(
        cls, storage: Storage, topic_filter: str, start: int, until: int | None, *, by: By, reverse: bool
    ) -> Self:
        """Return the place before the first message of a replay. Raises `InvalidFilterError`."""
        storage.check_readable()
        return cls(
            database=storage.id,
            topic_filter=TopicFilter(topic_filter).text,
            start=start,
            until=until,
            by=by,
            reverse=reverse,
            bounds=tuple(shard.reader.watermark for shard in storage.shards),
        )

    def after(self, batch: MessageBatch) -> Self:
        """Return the place after the last message of a batch that `batches` has yielded."""
        end = batch[len(batch) - 1 :].ids()[0]
        return msgspec.structs.replace(self, last=(end.position, end.shard))

    def batches(
        self, storage: Storage, batch_size: int, *, order: Order = "time"
    ) -> Generator[MessageBatch, None, None]:
        """Yield the rest of the replay, in batches of about ``batch_size`` messages.

        ``order`` may be "any" only at the beginning of a replay. Raises `WrongDatabaseError` for a place of another
        database, `PlaceAheadError` if the database has lost messages that the replay should return, and the errors of
        replaying.
        """
        storage.check_open()
        if self.database != storage.id:
            raise WrongDatabaseError("the place is one of another database")
        if len(self.bounds) != len(storage.shards):
            raise InvalidCursorError("the place has another number of shards than the database")
        for shard, bound in zip(storage.shards, self.bounds, strict=True):
            shard.reader.check_reached(bound)
        times, displaced = TimeRange(self.start, self.until), displacement(storage)
        positions = self._positions(displaced)
        request = ReplayRequest(
            db=storage,
            topic_filter=TopicFilter(self.topic_filter),
            start=positions.start,
            until=positions.until,
            order=order,
            batch_size=batch_size,
            timestamps=times if self.by == "timestamp" or displaced else None,
        )
        if self.reverse:
            found = newest_first(storage, request, None, self._left_bounds())
        else:
            found = run(storage.plan(request), storage.fetch)
        bounds = np.array(self.bounds, np.uint64)
        for batch in found:
            left = self._left(batch, bounds)
            if len(left):
                yield left

    def _positions(self, displaced: int) -> TimeRange:
        """Return the range of times in which the positions of the remaining messages lie."""
        start, until = (self.start, self.until) if self.by == "position" else (0, None)
        until = None if until is None else until + displaced
        if self.last is not None:
            time = time_of(self.last[0])
            if self.reverse:
                until = time + 1 if until is None else min(until, time + 1)
            else:
                start = max(start, time)
        return TimeRange(start, until)

    def _left_bounds(self) -> list[int]:
        """Return the highest position of each shard that a reverse replay has left to return."""
        if self.last is None:
            return list(self.bounds)
        last, number = self.last
        return [min(bound, last if shard < number else last - 1) for shard, bound in enumerate(self.bounds)]

    def _left(self, batch: MessageBatch, bounds: np.ndarray[tuple[int], np.dtype[np.uint64]]) -> MessageBatch:
        """Return the messages of a batch that were stored before the replay began and weren't returned yet."""
        positions = batch.positions
        shards = to_integers([] if batch.shards is None else batch.shards)
        left = positions <= bounds[shards]
        if self.last is not None:
            last, shard = np.uint64(self.last[0]), self.last[1]
            if self.reverse:
                left &= (positions < last) | ((positions == last) & (shards < shard))
            else:
                left &= (positions > last) | ((positions == last) & (shards > shard))
        return batch if left.all() else batch.take(np.flatnonzero(left))

    def to_bytes(self) -> bytes:
        """Return bytes that `from_bytes` turns back into the place, in any process."""
        body = msgspec.msgpack.encode(self)
        return _VERSION + xxhash.xxh64_digest(body)[::-1] + body

    @classmethod
    def from_bytes(cls, data: bytes) -> Self:
        """Decode the bytes that `to_bytes` returns for a place. Raises `InvalidCursorError` for any other bytes."""
        body = data[9:]
        if data[:1] != _VERSION or data[1:9] != xxhash.xxh64_digest(body)[::-1]:
            raise InvalidCursorError("not the place of a replay, or one that is damaged or of a newer version")
        try:
            place = msgspec.msgpack.decode(body, type=cls)
            TopicFilter(place.topic_filter)
        except (msgspec.DecodeError, UnicodeDecodeError, InvalidFilterError) as bad:
            raise InvalidCursorError(f"the place of a replay is damaged: {bad}") from bad
        return place
