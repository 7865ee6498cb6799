"""A shard: one engine, its generations, and one order of writes."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from topicstore.contract.engine import Engine
from topicstore.contract.errors import CorruptionError

from .generations import Generations, MakeLayout, OpenArchive
from .reader import ShardReader
from .rewriter import Rewriter
from .tally_tables import TallyTables
from .writer import NoteSynced, ShardWriter, WritePolicy

__all__ = ["Shard"]


class Shard:
    """One shard of an open database: its parts, whose methods may be called from any thread."""

    def __init__(
        self,
        number: int,
        engine: Engine,
        policy: WritePolicy,
        make_layout: MakeLayout,
        open_archive: OpenArchive,
        note_synced: NoteSynced,
        *,
        read_only: bool = False,
    ) -> None:
        self.number = number
        try:
            self.writer = ShardWriter(number, engine, policy, note_synced, read_only=read_only)
            """The only part that writes, and the one that holds the engine."""
            self.generations = Generations(self.writer, make_layout, open_archive)
        except CorruptionError as bad:
            raise CorruptionError(bad.reason, f"shard {number}, {bad.place}") from bad
        self.generations.open()
        self.reader = ShardReader(self.writer, self.generations)
        self.tallies = TallyTables(self.writer, self.generations)
        """The tables of messages counted by topic and client id."""
        self.rewriter = Rewriter(self.writer, self.generations, self.tallies)

    def recover(self, open_again: Callable[[Callable[[], object]], object]) -> bool:
        """Take writes again after one failed; return False, and do nothing, if the shard takes writes.

        ``open_again`` opens the engine again, and calls its argument, before readers see the engine: see
        `LastingEngine.open_again`. Raises its errors, and those of the flush of what is there. Then the shard still
        takes no writes. Nothing is written meanwhile, and what was prepared before isn't committed.
        """
        writer, generations = self.writer, self.generations
        with generations.rewrite_lock, writer.lock:
            writer.check_open()
            if writer.failure is None:
                return False
            open_again(partial(writer.begin_again_locked, generations.open_again_locked))
        writer.flush()
        generations.remove_dropped()
        generations.reclaim_removed()
        return True

    def close(self) -> None:
        """Close the engine. May be called twice."""
        self.writer.close(self.generations.forget)
