"""`ElsewhereReader`: reads a shard of a cluster that this site doesn't keep, by asking a site that keeps it.

Requests and answers are msgpack, of the types below. Cursors are valid on every site, because all sites apply the
same entries in the same order. Higher floors choose the site and answer: `topicstore.storage.answering` answers
requests, and servers pass them to each other (`topicstore.server.http.keepers`).
"""

from __future__ import annotations

import io
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias, TypeVar

import msgspec
import numpy as np
import pyarrow as pa

from topicstore.contract import errors
from topicstore.contract.arrow import columns_of
from topicstore.contract.batch import ALL_FIELDS, MessageBatch
from topicstore.contract.columns import Constant
from topicstore.contract.cursors import Cursor
from topicstore.contract.replay_plan import GenerationPlan, ShardPlan, TimeRange
from topicstore.contract.requests import ReadResult
from topicstore.contract.topics import TopicFilter

from .generations import Generations
from .reader import ShardReader, Slabs
from .state import Applied
from .tally_records import Tally
from .writer import ShardWriter
from .zones import Span

__all__ = [
    "AskBegin",
    "AskCounts",
    "AskCursor",
    "AskEnd",
    "AskInfo",
    "AskNewest",
    "AskNext",
    "AskPlace",
    "AskPlan",
    "AskRanks",
    "AskSite",
    "AskSlabs",
    "AskSpan",
    "AskState",
    "AskStreams",
    "AskTimes",
    "Contents",
    "Counts",
    "ElsewhereReader",
    "End",
    "Error",
    "Next",
    "Plan",
    "Ranks",
    "Request",
    "Rows",
    "Selection",
    "StreamRow",
    "Values",
    "counts_of",
    "stream_of",
]

T = TypeVar("T")

AskSite: TypeAlias = Callable[[int, bytes, bool], bytes]
"""A function that sends a shard's request to a site that keeps the shard, and returns the answer.

The last argument is true if the answer may take long, because the site waits for its log store or the end of an epoch.
The function raises `ShardElsewhereError` if no site answers.
"""


class AskEnd(msgspec.Struct, tag="end", frozen=True):
    """Asks for the `End` of the shard."""

    certain: bool
    """Whether the site first applies everything that was acknowledged at any site before the request."""


class AskPlan(msgspec.Struct, tag="plan", frozen=True):
    """Asks for a `Plan`; see `ShardReader.plan`."""

    topic_filter: str
    first: int
    bound: int
    waits: bool
    """Whether to wait for the end of the current epoch instead of lowering the bound."""
    timestamps: tuple[int, int | None] | None


class AskNext(msgspec.Struct, tag="next", frozen=True):
    """Asks for the `Next` batch of a cursor; see `ShardReader.next`."""

    cursor: Cursor
    rows: int
    bound: int | None
    timeout: float | None


class AskCursor(msgspec.Struct, tag="cursor", frozen=True):
    """Asks for a `Cursor` over a stream from a position on; see `ShardReader.cursor`."""

    generation: int
    stream: int
    topic_filter: str
    position: int


class AskBegin(msgspec.Struct, tag="begin", frozen=True):
    """Asks for cursors that are moved to a position; see `ShardReader.begin`."""

    cursors: list[Cursor]
    position: int


class AskNewest(msgspec.Struct, tag="newest", frozen=True):
    """Asks for a span with the newest messages of a cursor; see `ShardReader.newest`."""

    cursor: Cursor
    first: int
    last: int
    rows: int


class AskPlace(msgspec.Struct, tag="place", frozen=True):
    """Asks the site to raise `PlaceAheadError` for a cursor after all stored messages; the answer is None."""

    cursor: Cursor


class AskRanks(msgspec.Struct, tag="ranks", frozen=True):
    """Asks for the `Ranks` of positions up to a watermark, ``mark``; see `topicstore.storage.reading.history`."""

    mark: int


class AskCounts(msgspec.Struct, tag="counts", frozen=True):
    """Asks for the `Counts` of the matching messages by topic, or else by client id."""

    topic_filter: str
    by_topic: bool


class AskSpan(msgspec.Struct, tag="span", frozen=True):
    """Asks for the `Counts` by topic of a generation's matching messages after a position, up to another one."""

    generation: int
    topic_filter: str
    before: int
    last: int


