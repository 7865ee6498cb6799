"""Opening files to import (JSON lines, JSON, CSV, Parquet; all except the last also gzipped), and identifying them.

A file is identified by its content: its source id is its size and the XXH3 digest of all bytes. So a renamed or moved
file is still the same source, and a file in which a byte changed is another source. A stream (standard input, a pipe)
is identified by the name that the user gives it, or not at all.

Text also has *prefixes*: the number and the XXH3 digest of the uncompressed bytes of its first rows. If a text file
begins with all rows that an earlier import has stored, the import continues after them. So an import continues after a
bad row was corrected, or after the file grew. For Parquet, the only prefix is the whole file.

A file that the user names is the same source if it begins with the rows that were imported under the name. Otherwise,
as after a log was rotated, it is read from its first row. A stream that begins with other rows is refused.

The output of `topicstore export` is a directory. Each generation in it is a source, identified by the id of the
exported database, the generation's number, and the digests of its files (`topicstore.cli.files.export_source`).
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
    """Open a file as a source; ``-`` is standard input. Raises `ImportSourceError`.

    file_format: one of `FORMATS`; by default from the file's ending.
    name:        identifies the source instead of its content.
    mapping:     the mapping of its columns; by default columns have the names of a message's fields.
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
    # Unbuffered where possible, so that reading the first bytes doesn't wait for a full buffer.
    return cast("IO[bytes]", getattr(sys.stdin.buffer, "raw", sys.stdin.buffer))


def _content_id(path: Path, shown: str) -> str:
    whole = whole_file(path, shown)
    return f"whole:{whole.size}:{whole.digest.hex()}"
