"""The registration of the backend with topicstore. This module doesn't import LMDB."""

from topicstore import hookimpl
from topicstore.contract.plugin_specs import BackendSpec


@hookimpl
def topicstore_backends():
    """Return the backend's specification."""
    return [
        BackendSpec(
            name="lmdb",
            target="topicstore_lmdb.engine:LmdbBackend",
            summary="LMDB, a B+tree in one memory-mapped file: quick reads, one writer, no log.",
            needs=("lmdb",),
            install="topicstore-lmdb",
            capabilities=("persistent", "checkpoint", "fast_seek"),
            durability_note="Every commit is on disk before it returns, with commit as with sync.",
        )
    ]
