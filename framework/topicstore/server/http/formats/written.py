"""Encoding of stored messages as response bodies."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from topicstore.contract.batch import MessageBatch
from topicstore.files.encoding import arrow_problem, arrow_stream, csv_text, json_lines, parquet
from topicstore.server.http.problems import document_of
from topicstore.storage.replays import slices

from .media_types import ARROW, CSV, JSON_LINES, PARQUET

__all__ = ["WRITTEN", "written"]

WRITTEN = (JSON_LINES, CSV, ARROW, PARQUET)
"""The media types of encoded messages; the first is the default."""
_ROWS, _BYTES = 16_384, 1 << 20
"""Most messages that are encoded at once, and about the most bytes of their payloads, unless one has more."""
_GROUP_ROWS, _GROUP_BYTES = 65_536, 16 << 20
"""Most rows and bytes of a Parquet row group, which is held in memory for each client."""


def written(batches: Iterable[MessageBatch], media_type: str) -> Iterator[bytes | memoryview]:
    """Yield encoded messages in pieces.

    If reading fails before the end, a stream in Arrow's IPC format includes the error before the error is raised.
    """
    parts = _parts(batches)
    if media_type == ARROW:
        return _telling(arrow_stream(part.to_arrow() for part in parts))
    if media_type == PARQUET:
        return parquet((part.to_arrow() for part in parts), rows=_GROUP_ROWS, size=_GROUP_BYTES)
    encode = csv_text if media_type == CSV else json_lines
    return encode(part.to_messages() for part in parts)


def _parts(batches: Iterable[MessageBatch]) -> Iterator[MessageBatch]:
    """Split batches, so that a slow client occupies little memory; JSON may be six times as large as its data."""
    for batch in batches:
        rows = len(batch) * _BYTES // max(batch.payload_bytes(), 1)
        yield from slices([batch], min(max(rows, 1), _ROWS))


def _telling(pieces: Iterator[memoryview]) -> Iterator[memoryview]:
    try:
        yield from pieces
    except Exception as bad:
        yield arrow_problem(document_of(bad))
        raise
