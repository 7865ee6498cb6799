"""Sources of text: JSON lines and CSV, packed by gzip or not, read line by line with the hash of all text before."""

from __future__ import annotations

import contextlib
import csv
import gzip
import io
import zlib
from collections.abc import Callable, Generator, Iterator, Sequence
from pathlib import Path
from typing import IO, cast

import xxhash

from topicstore import MAX_PAYLOAD, ImportSourceError, Message
from topicstore.files.formats import csv_parser, decode_line, decode_lines
from topicstore.files.mapping import ColumnMap

from .rows import BadRowError, Prefix, RawRows, Rows
from .source import Source, opening

__all__ = ["CsvSource", "JsonLinesSource"]

_BLOCK_BYTES = 16 << 20
"""The bytes of text after which a batch ends, however few its rows, so that long lines don't fill memory."""
_LONGEST_LINE = MAX_PAYLOAD * 4 // 3 + (16 << 20)
"""The most bytes of a line of JSON: the largest payload in base64, a topic, and properties."""
_LONGEST_FIELD = 64 << 20
"""The most characters of a CSV field, and bytes of a line; Python's csv takes four to eight bytes a character."""
_PIECE = 1 << 20
_BOM = b"\xef\xbb\xbf"


class _TextSource(Source):
    """The base of both kinds of text: packing, lines, prefixes."""

    corrected_goes_on = True
    longest_line = _LONGEST_LINE

    def __init__(
        self,
        raw: IO[bytes],
        path: Path,
        size: int | None,
        name: str,
        identify: Callable[[], str] | None,
        *,
        named: bool,
        mapping: ColumnMap | None = None,
    ) -> None:
        super().__init__(name, identify, named=named, mapping=mapping)
        self._raw = raw
        self._path = path
        self._size = size
        self._hasher = xxhash.xxh3_128()
        self._hashed = 0
        with opening(name):
            self._file = _unpacked(raw)

    def progress(self) -> tuple[float, float | None]:
        return (float(self._raw.tell()), self._size) if self._size is not None else (0.0, None)

    def has_prefixes(self, prefixes: Sequence[Prefix]) -> list[Prefix]:
        found: list[Prefix] = []
        if self._size is None:
            return found
        hasher, hashed, ends_line = xxhash.xxh3_128(), 0, True
        with (
            opening(self.name),
            self._path.open("rb", buffering=0) as raw,
            contextlib.suppress(EOFError, OSError, zlib.error),  # of a damaged file, the readable prefixes are returned
        ):
            file = _unpacked(raw)
            for size, digest in sorted(prefixes):
                while hashed < size and (data := file.read(min(1 << 20, size - hashed))):
                    hasher.update(data)
                    hashed += len(data)
                    ends_line = data.endswith(b"\n")
                # A last line without an end may have become longer, and thus another row.
                whole = ends_line or file.peek(1)[:1] in (b"", b"\n", b"\r")
                if hashed == size and whole and hasher.digest() == digest:
                    found.append(Prefix(size, digest))
        return found

    def close(self) -> None:
        self._file.close()
        self._raw.close()

    def _lines(self) -> Iterator[bytes]:
        readline = self._file.readline
        try:
            while line := readline(_PIECE):
                yield line if len(line) < _PIECE else self._long_line(line)
        except (OSError, EOFError, zlib.error) as bad:
            raise ImportSourceError(str(bad)) from bad

    def _long_line(self, begun: bytes) -> bytes:
        """Return a line that is longer than a piece. A line that is too long takes no more memory than others."""
        line = bytearray(begun)
        while not line.endswith(b"\n") and (piece := self._file.readline(_PIECE)):
            line += piece
            if len(line) > self.longest_line:
                raise ImportSourceError(f"a line is longer than {self.longest_line:,} bytes")
        return bytes(line)

    def _take(self, raw: list[bytes]) -> tuple[bytes, RawRows]:
        """Return rows as one piece, and include them in the prefix."""
        text = RawRows(raw, self._hashed, self._hasher.copy())
        data = b"".join(raw)
        self._hasher.update(data)
        self._hashed += len(data)
        return data, text


def _unpacked(raw: IO[bytes]) -> io.BufferedReader[io.RawIOBase]:
    file = io.BufferedReader(cast("io.RawIOBase", raw), 1 << 18)
    if file.peek(2)[:2] != b"\x1f\x8b":
        return file
    return io.BufferedReader(cast("io.RawIOBase", gzip.GzipFile(fileobj=file)), 1 << 18)