class AskTimes(msgspec.Struct, tag="times", frozen=True):
    """Asks for the matching messages by time: the `Rows` of each generation, for a histogram."""

    topic_filter: str


class AskStreams(msgspec.Struct, tag="streams", frozen=True):
    """Asks for the `StreamRow` of each stream that may hold matching messages at or after a position."""

    topic_filter: str
    first: int


class AskSlabs(msgspec.Struct, tag="slabs", frozen=True):
    """Asks for the `Slabs` of the shard, with the zones of a range of timestamps."""

    timestamps: tuple[int, int | None] | None


class AskInfo(msgspec.Struct, tag="info", frozen=True):
    """Asks for the `topicstore.storage.reports.ShardInfo` of the shard."""


class Selection(msgspec.Struct, frozen=True):
    """Selects values of a shard's state by the beginnings of keys, and by the client ids in some of these keys."""

    heads: tuple[bytes, ...]
    """Beginnings of keys, of `topicstore.shard.state.HEAD` bytes."""
    owners: bytes
    """A beginning of keys that continue with a name without NUL, NUL, and a client id. These keys are selected, too."""
    owned: tuple[bytes, ...]
    """Beginnings of keys that continue with such a client id."""
    parts: tuple[bytes, ...]
    """Beginnings of keys that continue with such a client id, NUL, and anything."""

    @property
    def watched(self) -> tuple[bytes, ...]:
        """The beginnings of the keys whose changes make earlier answers outdated: all but ``parts``."""
        return *self.heads, self.owners, *self.owned


class AskState(msgspec.Struct, tag="state", frozen=True):
    """Asks for `Values` of the shard's state."""

    selection: Selection
    certain: bool
    """As `AskEnd.certain`."""
    applied: int
    """The number of entries of the shard's log that the site is to have applied."""
    known: list[Applied]
    """The `Values.changes` of an earlier answer; empty without one."""


Contents = AskRanks | AskCounts | AskSpan | AskTimes | AskStreams | AskSlabs | AskInfo | AskState
Request = AskEnd | AskPlan | AskNext | AskPlace | AskCursor | AskBegin | AskNewest | Contents


class End(msgspec.Struct, frozen=True):
    """The end of a shard's messages on the site that answers."""

    watermark: int
    displacement: int
    removals: tuple[int, int]
    """The site's count of deleted messages, and the oldest live generation. A change of either means that messages in
    caches may have been removed."""


class Plan(msgspec.Struct, frozen=True):
    """A plan of a shard: the bound, and for each part the cursors, epoch, bound and first position."""

    bound: int
    parts: list[tuple[list[Cursor], int, int, int]]


class Next(msgspec.Struct, frozen=True):
    """A batch of stored messages, as an Arrow IPC stream, or no bytes if it is empty; and the cursor after it."""

    batch: bytes
    cursor: Cursor
    end_of_stream: bool
    caught_up: bool


class Ranks(msgspec.Struct, frozen=True):
    """Positions in ascending order, and the number of messages up to each."""

    positions: list[int]
    ranks: list[float]


class Counts(msgspec.Struct, frozen=True):
    """The columns of a `Tally`; each number is a little-endian integer of 8 bytes."""

    topics: list[str]
    client_ids: list[str]
    columns: list[bytes]


class Values(msgspec.Struct, frozen=True):
    """Selected values of a shard's state at one time, on the site that answers."""

    applied: int
    """The number of entries of the shard's log that the values include; they may include more."""
    changes: list[Applied]
    """The last changes of the keys of `Selection.watched`, in its order."""
    pairs: list[tuple[bytes, bytes]] | None
    """The selected keys, ascending, and their values; None if nothing has changed since ``AskState.known``."""


class Error(msgspec.Struct, frozen=True):
    """An error that the reader is to raise: the name of its class, and its text."""

    name: str
    text: str


Rows: TypeAlias = tuple[bytes, bytes, bytes, bytes, bytes]
"""The columns of a part of a histogram; each number is a little-endian float of 8 bytes."""
StreamRow: TypeAlias = tuple[int, int, str, bool]
"""The generation, the number and the pattern of a stream, and whether the generation is sealed."""
_NUMBERS = ("topic", "client_id", "first", "last", "messages", "size")


