"""The quota: whether a database has room for more, and the refusal if it has not."""

from __future__ import annotations

from collections.abc import Sequence

from topicstore.contract.errors import QuotaExceededError
from topicstore.shard.shard import Shard

__all__ = ["Quota", "written_bytes"]


class Quota:
    """Checks the number of bytes of values, which it counts only when there may be too many."""

    def __init__(self) -> None:
        self._room_until = 0
        """Bytes written up to which there is certainly room. Needs no lock: all threads compute the same value."""

    def check(self, max_bytes: int, shards: Sequence[Shard]) -> None:
        """Raise `QuotaExceededError` if the shards hold at least ``max_bytes`` bytes of values. Cheap.

        A batch that begins below the limit is stored whole.
        """
        written = written_bytes(shards)
        if written >= self._room_until:
            live = sum(record.live_bytes for shard in shards for record in shard.generations())
            if live >= max_bytes:
                raise QuotaExceededError(
                    f"the database holds {live:,} bytes of values, and may hold {max_bytes:,}: "
                    "delete messages, drop generations, or raise the limit (retention, max_bytes)"
                )
            self._room_until = written + max_bytes - live


def written_bytes(shards: Sequence[Shard]) -> int:
    """Return the bytes of values written since the database was opened: live bytes never grow by more."""
    return sum(shard.counters.bytes for shard in shards)
