"""`Shard`: the writer, the reader, the generations, the message counts and the rewriter of one shard."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

from topicstore.contract.engine import Engine
from topicstore.contract.errors import CorruptionError

from .generations import Generations, MakeLayout, OpenArchive
from .reader import ShardReader
from .rewriter import Rewriter
from .tally_tables import TallyTables
from .writer import RecordRecoveryPoint, ShardWriter, WritePolicy

if TYPE_CHECKING:
    from .elsewhere import AskSite, ElsewhereReader

__all__ = ["Shard"]


class Shard:
    """One shard of an open database. The methods of all its parts are thread-safe."""

    def __init__(
        self,
        number: int,
        engine: Engine,
        policy: WritePolicy,
        make_layout: MakeLayout,
        open_archive: OpenArchive,
        record_recovery_point: RecordRecoveryPoint,
        *,
        read_only: bool = False,
    ) -> None:
        self.number = number
        try:
            self.writer = ShardWriter(number, engine, policy, record_recovery_point, read_only=read_only)
            """The only part that writes. It owns the engine."""
            self.generations = Generations(self.writer, make_layout, open_archive)
        except CorruptionError as bad:
            raise CorruptionError(bad.reason, f"shard {number}, {bad.place}") from bad
        self.generations.open()
        self.reader = ShardReader(self.writer, self.generations)
        """The reader of this site's copy, or `elsewhere`. The writer's lock guards changes of both attributes."""
        self.elsewhere: ElsewhereReader | None = None
        """The reader that asks other sites, while this site keeps no copy of the shard; None without such a reader."""
        self._own_reader = self.reader
        self._asking: ElsewhereReader | None = None
        self.tallies = TallyTables(self.writer, self.generations)
        """The tables of messages counted by topic and client id."""
        self.rewriter = Rewriter(self.writer, self.generations, self.tallies)

    def read_elsewhere(self, ask: AskSite | None) -> None:
        """Set the function that asks other sites while this site keeps no copy; None: reads raise."""
        with self.writer.lock:
            if ask is None:
                self._asking = None
            else:
                from .elsewhere import ElsewhereReader  # imported here, because few processes ask other sites

                self._asking = ElsewhereReader(self.writer, self.generations, ask)
            self.read_copy(not self.writer.elsewhere)

    def read_copy(self, whole: bool) -> None:
        """Choose the reader: of this site's copy if it is ``whole``, or else the one that asks other sites."""
        with self.writer.lock:
            self.writer.elsewhere = not whole
            self.elsewhere = None if whole else self._asking
            self.reader = self._own_reader if self.elsewhere is None else self.elsewhere

    def recover(self, open_again: Callable[[Callable[[], object]], object]) -> bool:
        """Take writes again after a failed write; return False, and do nothing, if no write failed.

        ``open_again`` reopens the engine, and calls its argument before readers see the new engine: see
        `LastingEngine.open_again`. Raises its errors, and those of the fsync that follows; the shard then still
        takes no writes. The call holds the shard's locks, so nothing is written in the meantime. Writes that were
        prepared before it are not committed.
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
        """Close the engine. This is idempotent."""
        self.writer.close(self.generations.forget)
