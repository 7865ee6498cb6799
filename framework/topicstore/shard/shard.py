"""A shard: one engine, its generations, and one order of writes. It composes its parts."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from topicstore.contract.batch import MessageBatch
from topicstore.contract.engine import Engine, Reader
from topicstore.contract.errors import CorruptionError
from topicstore.contract.layout import Damage, Slab, SlabStep
from topicstore.contract.replay_plan import ShardPlan
from topicstore.contract.state import StateWrite
from topicstore.contract.topics import TopicFilter

from .commit_log import CommitLog, NoteSynced, Ticket
from .counters import ShardCounters
from .epochs import Epochs
from .generations import Generations, MakeLayout, OpenArchive
from .locks import FairLock
from .reads import Reads
from .records import GenerationRecord
from .rewriting import Rewriting, never
from .verification import verify
from .write_path import Prepared, WritePath
from .write_settings import WriteSettings

__all__ = ["Shard"]


class Shard:
    """One shard of an open database. All methods may be called from any thread."""

    def __init__(
        self,
        number: int,
        engine: Engine,
        policy: WriteSettings,
        make_layout: MakeLayout,
        open_archive: OpenArchive,
        note_synced: NoteSynced,
        *,
        read_only: bool = False,
    ) -> None:
        self.number = number
        try:
            self.log = CommitLog(number, engine, policy, note_synced, read_only=read_only)
            """What every write goes through, and the only part that holds the engine."""
            self._generations = Generations(self.log, make_layout, open_archive)
        except CorruptionError as bad:
            raise CorruptionError(bad.reason, f"shard {number}, {bad.place}") from bad
        self._generations.open()
        self._writes = WritePath(self.log, self._generations)
        self._epochs = Epochs(self.log, self._generations)
        self._reads = Reads(self.log, self._generations, self._epochs)
        self._rewriting = Rewriting(self.log, self._generations)

    # --- looking ---

    @property
    def lock(self) -> FairLock:
        """The lock of everything that writes."""
        return self.log.lock

    @property
    def rewriting(self) -> FairLock:
        """The lock of deletes and compactions: to who holds it, what is sealed stays as it is."""
        return self._generations.rewriting

    @property
    def counters(self) -> ShardCounters:
        """What was counted since the opening."""
        return self.log.counters

    @property
    def watermark(self) -> int:
        """The highest position that readers may see."""
        return self.log.watermark

    @property
    def last_position(self) -> int:
        """The highest position given out."""
        return self.log.tail.last_position

    @property
    def lifted(self) -> int:
        """Late messages lifted since the database was created."""
        return self.log.tail.lifted

    @property
    def failure(self) -> str | None:
        """Why the shard takes no writes, or None."""
        return self.log.failure

    def ahead(self) -> int:
        """Return by how many microseconds the last position lies in the future; 0 if it doesn't."""
        return self._writes.ahead()

    def reader(self) -> Reader:
        """Return the engine, to read state from."""
        return self.log.open_engine()

    def engine(self) -> Engine:
        """Return the engine, for checkpoints and sizes."""
        return self.log.open_engine()

    # --- writing ---

    def prepare(self, batch: MessageBatch, state: Sequence[StateWrite]) -> Prepared:
        """Check a batch and its state, and give it positions: see `topicstore.shard.write_path`."""
        return self._writes.prepare(batch, state)

    def encode(self, prepared: Prepared) -> Prepared:
        """Add to the batch's write what keeps its messages; nothing is committed yet."""
        return self._writes.encode(prepared)

    def commit(self, prepared: Prepared) -> Ticket:
        """Commit messages and state in one engine write; return the ticket for `settle`."""
        return self._writes.commit(prepared)

    def settle(self, ticket: Ticket) -> None:
        """Make the write of a ticket durable and visible, without the lock, so that others can join the flush."""
        self.log.settle(ticket)

    def write_state(self, writes: Sequence[StateWrite]) -> None:
        """Commit state alone."""
        self._writes.write_state(writes)

    def flush(self) -> None:
        """Return when everything stored so far is on disk, whatever the durability."""
        self.log.flush()

    def check_writable(self) -> None:
        """Raise `ShardReadOnlyError`, `ReadOnlyDatabaseError` or `DatabaseClosedError` if it takes no writes."""
        self.log.check_writable()

    # --- reading ---

    def plan(
        self, database: bytes, topic_filter: TopicFilter, first: int, bound: int, *, since: float | None
    ) -> ShardPlan:
        """Plan to read the matching messages with positions from ``first`` to ``bound``: see `Reads.plan`."""
        return self._reads.plan(database, topic_filter, first, bound, since=since)

    def next(
        self,
        generation: int,
        stream: int,
        topic_filter: TopicFilter,
        place: bytes,
        *,
        limit: int,
        limit_bytes: int,
        bound: int | None,
        deadline: float | None,
        final: bool = False,
    ) -> tuple[SlabStep, bool]:
        """Read on in a stream; return the step, and whether it ended the stream for good: see `Reads.next`."""
        return self._reads.next(
            generation,
            stream,
            topic_filter,
            place,
            limit=limit,
            limit_bytes=limit_bytes,
            bound=bound,
            deadline=deadline,
            final=final,
        )

    def end_epoch(self, generation: int, position: int, *, wait: bool, since: float | None = None) -> None:
        """See that readers of a generation may see everything up to ``position``: see `Epochs.end`."""
        self._epochs.end(generation, position, wait=wait, since=since)

    def await_visible(self, position: int) -> None:
        """Return when readers may see everything up to a committed position: after its flush, and its epoch."""
        self._epochs.await_visible(position)

    # --- generations ---

    @property
    def current(self) -> int:
        """The number of the generation that is written; 0 before the first was added."""
        return self._generations.current

    @property
    def live(self) -> list[tuple[GenerationRecord, Slab]]:
        """The live generations, oldest first; another list whenever they change. Not to be changed."""
        return self._generations.live

    def generations(self) -> list[GenerationRecord]:
        """Return the live generations, oldest first, with the counts of the current one filled in."""
        return self._generations.listed()

    def slabs(self) -> list[tuple[GenerationRecord, Slab]]:
        """Return the live generations with their slabs, as of one moment. Never waits for a writer."""
        return self._generations.with_slabs()

    def slab(self, generation: int) -> Slab:
        """Return a live generation's slab; raise `GenerationDroppedError` or `InvalidIteratorError`."""
        return self._generations.slab(generation)

    def archived_in(self, first: int, last: int) -> list[tuple[int, int]]:
        """Return the archived generations with messages from ``first`` to ``last``, each with its last position."""
        return self._generations.archived_in(first, last)

    def add_generation(self, layout_name: str, options: dict[str, Any]) -> int:
        """Seal the current generation and begin the next, in one engine write; return its number."""
        return self._generations.add(layout_name, options)

    def check_droppable(self, number: int) -> bool:
        """Return whether a generation is there to be dropped; False if it was dropped before."""
        return self._generations.check_droppable(number)

    def drop_generation(self, number: int) -> bool:
        """Make a sealed generation invisible, in one engine write; False if it was dropped before."""
        return self._generations.drop(number)

    def archive(self, number: int, location: str, messages: int) -> None:
        """Read a generation from its export, and remove what is local of it, in one engine write."""
        self._generations.archive(number, location, messages)

    def remove_dropped(self) -> None:
        """Remove what dropped generations held. May be interrupted; the next open goes on."""
        self._generations.remove_dropped()

    # --- care ---

    def delete(self, topic_filter: TopicFilter, first: int, last: int) -> int:
        """Remove matching messages with positions from ``first`` to ``last``; return how many."""
        return self._rewriting.delete(topic_filter, first, last)

    def backlog(self) -> int:
        """Return how many messages wait to be compacted."""
        return self._rewriting.backlog()

    def compact(self, *, whole: bool, stop: Callable[[], bool] = never) -> int:
        """Compact the generations, a step at a time, until ``stop`` says so; return the messages rewritten."""
        return self._rewriting.compact(whole=whole, stop=stop)

    def reclaim(self) -> None:
        """Give back the disk space of what was replaced. May take long."""
        self._rewriting.reclaim()

    def verify(self) -> Iterator[Damage | int]:
        """Read everything; yield each damage, and numbers of good messages."""
        return verify(self.log, self._generations)

    def close(self) -> None:
        """Close the engine. May be called twice."""
        self.log.close(self._generations.forget)
