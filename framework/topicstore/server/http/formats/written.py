"""Stored messages as the body of a response."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from topicstore.contract.batch import MessageBatch
from topicstore.files.encoding import arrow_problem, arrow_stream, csv_text, json_lines, parquet
from topicstore.server.http.problems import document_of
from topicstore.storage.replays import slices

from .media_types import ARROW, CSV, JSON_LINES, PARQUET

__all__ = ["WRITTEN", "written"]

WRITTEN = (JSON_LINES, CSV, ARROW, PARQUET)
"""The media types in which messages are written; the first unless a client wants another one."""
_ROWS, _BYTES = 16_384, 1 << 20
"""The most messages that are encoded at once, and about the most bytes of their payloads, unless one has more."""
_GROUP_ROWS, _GROUP_BYTES = 65_536, 16 << 20
"""The size of a row group of Parquet, which is held in memory for each client."""


def written(batches: Iterable[MessageBatch], media_type: str) -> Iterator[bytes | memoryview]:
    """Yield messages in a format, piece by piece.

    If they can't be read to their end, a stream of Arrow's IPC format tells why before the error is raised.
    """
    parts = _parts(batches)
    if media_type == ARROW:
        return _telling(arrow_stream(part.to_arrow() for part in parts))
    if media_type == PARQUET:
        return parquet((part.to_arrow() for part in parts), rows=_GROUP_ROWS, size=_GROUP_BYTES)
    encode = csv_text if media_type == CSV else json_lines
    return encode(part.to_messages() for part in parts)


def _parts(batches: Iterable[MessageBatch]) -> Iterator[MessageBatch]:
    """Yield the batches in parts, so that a slow reader holds up little; JSON may be six times what it is made of."""
    for batch in batches:
        rows = len(batch) * _BYTES // max(batch.payload_bytes(), 1)
        yield from slices([batch], min(max(rows, 1), _ROWS))


def _telling(pieces: Iterator[memoryview]) -> Iterator[memoryview]:
    try:
        yield from pieces
    except Exception as bad:
        yield arrow_problem(document_of(bad))
        raise