class JsonLinesSource(_TextSource):
    """A source of JSON lines, each of which is a message."""

    format = "jsonl"

    def read(self, skip: int, size: int) -> Generator[Rows]:
        """Yield the rows from ``skip`` on; those before it are only hashed."""
        at, lines = 0, self._lines()
        for block, trouble in _blocks(lines, skip, size):
            first, at = at, at + len(block)
            data, text = self._take(block)
            if first >= skip:
                yield from self._decoded(data, block, first, text)
            if trouble is not None:
                raise BadRowError(at, str(trouble)) from trouble

    def _decoded(self, data: bytes, lines: list[bytes], first: int, text: RawRows) -> Iterator[Rows]:
        end = first + len(lines)
        try:
            messages = decode_lines(data.removeprefix(_BOM) if first == 0 else data, self.mapping)
        except ValueError:  # a search for the bad line, which the common case needn't do
            messages = []
        else:
            numbers = None
            if len(messages) != len(lines):
                numbers = [first + i for i, line in enumerate(lines) if line.strip()]
            yield Rows(messages, first, end, numbers, text)
            return
        numbers = []
        for row, line in enumerate(lines, first):
            try:
                if line.strip():
                    messages.append(decode_line(line.removeprefix(_BOM) if row == 0 else line, self.mapping))
                    numbers.append(row)
            except ValueError as bad:
                yield Rows(messages, first, row, numbers, text)
                raise BadRowError(row, str(bad)) from bad
        yield Rows(messages, first, end, numbers, text)


def _blocks(lines: Iterator[bytes], skip: int, size: int) -> Iterator[tuple[list[bytes], ImportSourceError | None]]:
    """Yield lines in blocks of ``size``, with a boundary at ``skip``; with the last, the error that ended it."""
    block: list[bytes] = []
    seen = held = 0
    trouble = None
    try:
        for line in lines:
            block.append(line)
            seen += 1
            held += len(line)
            if len(block) >= size or held >= _BLOCK_BYTES or seen == skip:
                yield block, None
                block, held = [], 0
    except ImportSourceError as bad:
        trouble = bad
    if block or trouble is not None:
        yield block, trouble


class CsvSource(_TextSource):
    """A source of CSV records, each of which is a message, under the names of the first record."""

    format = "csv"
    longest_line = _LONGEST_FIELD

    def read(self, skip: int, size: int) -> Generator[Rows]:
        """Yield the rows from ``skip`` on; those before it are split, but not parsed."""
        csv.field_size_limit(_LONGEST_FIELD)
        used = bytearray()  # the text of the current record, which may have many lines
        records = csv.reader(self._text(used), strict=True)
        try:
            header = next((record for record in records if record), [])
            parse = csv_parser(header, self.mapping) if header else None
        except (ValueError, csv.Error) as bad:
            raise ImportSourceError(f"{self.name}: {bad}") from bad
        self._take([bytes(used)])
        used.clear()
        messages: list[Message] = []
        raw: list[bytes] = []
        first = held = 0
        trouble: Exception | None = None
        try:
            for record in records if parse is not None else ():
                if not record:  # a blank line counts with the next row, unless there are very many
                    if len(used) >= _BLOCK_BYTES and not raw:
                        self._take([bytes(used)])
                        used.clear()
                    continue
                if first + len(raw) >= skip:
                    messages.append(parse(record))  # type: ignore[misc]
                raw.append(bytes(used))
                used.clear()
                held += len(raw[-1])
                if len(raw) >= size or held >= _BLOCK_BYTES or first + len(raw) == skip:
                    yield from self._rows(messages, first, raw)
                    messages, raw, first, held = [], [], first + len(raw), 0
        except (ValueError, csv.Error, ImportSourceError) as bad:
            trouble = bad
        if raw:
            yield from self._rows(messages, first, raw)
        if trouble is not None:
            raise BadRowError(first + len(raw), str(trouble)) from trouble

    def _rows(self, messages: list[Message], first: int, raw: list[bytes]) -> Iterator[Rows]:
        _, text = self._take(raw)
        if messages:
            yield Rows(messages, first, first + len(raw), None, text)

    def _text(self, used: bytearray) -> Iterator[str]:
        for number, line in enumerate(self._lines()):
            used += line
            yield (line.removeprefix(_BOM) if number == 0 else line).decode()
