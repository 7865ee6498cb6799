"""`Quota`: the limit on the stored bytes of a database, which refuses stores above it."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence

from topicstore.contract.errors import QuotaExceededError
from topicstore.shard.shard import Shard

__all__ = ["Quota", "removing_bytes", "written_bytes"]

_UNLIMITED = sys.maxsize


class _Room:
    """The number of written bytes (`written_bytes`) up to which the quota certainly isn't reached."""

    __slots__ = ("until",)

    def __init__(self) -> None:
        self.until = 0


class Quota:
    """The limit on the bytes of values that a database holds. They are summed only when they may reach the limit."""

    def __init__(self, shards: Sequence[Shard]) -> None:
        self.enforce: Callable[[], object] | None = None
        """A function that is called before a store that may exceed the limit. It frees space, or raises to refuse
        the store. It calls `check`, `reached` or `lift`."""
        self._shards = shards
        self._room = _Room()
        """Needs no lock: all threads compute the same value. `reset` replaces the object, so a thread with an earlier
        limit changes only the old one."""

    def admit(self) -> None:
        """Raise `QuotaExceededError` if the limit is reached. Raises the errors of reading the limit, too."""
        if self._room.until < _UNLIMITED and written_bytes(self._shards) >= self._room.until and self.enforce:
            self.enforce()

    def reset(self) -> None:
        """Call `enforce` before the next store, because the limit has changed."""
        self._room = _Room()

    def lift(self) -> None:
        """Admit everything until `reset`, because there is no limit."""
        self._room.until = _UNLIMITED

    def check(self, max_bytes: int) -> None:
        """Raise `QuotaExceededError` if the database holds at least ``max_bytes`` bytes of values.

        A batch may exceed the limit if the database was below it before the batch.
        """
        held = self.reached(max_bytes)
        if held:
            raise QuotaExceededError(
                f"the database holds {held:,} bytes of values, and may hold {max_bytes:,}: "
                "delete messages, drop generations, or raise the limit (retention, max_bytes)"
            )

    def reached(self, max_bytes: int, *, removing: bool = False) -> int:
        """Return the bytes of values that the database holds if they are at least ``max_bytes``, else 0.

        removing: whether to include dropped generations whose removal has not finished.
        """
        room, written = self._room, written_bytes(self._shards)
        if written < room.until:
            return 0
        held = sum(record.live_bytes for shard in self._shards for record in shard.generations.listed())
        held += removing_bytes(self._shards) if removing else 0
        room.until = written + max(max_bytes - held, 0)
        return held if held >= max_bytes else 0


def removing_bytes(shards: Sequence[Shard]) -> int:
    """Return the bytes of values of dropped generations whose removal has not finished."""
    return sum(shard.generations.removing_bytes() for shard in shards)


def written_bytes(shards: Sequence[Shard]) -> int:
    """Return the bytes of values written since the database was opened, an upper bound of the growth of live bytes."""
    return sum([shard.writer.counters.bytes for shard in shards])
