"""HTTP responses that are streams in Arrow's IPC format, read incrementally."""

from __future__ import annotations

import io
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import msgspec

from topicstore.files.encoding import PROBLEM

from .connection import ARROW, Connection
from .problems import Problem, error_of

if TYPE_CHECKING:
    import pyarrow as pa

__all__ = ["batches_of", "table_of"]


class _Body(io.RawIOBase):
    """The body of a response as a readable file; one chunk at a time is in memory."""

    def __init__(self, pieces: Iterator[bytes]) -> None:
        self._pieces = pieces
        self._left = memoryview(b"")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self._left:
            piece = next(self._pieces, None)
            if piece is None:
                return 0
            self._left = memoryview(piece)
        taken = min(len(buffer), len(self._left))
        buffer[:taken] = self._left[:taken]
        self._left = self._left[taken:]
        return taken


def batches_of(connection: Connection, path: str, **parameters: Any) -> Iterator[pa.RecordBatch]:
    """Yield the record batches that the server returns for a path. The first ``next`` makes the request.

    If an error stops the server in the middle of the stream, the batches sent before are yielded; then the error is
    raised.
    """
    import pyarrow as pa

    with (
        connection.stream(path, accept=ARROW, **parameters) as pieces,
        io.BufferedReader(_Body(pieces), 1 << 18) as body,
        pa.ipc.open_stream(body) as batches,
    ):
        while True:
            try:
                found = batches.read_next_batch_with_custom_metadata()
            except StopIteration:
                return
            problem = None if found.custom_metadata is None else found.custom_metadata.get(PROBLEM)
            if problem is not None:
                raise error_of(msgspec.json.decode(problem, type=Problem), connection.url)
            yield found.batch


def table_of(body: bytes) -> pa.Table:
    """Return a complete Arrow IPC stream as a table."""
    import pyarrow as pa

    with pa.ipc.open_stream(body) as batches:
        return batches.read_all()
