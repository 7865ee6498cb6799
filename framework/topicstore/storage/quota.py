"""The quota: whether a database has room for more, and the refusal if it has not."""

from __future__ import annotations

from collections.abc import Sequence

from topicstore.contract.errors import QuotaExceededError
from topicstore.shard.shard import Shard

__all__ = ["Quota", "removing_bytes", "written_bytes"]


class Quota:
    """Checks the number of bytes of values, which it counts only when there may be too many."""

    def __init__(self) -> None:
        self._room_until = 0
        """Bytes written up to which there is certainly room. Needs no lock: all threads compute the same value."""

    def check(self, max_bytes: int, shards: Sequence[Shard]) -> None:
        """Raise `QuotaExceededError` if the shards hold at least ``max_bytes`` bytes of values. Cheap.

        A batch that begins below the limit is stored whole.
        """
        held = self.reached(max_bytes, shards)
        if held:
            raise QuotaExceededError(
                f"the database holds {held:,} bytes of values, and may hold {max_bytes:,}: "
                "delete messages, drop generations, or raise the limit (retention, max_bytes)"
            )

    def reached(self, max_bytes: int, shards: Sequence[Shard], *, removing: bool = False) -> int:
        """Return the bytes of values that the shards hold if there are at least ``max_bytes``, else 0. Cheap.

        ``removing``: count those of dropped generations that were not removed yet, too.
        """
        written = written_bytes(shards)
        if written < self._room_until:
            return 0
        held = sum(record.live_bytes for shard in shards for record in shard.generations.listed())
        held += removing_bytes(shards) if removing else 0
        self._room_until = written + max(max_bytes - held, 0)
        return held if held >= max_bytes else 0


def removing_bytes(shards: Sequence[Shard]) -> int:
    """Return the bytes of values of dropped generations that were not removed yet."""
    return sum(shard.generations.removing_bytes() for shard in shards)


def written_bytes(shards: Sequence[Shard]) -> int:
    """Return the bytes of values written since the database was opened: live bytes never grow by more."""
    return sum(shard.writer.counters.bytes for shard in shards)
