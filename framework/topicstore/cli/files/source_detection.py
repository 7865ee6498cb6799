"""Files to import, known by their content: JSON lines, CSV, Parquet; the first two also gzipped.

A file is known by its content, not by its name: its source id is its size and the XXH3 of all its bytes. So a file
that was renamed or moved is still the same source; one in which a byte changed is another. Earlier versions looked at
its first and its last mebibyte only; what they imported of Parquet is still known by those. A stream (standard input,
a pipe) is known by the name that a person gives it, or not at all.

Text also has *prefixes*: the bytes (unpacked) that its first rows came from, by their number and
XXH3. A text file that begins with all that an earlier import has stored goes on behind it: that is
how an import goes on when a bad row was corrected, or when the file grew. Parquet has none.

What `topicstore export` wrote is a directory; each generation in it is a source of its own, known by the
database that it was exported from, its number, and the digests of its files: `exported`.
"""

from __future__ import annotations

import functools
import hashlib
import stat
import sys
from pathlib import Path
from typing import IO, cast

import xxhash

from topicstore import ImportSourceError

from .formats import format_of_name
from .source import Source
from .text import CsvSource, JsonLinesSource

__all__ = ["FORMATS", "STANDARD_INPUT", "open_source"]

FORMATS = ("jsonl", "csv", "parquet")
STANDARD_INPUT = Path("-")


def open_source(path: Path, file_format: str | None = None, name: str | None = None) -> Source:
    """Open a file; ``-`` is standard input. ``name`` makes it known by that instead of its content.

    Raises `ImportSourceError`.
    """
    stream = path == STANDARD_INPUT or not _is_regular(path)
    chosen = file_format or _format_of(path, stream=stream)
    shown = "standard input" if path == STANDARD_INPUT else str(path)
    try:
        file = _standard_input() if path == STANDARD_INPUT else path.open("rb", buffering=0)
        size = None if stream else path.stat().st_size
    except OSError as bad:
        raise ImportSourceError(f"{shown}: {bad.strerror or bad}") from bad
    identify = None if stream else functools.partial(_content_id, path, shown)
    if name is not None:
        identify = functools.partial("name:{}".format, name)
    if chosen == "parquet":
        if stream:
            raise ImportSourceError(f"{shown}: Parquet can't be read from a stream; name a file")
        file.close()
        from .parquet import ParquetSource

        return ParquetSource(path, shown, identify, named=name is not None)
    kind = JsonLinesSource if chosen == "jsonl" else CsvSource
    return kind(file, path, size, shown, identify, named=name is not None)


def _is_regular(path: Path) -> bool:
    try:
        return stat.S_ISREG(path.stat().st_mode)
    except OSError as bad:
        raise ImportSourceError(f"{path}: {bad.strerror or bad}") from bad


def _format_of(path: Path, *, stream: bool) -> str:
    found = format_of_name(path)
    if found is None and not stream:
        raise ImportSourceError(f"{path}: unknown ending; choose with --format: {', '.join(FORMATS)}")
    return found or "jsonl"


def _standard_input() -> IO[bytes]:
    # Unbuffered where possible, so that looking at the first bytes doesn't wait for many more.
    return cast("IO[bytes]", getattr(sys.stdin.buffer, "raw", sys.stdin.buffer))


def _content_id(path: Path, shown: str) -> str:
    try:
        with path.open("rb", buffering=0) as file:
            digest = hashlib.file_digest(file, xxhash.xxh3_128).hexdigest()
            return f"whole:{file.tell()}:{digest}"
    except OSError as bad:
        raise ImportSourceError(f"{shown}: {bad.strerror or bad}") from bad
