"""`RemoteImports`: stores imported rows together with the import's progress, in a database that a server has open."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import attrs
import msgspec

from topicstore.contract.batch import MessageBatch
from topicstore.contract.state import StateWrite

from .connection import Connection

__all__ = ["RemoteImports", "RemoteState", "RemoteStoreResult"]


@attrs.frozen
class RemoteStoreResult:
    """The result of a store: the counts of `topicstore.StoreResult`."""

    count: int
    lifted: int


class _Marker(msgspec.Struct):
    shard: int
    key: bytes
    value: bytes | None


class RemoteState:
    """The part of a shard's state that imports use, as loaded by `RemoteImports.state`."""

    def __init__(self, values: Mapping[bytes, bytes]) -> None:
        self._values = values

    def get(self, key: bytes) -> bytes | None:
        """Return the value of a key, or None."""
        return self._values.get(key)

    def scan(self, prefix: bytes = b"") -> Iterator[tuple[bytes, bytes]]:
        """Yield the (key, value) pairs of all keys that begin with ``prefix``, in key order."""
        return ((key, value) for key, value in sorted(self._values.items()) if key.startswith(prefix))


class RemoteImports:
    """The operations of a database that an import needs: reading its progress, and storing rows with progress."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._values: dict[int, dict[bytes, bytes]] | None = None

    def state(self, shard: int) -> RemoteState:
        """Return the part of a shard's state that imports use, cached until the next `store`."""
        if self._values is None:
            self._values = {}
            for one in self._connection.get("/imports", list[_Marker]):
                self._values.setdefault(one.shard, {})[one.key] = one.value or b""
        return RemoteState(self._values.get(shard, {}))

    def store(
        self,
        batch: MessageBatch,
        state: Mapping[int, Sequence[StateWrite]],
        *,
        stored: Sequence[bool] | None = None,
        retained: Sequence[bool] | None = None,
    ) -> RemoteStoreResult:
        """Store rows and state as `topicstore.Database.store` and `topicstore.pubsub.publish.store_retaining` do.

        state:    the writes of the import's progress, by shard.
        stored:   for each row, whether it is stored; all are, unless a part of the batch was stored before.
        retained: for each row, whether it may become the retained message of its topic; None for no row.
        """
        self._values = None
        markers = [_Marker(shard, one.key, one.value) for shard, writes in state.items() for one in writes]
        rows = _stream_of(batch)
        asked = {"rows": rows, "markers": markers, "stored": stored, "retained": retained}
        body = msgspec.msgpack.encode(asked)
        return self._connection.change(
            "POST", "/imports", RemoteStoreResult, content=body, headers={"Content-Type": "application/vnd.msgpack"}
        )


def _stream_of(batch: MessageBatch) -> bytes:
    import pyarrow as pa

    rows = batch.to_arrow()
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, rows.schema) as writer:
        writer.write_batch(rows)
    return sink.getvalue().to_pybytes()  # type: ignore[no-any-return]
