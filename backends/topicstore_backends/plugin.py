"""The backends that come with topicstore, as any plugin would register them. Imports no engine."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pluggy
from topicstore.specs import BackendSpec

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["topicstore_backends"]

hookimpl = pluggy.HookimplMarker("topicstore")


@hookimpl
def topicstore_backends() -> Sequence[BackendSpec]:
    """Return the backends of this package."""
    return (
        BackendSpec(
            name="memory",
            target="topicstore_backends.memory:MemoryBackend",
            summary="Sorted maps in memory; everything is gone at close. For tests.",
            capabilities=("fast_seek",),
            durability_note="Nothing outlives the engine, with commit or with sync.",
        ),
        BackendSpec(
            name="rocksdb",
            target="topicstore_backends.rocksdb:RocksdbBackend",
            summary="RocksDB, an LSM tree: fast batches and seeks, gives deleted space back by itself.",
            needs=("rocksdict",),
            install="topicstore[rocksdb]",
            capabilities=("persistent", "sync", "checkpoint", "fast_seek", "reclaims_disk"),
        ),
    )