class ElsewhereReader(ShardReader):
    """The reader of a shard while this site does not keep it. Thread-safe.

    All methods raise `ShardElsewhereError` if no site that keeps the shard answers.
    """

    def __init__(self, writer: ShardWriter, generations: Generations, ask: AskSite) -> None:
        super().__init__(writer, generations)
        self._ask_site = ask
        self._looking = threading.Lock()
        """Guards `_end` and `_seen`. Reading `_end`, which is replaced as a whole, needs no lock."""
        self._end: End | None = None
        """The furthest known end."""
        self._seen: End | None = None
        """The end as of the last call of `changes`."""

    # --- the end ---

    @property
    def watermark(self) -> int:
        """The highest readable position as of the last `look`; 0 before the first."""
        return 0 if self._end is None else self._end.watermark

    @property
    def last_position(self) -> int:
        """The same as `watermark`, because later positions are unknown here."""
        return self.watermark

    @property
    def displacement(self) -> int:
        """See `ShardReader.displacement`; as of the last `look`."""
        return 0 if self._end is None else self._end.displacement

    @property
    def known(self) -> bool:
        """Whether `look` has succeeded."""
        return self._end is not None

    def look(self, *, certain: bool = False) -> None:
        """Ask for the end of the shard. With ``certain``, it includes everything acknowledged before the call."""
        found = self._ask(AskEnd(certain), End, waits=certain)
        with self._looking:
            if self._end is None or found.watermark >= self._end.watermark:
                self._end = found

    def changes(self) -> tuple[bool, bool]:
        """Return whether `watermark` has moved since the last call, and whether messages may have been removed."""
        with self._looking:
            before, self._seen = self._seen, self._end
        if self._seen is None:
            return False, False
        moved = before is None or before.watermark < self._seen.watermark
        return moved, before is not None and before.removals != self._seen.removals

    def current_watermark(self) -> int:
        """Ask for the highest readable position of the answering site, and return it."""
        self.look()
        return self.watermark

    def check_reached(self, position: int, epoch: int = 1) -> None:
        """Raise `PlaceAheadError` if ``position`` is above the highest position that the shard ever assigned."""
        if position > self.last_position | (epoch - 1):
            self.look(certain=True)
        if position > self.last_position | (epoch - 1):
            raise self._ahead_error(position, self.last_position)

    def check_place(self, cursor: Cursor) -> None:
        """Raise `PlaceAheadError` for a cursor after all stored messages; see `Storage.check_place`."""
        self._ask(AskPlace(cursor), type(None))

    def await_visible(self, position: int) -> None:
        """Wait until the answering site has ended the layout's epoch of a position, if that site owns the shard."""
        self.plan(b"", TopicFilter("#"), position, position, since=time.monotonic())

    # --- reading ---

    def plan(
        self,
        database: bytes,
        topic_filter: TopicFilter,
        first: int,
        bound: int,
        *,
        since: float | None,
        timestamps: TimeRange | None = None,
    ) -> ShardPlan:
        """Return a plan, as `ShardReader.plan` does."""
        times = None if timestamps is None else (timestamps.start, timestamps.until)
        waits = since is not None
        found = self._ask(AskPlan(topic_filter.text, first, bound, waits, times), Plan, waits=waits)
        parts = [GenerationPlan(cursors, epoch, last, begin) for cursors, epoch, last, begin in found.parts]
        return ShardPlan(shard=self._writer.number, bound=found.bound, generations=parts)

    def next(
        self,
        cursor: Cursor,
        *,
        rows: int,
        size: int,
        bound: int | None = None,
        deadline: float | None = None,
        final: bool = False,
        columns: frozenset[str] = ALL_FIELDS,
    ) -> ReadResult:
        """Return the next batch of a cursor, with all columns. The answering site bounds its size."""
        timeout = None if deadline is None else max(deadline - time.monotonic(), 0.0)
        found = self._ask(AskNext(cursor, rows, bound, timeout), Next, waits=False)
        batch = _batch(found.batch, self._writer.number)
        return ReadResult(
            batch=batch,
            cursor=cursor.advance(found.cursor.place),
            end_of_stream=found.end_of_stream,
            caught_up=found.caught_up,
        )

    def cursor(self, database: bytes, generation: int, stream: int, topic_filter: TopicFilter, position: int) -> Cursor:
        """Return a cursor over a stream's matching messages from a position on: see `ShardReader.cursor`."""
        return self._ask(AskCursor(generation, stream, topic_filter.text, position), Cursor)

    def begin(self, cursors: Sequence[Cursor], position: int) -> list[Cursor]:
        """Return cursors of a generation, moved to a position."""
        return self._ask(AskBegin(list(cursors), position), list[Cursor])

    def newest(self, cursor: Cursor, first: int, last: int, rows: int) -> Span | None:
        """Return a span of positions with the newest messages of a cursor's stream."""
        return self._ask(AskNewest(cursor, first, last, rows), tuple[int, int] | None)  # type: ignore[arg-type]

    def ranks(self, mark: int) -> Ranks:
        """Return the ranks of positions up to a watermark, ``mark``."""
        return self._ask(AskRanks(mark), Ranks)

    def counts(self, topic_filter: TopicFilter, *, by_topic: bool) -> Tally:
        """Return the counts of the matching messages by topic, or else by client id."""
        return _tally(self._ask(AskCounts(topic_filter.text, by_topic), Counts))

    def counts_between(self, generation: int, topic_filter: TopicFilter, before: int, last: int) -> Tally:
        """Return the counts by topic of a generation's matching messages after ``before``, up to ``last``."""
        return _tally(self._ask(AskSpan(generation, topic_filter.text, before, last), Counts))

    def times(self, topic_filter: TopicFilter) -> list[Rows]:
        """Return the matching messages by time, of each generation that has some."""
        return self._ask(AskTimes(topic_filter.text), list[Rows])

    def streams(self, topic_filter: TopicFilter, first: int) -> list[StreamRow]:
        """Return the streams that may hold matching messages at or after a position."""
        return self._ask(AskStreams(topic_filter.text, first), list[StreamRow])

    def slabs(self, timestamps: TimeRange | None) -> Slabs:
        """Return descriptions of the live slabs, and the numbers of zones; see `ShardReader.slabs`."""
        times = None if timestamps is None else (timestamps.start, timestamps.until)
        return self._ask(AskSlabs(times), Slabs, waits=False)

    def info(self, kind: type[T]) -> T:
        """Return the statistics of the shard on the answering site, of the type ``kind``; see `AskInfo`."""
        return self._ask(AskInfo(), kind, waits=False)

    def values(self, request: AskState) -> Values:
        """Return selected values of the shard's state."""
        return self._ask(request, Values, waits=request.certain)

    def _ask(self, request: Request, kind: type[T], *, waits: bool = True) -> T:
        data = self._ask_site(self._writer.number, msgspec.msgpack.encode(request), waits)
        try:
            error, found = msgspec.msgpack.decode(data, type=tuple[Error | None, kind | None])  # type: ignore[valid-type]
        except msgspec.DecodeError as bad:
            raise errors.ShardElsewhereError(
                f"the answer for shard {self._writer.number} is not one: {bad}", self._writer.number
            ) from bad
        if error is not None:
            raise getattr(errors, error.name)(error.text)
        return found  # type: ignore[return-value]


