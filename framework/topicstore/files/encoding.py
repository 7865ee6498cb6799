"""Messages as the bytes of a file: JSON lines, CSV, a stream of Arrow's IPC format, or Parquet, piece by piece.

Each function yields the pieces of one file, in order; their concatenation is the file. Every chunk of the source is
encoded and yielded before the next one is requested; only Parquet collects several chunks in a row group. Without
messages, the file is complete but empty.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

from topicstore import Message

from .formats import CSV_COLUMNS, csv_record, encode_lines

if TYPE_CHECKING:
    import pyarrow as pa

__all__ = ["PROBLEM", "arrow_problem", "arrow_stream", "csv_text", "json_lines", "parquet"]

PROBLEM = "topicstore-problem"
"""The metadata key of a record batch that ends an Arrow IPC stream early; the value is a problem document in JSON."""

_GROUP_ROWS, _GROUP_BYTES = 131_072, 64 << 20
"""The rows and the bytes at which a Parquet row group ends, whichever comes first."""
_END_OF_STREAM = b"\xff\xff\xff\xff\x00\x00\x00\x00"
"""The end-of-stream marker of Arrow's IPC format."""


def json_lines(chunks: Iterable[list[Message]]) -> Iterator[bytes]:
    """Yield messages as JSON lines (`topicstore.files.formats`)."""
    for chunk in chunks:
        yield encode_lines(chunk)


def csv_text(chunks: Iterable[list[Message]]) -> Iterator[bytes]:
    """Yield messages as CSV (`topicstore.files.formats`), with a header record."""
    text = io.StringIO(newline="")
    writer = csv.writer(text)
    writer.writerow(CSV_COLUMNS)
    for chunk in chunks:
        writer.writerows(map(csv_record, chunk))
        yield text.getvalue().encode()
        text.seek(0)
        text.truncate()
    if rest := text.getvalue():
        yield rest.encode()


def arrow_stream(batches: Iterable[pa.RecordBatch]) -> Iterator[memoryview]:
    """Yield record batches of `topicstore.SCHEMA` as a stream of Arrow's IPC format."""
    from topicstore import SCHEMA

    yield memoryview(SCHEMA.serialize())
    for batch in batches:
        yield memoryview(batch.serialize())
    yield memoryview(_END_OF_STREAM)


def arrow_problem(document: bytes) -> memoryview:
    """Return an empty record batch whose metadata holds a problem document, to end an Arrow IPC stream early."""
    import pyarrow as pa

    from topicstore import SCHEMA

    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, SCHEMA) as writer:
        writer.write_batch(pa.RecordBatch.from_pylist([], schema=SCHEMA), custom_metadata={PROBLEM: document})
    before, after = SCHEMA.serialize().size, len(_END_OF_STREAM)
    return memoryview(sink.getvalue())[before:-after]


def parquet(batches: Iterable[pa.RecordBatch], *, rows: int = _GROUP_ROWS, size: int = _GROUP_BYTES) -> Iterator[bytes]:
    """Yield record batches of `topicstore.SCHEMA` as Parquet, a row group at a time.

    A row group ends at about ``rows`` rows or ``size`` bytes, and is held in memory.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    from topicstore import SCHEMA

    sink = _Pieces()
    held_rows = held_size = 0
    group: list[pa.RecordBatch] = []
    with pq.ParquetWriter(sink, SCHEMA, compression="zstd") as writer:
        for batch in batches:
            group.append(batch)
            held_rows, held_size = held_rows + batch.num_rows, held_size + batch.nbytes
            if held_rows >= rows or held_size >= size:
                writer.write_table(pa.Table.from_batches(group))
                group, held_rows, held_size = [], 0, 0
                yield sink.taken()
        if group:
            writer.write_table(pa.Table.from_batches(group))
    yield sink.taken()


class _Pieces(io.RawIOBase):
    """A write-only file in memory, from which the bytes written so far can be taken."""

    def __init__(self) -> None:
        self._held: list[bytes] = []
        self._size = 0

    def writable(self) -> bool:
        return True

    def write(self, data: memoryview) -> int:  # type: ignore[override]
        held = bytes(data)
        self._held.append(held)
        self._size += len(held)
        return len(held)

    def tell(self) -> int:
        return self._size

    def taken(self) -> bytes:
        held, self._held = self._held, []
        return b"".join(held)
