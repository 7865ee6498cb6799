"""Registers the backends and log stores that come with topicstore, as any plugin would. Imports no engine."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import pluggy
from topicstore.contract.plugin_specs import BackendSpec, LogStoreSpec

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["topicstore_backends", "topicstore_logs"]

_NO_PLYVEL = (
    ""
    if sys.version_info < (3, 13)
    else "plyvel has no wheels for this Python: use Python 3.11 or 3.12, or install LevelDB with its headers "
    "(libleveldb-dev) and a C++ compiler, and then plyvel"
)

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
            capabilities=(
                "persistent",
                "sync",
                "checkpoint",
                "concurrent_readers",
                "fast_seek",
                "checksums",
                "reclaims_disk",
            ),
        ),
        BackendSpec(
            name="leveldb",
            target="topicstore_backends.leveldb:LeveldbBackend",
            summary="LevelDB, a small LSM tree: fast batches, scans and seeks.",
            needs=("plyvel",),
            install="topicstore[leveldb]",
            advice=_NO_PLYVEL,
            capabilities=("persistent", "sync", "fast_seek", "checksums", "reclaims_disk"),
            durability_note=(
                "With commit, power loss may take an older batch and leave a newer one, where two logs are in use."
            ),
        ),
        BackendSpec(
            name="duckdb",
            target="topicstore_backends.duckdb:DuckdbBackend",
            summary="DuckDB, a column store that speaks SQL: for few large batches, not for quick seeks.",
            needs=("duckdb",),
            install="topicstore[duckdb]",
            capabilities=("persistent", "checkpoint", "sql"),
            durability_note="Every commit is synced to the disk: commit is the same as sync.",
        ),
    )


@hookimpl
def topicstore_logs() -> Sequence[LogStoreSpec]:
    """Return the log stores of this package."""
    return (
        LogStoreSpec(
            name="file",
            target="topicstore_backends.log_stores.directory:DirectoryLogStore",
            summary="A directory of one machine: file:///path.",
        ),
        *(
            LogStoreSpec(
                name=scheme,
                target="topicstore_backends.log_stores.object_store:ObjectLogStore",
                summary=summary,
                needs=("obstore",),
                install="topicstore[cluster]",
            )
            for scheme, summary in (
                ("s3", "S3, or a store that speaks as S3 does: s3://bucket/prefix."),
                ("gs", "Google Cloud Storage: gs://bucket/prefix."),
                ("az", "Azure Blob Storage: az://container/prefix."),
                ("memory", "This process's memory: memory:///. For tests."),
            )
        ),
    )
