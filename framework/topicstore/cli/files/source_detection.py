"""Files to import, known by their content: JSON lines, JSON, CSV, Parquet; all but the last also gzipped.

A file is known by its content, not by its name: its source id is its size and the XXH3 of all its bytes. So a file
that was renamed or moved is still the same source; one in which a byte changed is another. A stream
(standard input, a pipe) is known by the name that a person gives it, or not at all.

Text also has *prefixes*: the bytes (unpacked) that its first rows came from, by their number and
XXH3. A text file that begins with all that an earlier import has stored continues after it: that is
how an import continues when a bad row was corrected, or when the file grew. Parquet has no prefixes but the whole file.

Under a name that a person gives, a file is the same source if it begins with the rows that were imported under the
name; a log that was rotated doesn't, and is read from its first row. A stream that doesn't is refused.

The output of `topicstore export` is a directory; each generation in it is a source of its own, known by the
database that it was exported from, its number, and the digests of its files: `exported`.
"""

from __future__ import annotations

import functools
import stat
import sys
from pathlib import Path
from typing import IO, cast

from topicstore import ImportSourceError
from topicstore.files.formats import format_of_name
from topicstore.files.mapping import ColumnMap

from .source import Origin, Source, opening, whole_file
from .text import CsvSource, JsonLinesSource, JsonSource

__all__ = ["FORMATS", "STANDARD_INPUT", "open_source"]

FORMATS = ("jsonl", "json", "csv", "parquet")
STANDARD_INPUT = Path("-")
_OF_TEXT: dict[str, type[JsonLinesSource | JsonSource | CsvSource]] = {
    "jsonl": JsonLinesSource,
    "json": JsonSource,
    "csv": CsvSource,
}


def open_source(
    path: Path, file_format: str | None = None, name: str | None = None, mapping: ColumnMap | None = None
) -> Source:
    """Open a file; ``-`` is standard input. With ``name`` it is known by that instead of its content.

    ``mapping`` says which of its columns make messages; by default those of a message's own names.

    Raises `ImportSourceError`.
    """
    stream = path == STANDARD_INPUT or not _is_regular(path)
    chosen = file_format or _format_of(path, stream=stream)
    shown = "standard input" if path == STANDARD_INPUT else str(path)
    with opening(shown):
        file = _standard_input() if path == STANDARD_INPUT else path.open("rb", buffering=0)
        size = None if stream else path.stat().st_size
    identify = None if stream else functools.partial(_content_id, path, shown)
    if name is not None:
        identify = functools.partial("name:{}".format, name)
    origin = Origin(name=shown, path=path, identify=identify, named=name is not None, mapping=mapping or ColumnMap())
    if chosen == "parquet":
        if stream:
            raise ImportSourceError(f"{shown}: Parquet can't be read from a stream; name a file")
        file.close()
        from .parquet import ParquetSource

        return ParquetSource(origin)
    return _OF_TEXT[chosen](origin, file, size)


def _is_regular(path: Path) -> bool:
    with opening(str(path)):
        return stat.S_ISREG(path.stat().st_mode)


def _format_of(path: Path, *, stream: bool) -> str:
    found = format_of_name(path)
    if found is None and not stream:
        raise ImportSourceError(f"{path}: unknown ending; choose with --format: {', '.join(FORMATS)}")
    return found or "jsonl"


def _standard_input() -> IO[bytes]:
    # Unbuffered where possible, so that looking at the first bytes doesn't wait for many more.
    return cast("IO[bytes]", getattr(sys.stdin.buffer, "raw", sys.stdin.buffer))


def _content_id(path: Path, shown: str) -> str:
    whole = whole_file(path, shown)
    return f"whole:{whole.size}:{whole.digest.hex()}"
