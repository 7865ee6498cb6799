"""The mapping from publishers to shards: xxh64 of the client id, modulo the number of shards.

The mapping is part of the stored format: a publisher must stay in its shard, because only a shard orders messages.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import xxhash

from topicstore.contract.columns import Coded, CodedNumbers, Column, Constant, to_list

__all__ = ["ShardMap"]

_CACHED = 65_536


class ShardMap:
    """A mapping from client ids to ``shards`` shards."""

    def __init__(self, shards: int) -> None:
        self.shards = shards
        self._cache: dict[str, int] = {}
        self._by_code = CodedNumbers()

    def __repr__(self) -> str:
        return f"<ShardMap onto {self.shards} shards>"

    def of(self, client_id: str) -> int:
        """Return the shard of a client id."""
        if self.shards == 1:
            return 0
        return xxhash.xxh64_intdigest(client_id.encode()) % self.shards

    def split(self, client_ids: Column) -> list[tuple[int, npt.NDArray[np.intp] | None]]:
        """Return (shard, row indices) for each shard of a batch; the indices are None if the shard gets all rows."""
        if self.shards == 1:
            return [(0, None)]
        if isinstance(client_ids, Constant):
            return [(self.of(client_ids.value), None)]
        if isinstance(client_ids, Coded):
            rows = self._by_code.of(client_ids, lambda texts: list(map(self.of, texts)))
        else:
            rows = self._of_all(to_list(client_ids))
        touched = np.unique(rows).tolist()
        if len(touched) == 1:
            return [(touched[0], None)]
        return [(shard, np.flatnonzero(rows == shard)) for shard in touched]

    def _of_all(self, client_ids: list[str]) -> npt.NDArray[np.int32]:
        cache = self._cache
        try:
            return np.fromiter(map(cache.__getitem__, client_ids), np.int32, len(client_ids))
        except KeyError:
            # A new dictionary instead of changing the old one, which other threads may be reading.
            fresh = {client_id: self.of(client_id) for client_id in set(client_ids)}
            self._cache = {**cache, **fresh} if len(cache) + len(fresh) <= _CACHED else fresh
            return np.fromiter(map(fresh.__getitem__, client_ids), np.int32, len(client_ids))