def stream_of(batch: MessageBatch) -> bytes:
    """Return a batch as the Arrow IPC stream of a `Next`."""
    if not len(batch):
        return b""
    rows, sink = batch.to_arrow(ids=True), io.BytesIO()
    with pa.ipc.new_stream(sink, rows.schema) as writer:
        writer.write_batch(rows)
    return sink.getvalue()


def _batch(data: bytes, shard: int) -> MessageBatch:
    if not data:
        return MessageBatch.empty()
    with pa.ipc.open_stream(data) as stream:
        rows = stream.read_next_batch()
    positions = rows.column("position").to_numpy(zero_copy_only=False).astype(np.uint64, copy=False)
    columns: dict[str, Any] = {**columns_of(rows), "positions": positions}
    return MessageBatch(**columns, shards=Constant(shard, rows.num_rows))


def _tally(found: Counts) -> Tally:
    columns = [np.frombuffer(column, "<u8") for column in found.columns]
    return Tally(found.topics, found.client_ids, *columns)


def counts_of(tally: Tally) -> Counts:
    """Return a tally in the form in which it is sent."""
    columns: list[Any] = [np.ascontiguousarray(getattr(tally, name), "<u8").tobytes() for name in _NUMBERS]
    return Counts(list(tally.topics), list(tally.client_ids), columns)
