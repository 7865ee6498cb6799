"""Opening one shard: that it is the right one, and that nothing is missing which was on disk once."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Literal

import attrs

from topicstore.contract.engine import KEYSPACES, Backend, Engine
from topicstore.contract.errors import CorruptionError, DataLossError, LogDamagedError
from topicstore.releasing import Taken
from topicstore.shard.generations import MakeLayout, OpenArchive
from topicstore.shard.identity import check_identity
from topicstore.shard.records import Tail, load_tail
from topicstore.shard.shard import Shard
from topicstore.shard.write_settings import WriteSettings

from .manifest import Manifest
from .synced_writes import Synced, SyncedWrites, check_reached

__all__ = ["RECOVERIES", "Recovery", "ShardOpener"]

Recovery = Literal["strict", "point_in_time", "salvage"]
RECOVERIES: tuple[Recovery, ...] = ("strict", "point_in_time", "salvage")


@attrs.define
class ShardOpener:
    """Opens the shards of one database."""

    path: Path
    manifest: Manifest
    backend: Backend
    capabilities: Collection[str]
    recovery: Recovery
    clock: Callable[[], int]
    make_layout: MakeLayout
    open_archive: OpenArchive
    synced: SyncedWrites | None = None
    """How far shards that are written had come; None where nothing lasts."""

    def open(self, number: int, opened: Taken, *, create: bool) -> Shard:
        """Open a shard to write it; ``opened`` closes it. Raises `DataLossError` if what was on disk is missing.

        What failed to be closed with the shard is closed on its own.
        """
        reached = self.synced.read(number) if self.synced else None
        engine = self._open_engine(number, reached, create=create)
        opened.add(engine.close)
        try:
            check_reached(number, reached, _tail(number, engine))
        except DataLossError as lost:
            if self.recovery == "strict":
                raise
            warnings.warn(f"opened all the same: {lost}", RuntimeWarning, stacklevel=6)
            if self.synced is not None:
                self.synced.forget(number)
        shard = self._make(number, engine, read_only=False)
        opened.add(shard.close)
        return shard

    def open_view(self, number: int, open_engine: Callable[[], Engine]) -> Shard:
        """Open a shard to read it. Raises what `open` raises, whatever ``recovery`` is: it may change nothing."""
        with contextlib.closing(SyncedWrites(self.path, self._id, self.manifest.shards, read_only=True)) as synced:
            reached = synced.read(number)  # before the engine is opened: its writer goes on
        engine = open_engine()
        with Taken() as taken:
            taken.add(engine.close)
            check_reached(number, reached, _tail(number, engine))
            if self.manifest.durability == "sync":
                engine.flush_log()  # nothing may be seen that power loss could take
            return self._make(number, engine, read_only=True)

    def _open_engine(self, number: int, reached: Synced | None, *, create: bool) -> Engine:
        """Open the engine; cut its log, after a power failure, if nothing is lost with what is cut off."""
        directory = self.path / f"shard-{number:04}"
        try:
            return self.backend.open_shard(directory, KEYSPACES, create=create)
        except CorruptionError as damaged:
            if self.recovery == "strict":
                if not isinstance(damaged, LogDamagedError):
                    raise
                with contextlib.closing(self.backend.open_reader(directory, KEYSPACES, alone=True)) as left:
                    check_reached(number, reached, _tail(number, left))
        self.backend.repair_log(directory, salvage=self.recovery == "salvage")
        return self.backend.open_shard(directory, KEYSPACES, create=False)

    @property
    def _id(self) -> bytes:
        return bytes.fromhex(self.manifest.id)

    def _make(self, number: int, engine: Engine, *, read_only: bool) -> Shard:
        manifest = self.manifest
        check_identity(engine, self._id, number)
        policy = WriteSettings(
            durability=manifest.durability,
            timestamps=manifest.timestamps,
            late=manifest.late,
            max_skew=manifest.max_skew,
            synced_at_once="sync" not in self.capabilities,
            clock=self.clock,
        )
        note = self.synced.note if self.synced else _forget
        return Shard(number, engine, policy, self.make_layout, self.open_archive, note, read_only=read_only)


def _tail(number: int, engine: Engine) -> Tail:
    try:
        return load_tail(engine)
    except CorruptionError as bad:
        raise CorruptionError(bad.reason, f"shard {number}, {bad.place}") from bad


def _forget(shard: int, writes: int, position: int) -> None:
    """Note nothing: what isn't kept can't be missing."""
