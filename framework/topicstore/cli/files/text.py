"""Sources of text, optionally compressed by gzip: JSON lines, JSON and CSV. Reading hashes the text of all rows."""

from __future__ import annotations

import contextlib
import csv
import io
import re
import select
import time
import zlib
from abc import abstractmethod
from collections.abc import Callable, Generator, Iterator, Sequence
from itertools import chain
from typing import IO, Self

import xxhash

from topicstore import MAX_PAYLOAD, ImportSourceError, Message
from topicstore.files.formats import csv_parser, decode_line, decode_lines
from topicstore.files.text import without_mark

from .json_documents import split_objects
from .rows import NO_PREFIX, BadRowError, Prefix, RawRows, Rows
from .source import Origin, Source, opening

__all__ = ["CsvSource", "JsonLinesSource", "JsonSource"]

_BLOCK_BYTES = 16 << 20
"""The bytes of text after which a batch ends regardless of its rows, so that long lines don't fill memory."""
_BLOCK_SECONDS = 0.1
"""The maximum number of seconds that rows of a stream wait for further rows of their batch."""
_LONGEST_LINE = MAX_PAYLOAD * 4 // 3 + (16 << 20)
"""The maximum bytes of a row of JSON: the largest payload in base64, a topic, and properties."""
_LONGEST_FIELD = 64 << 20
"""The maximum characters of a CSV field, and bytes of a line; Python's csv needs four to eight bytes a character."""
_PIECE = 1 << 18
_GZIP = b"\x1f\x8b"

_PAUSE = b""
"""A marker in iterators of pieces or rows: the rows so far are to be stored before more text is awaited."""


class _TextSource(Source):
    """The base class of text sources: decompression, splitting into rows, and prefixes."""

    resumes_corrected = True
    longest_line = _LONGEST_LINE

    def __init__(self, origin: Origin, raw: IO[bytes], size: int | None) -> None:
        """Read from ``raw``; ``size`` is the file's size in bytes, None for a stream."""
        super().__init__(origin)
        self._raw = raw
        self._size = size
        self._hasher = xxhash.xxh3_128()
        self._hashed = 0
        self.live = size is None and _has_descriptor(raw)

    def progress(self) -> tuple[float, float | None]:
        return (float(self._raw.tell()), self._size) if self._size is not None else (0.0, None)

    def has_prefixes(self, prefixes: Sequence[Prefix]) -> list[Prefix]:
        found: list[Prefix] = []
        if self._size is not None:
            with contextlib.suppress(ImportSourceError):  # for a damaged file, the readable prefixes are returned
                found.extend(prefix for prefix, ends_row in self._begins_with(prefixes) if ends_row)
        return found

    def begins_with(self, prefix: Prefix) -> bool:
        return self._size is None or any(self._begins_with([prefix]))

    def _begins_with(self, prefixes: Sequence[Prefix]) -> Iterator[tuple[Prefix, bool]]:
        """Yield the prefixes that the file begins with, and whether each ends at the end of a row.

        Raises `ImportSourceError` if the file can't be read that far.
        """
        hasher, hashed, last, rest = xxhash.xxh3_128(), 0, b"\n", b""
        with opening(self.name), self._origin.path.open("rb", buffering=0) as raw:
            pieces = _text_of(iter(lambda: raw.read(_PIECE), b""))
            for size, digest in sorted(prefixes):
                while hashed < size and (rest := rest or next(pieces, b"")):
                    data, rest = rest[: size - hashed], rest[size - hashed :]
                    hasher.update(data)
                    hashed += len(data)
                    last = data[-1:]
                rest = rest or next(pieces, b"")
                if hashed == size and hasher.digest() == digest:
                    yield Prefix(size, digest), self._ends_row(last, rest[:1])

    def _ends_row(self, last: bytes, following: bytes) -> bool:
        # A last line without a newline may have been extended since, and is then another row.
        return last == b"\n" or following in (b"", b"\n", b"\r")

    def close(self) -> None:
        self._raw.close()

    def _pieces(self) -> Iterator[bytes]:
        """Yield the decompressed text in pieces; for a stream also `_PAUSE`. Raises `ImportSourceError`."""
        return _text_of(self._stream() if self.live else iter(lambda: self._raw.read(_PIECE), b""))

    def _stream(self) -> Iterator[bytes]:
        """Yield the data of a stream as it arrives.

        `_PAUSE` is yielded when rows have waited for `_BLOCK_SECONDS`, and before an interruption is raised.
        """
        poll = select.poll()
        poll.register(self._raw.fileno(), select.POLLIN)
        due: float | None = None
        while True:
            try:
                with self.waiting():  # Ctrl-C interrupts only this wait, so no data is lost
                    came = poll.poll(None if due is None else max(0.0, due - time.monotonic()) * 1e3)
            except KeyboardInterrupt:
                yield _PAUSE
                raise
            if due is not None and (not came or time.monotonic() >= due):
                due = None
                yield _PAUSE
            data = self._raw.read(_PIECE) if came else None
            if data == b"":
                return
            if data is not None:
                due = due or time.monotonic() + _BLOCK_SECONDS
                yield data

    def _lines(self) -> Iterator[bytes]:
        """Yield lines with their line ends, and `_PAUSE`."""
        begun: list[bytes] = []
        size = 0
        for piece in self._pieces():
            if piece == _PAUSE:
                yield _PAUSE
                continue
            begun.append(piece)
            size += len(piece)
            if b"\n" in piece:
                lines = io.BytesIO(b"".join(begun)).readlines()
                begun = [] if lines[-1].endswith(b"\n") else [lines.pop()]
                size = sum(map(len, begun))
                yield from lines
            if size > self.longest_line:
                raise ImportSourceError(f"a line is longer than {self.longest_line:,} bytes")
        if begun:
            yield b"".join(begun)

    def read(self, skip: int, size: int) -> Generator[Rows]:
        """Yield the rows from ``skip`` on; earlier rows are only split and hashed."""
        at = 0
        for block, trouble in _blocks(self._split(skip), skip, size):
            first, at = at, at + len(block)
            data, text = self._take(block)
            if first >= skip and block:
                yield from self._decoded(data, block, first, text)
            if trouble is not None:
                raise BadRowError(at, str(trouble)) from trouble
            if at == skip:
                self._check_passed(at, skip)
        if at < skip:
            self._check_passed(at, skip)

    @abstractmethod
    def _split(self, skip: int) -> Iterator[bytes]:
        """Yield the text of each row, with the separator before it, and `_PAUSE`.

        The first ``skip`` rows are not decoded.
        """

    @abstractmethod
    def _decoded(self, data: bytes, block: list[bytes], first: int, text: RawRows) -> Iterator[Rows]:
        """Yield the messages of a block of rows. Raises `BadRowError`."""

    def _check_passed(self, rows: int, skip: int) -> None:
        """Raise `ImportSourceError` if the skipped rows differ from the rows imported before (`passed`)."""
        if self.passed != NO_PREFIX and rows and self.passed != (self._hashed, self._hasher.digest()):
            rather = f"its first {skip:,} rows are" if rows == skip else f"its {rows:,} rows are all, and"
            raise ImportSourceError(
                f"{self.name}: {rather} not the {skip:,} that were imported under its name before; give it another "
                "--source name, or import it with --again"
            )

    def _take(self, raw: list[bytes]) -> tuple[bytes, RawRows]:
        """Add rows to the hash; return their text as a whole and as `RawRows`."""
        text = RawRows(raw, self._hashed, self._hasher.copy())
        data = b"".join(raw)
        self._hasher.update(data)
        self._hashed += len(data)
        return data, text


def _has_descriptor(raw: IO[bytes]) -> bool:
    try:
        raw.fileno()
    except (AttributeError, OSError):
        return False
    return True


def _text_of(pieces: Iterator[bytes]) -> Iterator[bytes]:
    """Yield text, decompressed if it is in gzip. Raises `ImportSourceError` after all text that could be read."""
    try:
        head = b""
        for piece in pieces:
            head += piece
            if len(head) >= len(_GZIP):
                break
        rest = chain([head], pieces)
        yield from _checked(_unpacked(rest) if head.startswith(_GZIP) else rest)
    except OSError as bad:
        raise ImportSourceError(bad.strerror or str(bad)) from bad


def _checked(pieces: Iterator[bytes]) -> Iterator[bytes]:
    """Yield the pieces unchanged. Raises `ImportSourceError` if the text seems to be UTF-16."""
    head = b""
    for piece in pieces:
        head = head or piece[:4]
        if head.startswith((b"\xff\xfe", b"\xfe\xff")) or b"\0" in head:
            raise ImportSourceError(
                "it is not in UTF-8, but seems to be in UTF-16: iconv -f UTF-16 -t UTF-8 converts it"
            )
        yield piece


def _unpacked(pieces: Iterator[bytes]) -> Iterator[bytes]:
    """Yield the decompressed text of gzip members, ignoring zero bytes after them.

    Raises `ImportSourceError` for damage, after the text before it.
    """
    unpacker = None
    for packed in pieces:
        if packed == _PAUSE:
            yield _PAUSE
            continue
        piece, more = packed, True
        while more:
            if unpacker is None:
                unpacker = zlib.decompressobj(31)
            before = unpacker.copy()
            try:
                text = unpacker.decompress(piece, _PIECE)
            except zlib.error as bad:
                yield from _before_damage(before, piece)
                raise ImportSourceError(f"the gzip is damaged: {bad}") from bad
            if text:
                yield text
            piece = unpacker.unconsumed_tail
            more = bool(piece) or len(text) == _PIECE
            if unpacker.eof:
                piece, unpacker = unpacker.unused_data.lstrip(b"\0"), None
                more = bool(piece)
    if unpacker is not None:
        raise ImportSourceError("the gzip is damaged: it ends early")


def _before_damage(unpacker: zlib._Decompress, piece: bytes) -> Iterator[bytes]:
    """Yield the text before the damage in a piece, byte by byte, since decompressing it whole only raises an error."""
    with contextlib.suppress(zlib.error):
        for at in range(len(piece)):
            if text := unpacker.decompress(piece[at : at + 1]):
                yield text


def _blocks(rows: Iterator[bytes], skip: int, size: int) -> Iterator[tuple[list[bytes], ImportSourceError | None]]:
    """Yield rows in blocks of about ``size``, with a boundary at ``skip``, and with the last block a reading error.

    The error is None for all other blocks, and for the last one if reading succeeded.
    """
    block: list[bytes] = []
    seen = held = 0
    trouble = None
    try:
        for row in rows:
            if row != _PAUSE:
                block.append(row)
                seen += 1
                held += len(row)
            if len(block) >= size or held >= _BLOCK_BYTES or row == _PAUSE or seen == skip:
                yield block, None
                block, held = [], 0
    except ImportSourceError as bad:
        trouble = bad
    if block or trouble is not None:
        yield block, trouble


class _JsonSource(_TextSource):
    """The base class of the sources of JSON."""

    @abstractmethod
    def _message(self, row: bytes) -> Message | None:
        """Return the message of a row; None for a blank line. Raises `ValueError`."""

    def _decoded(self, _: bytes, block: list[bytes], first: int, text: RawRows) -> Iterator[Rows]:
        messages: list[Message] = []
        numbers: list[int] = []
        for number, row in enumerate(block, first):
            try:
                message = self._message(without_mark(row) if number == 0 else row)
            except ValueError as bad:
                yield Rows(messages, first, number, numbers, text)
                raise BadRowError(number, str(bad)) from bad
            if message is not None:
                messages.append(message)
                numbers.append(number)
        yield Rows(messages, first, first + len(block), numbers, text)


class JsonLinesSource(_JsonSource):
    """A source of JSON lines, each of which is a message."""

    format = "jsonl"

    def _split(self, skip: int) -> Iterator[bytes]:
        return self._lines()

    def _message(self, row: bytes) -> Message | None:
        line = row.strip()
        if line and not (line.startswith(b"{") and line.endswith(b"}")):
            shown = line[:80].decode(errors="replace")
            raise ValueError(f"{shown!r} is not a JSON object; --format json takes objects that are not lines")
        return decode_line(line, self.mapping) if line else None

    def _decoded(self, data: bytes, block: list[bytes], first: int, text: RawRows) -> Iterator[Rows]:
        with contextlib.suppress(ValueError):
            messages = decode_lines(without_mark(data) if first == 0 else data, self.mapping)
            if len(messages) == len(block):
                yield Rows(messages, first, first + len(block), None, text)
                return
        yield from super()._decoded(data, block, first, text)  # a line is bad or blank: decode line by line


class JsonSource(_JsonSource):
    """A source of JSON objects, each a message, which follow each other or are the elements of an array."""

    format = "json"
    options = "--format json"

    def _split(self, skip: int) -> Iterator[bytes]:
        return split_objects(self._pieces(), self.longest_line)

    def _message(self, row: bytes) -> Message:
        return decode_line(row[row.index(b"{") :], self.mapping)

    def _ends_row(self, last: bytes, following: bytes) -> bool:
        return last == b"}" or super()._ends_row(last, following)


class CsvSource(_TextSource):
    """A source of CSV records, each a message, with a header record."""

    format = "csv"
    longest_line = _LONGEST_FIELD
    _parse: Callable[[Sequence[str]], Message]

    def read(self, skip: int, size: int) -> Generator[Rows]:
        """Yield the rows from ``skip`` on; earlier rows are split, but not parsed."""
        csv.field_size_limit(_LONGEST_FIELD)
        self._text = _CsvLines(self._lines())
        self._records = _records(self._text)
        self._parsed: list[Message] = []
        try:
            header = next((record for record in self._records if record), None)
            if header is not None:
                self._parse = csv_parser(header, self.mapping)
        except (ValueError, csv.Error, ImportSourceError) as bad:
            raise ImportSourceError(f"{self.name}: {bad}") from bad
        self._take([self._text.taken()])
        yield from super().read(skip, size)

    def _split(self, skip: int) -> Iterator[bytes]:
        try:
            for record in self._records:
                if record:
                    if skip <= 0:
                        self._parsed.append(self._parse(record))
                    skip -= 1
                    yield self._text.taken()  # the record's text and the blank lines before it
                elif record is None:
                    yield _PAUSE
                elif self._text.many_are_blank:
                    yield _PAUSE
                    self._take([self._text.taken()])
        except (ValueError, csv.Error) as bad:
            raise ImportSourceError(str(bad)) from bad

    def _decoded(self, _: bytes, block: list[bytes], first: int, text: RawRows) -> Iterator[Rows]:
        messages, self._parsed = self._parsed, []
        yield Rows(messages, first, first + len(block), None, text)


class _PausedError(Exception):
    """No further lines are available yet. The lines of an incomplete record will be read again."""


class _CsvLines:
    """An iterator of lines for ``csv.reader``, which keeps the text since the last call of `taken`."""

    def __init__(self, lines: Iterator[bytes]) -> None:
        self._lines = lines
        self._again: Iterator[bytes] = iter(())
        self._kept = bytearray()
        self._begun = False

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> str:
        """Return the next line. Raises `_PausedError` at `_PAUSE`."""
        line = next(self._again, None)
        if line is None:
            line = next(self._lines)
            if line == _PAUSE:
                self.again()
                raise _PausedError
        first = not self._begun and not self._kept
        self._kept += line
        return (without_mark(line) if first else line).decode()

    def again(self) -> None:
        """Rewind to the end of the text that `taken` returned last: the iterator yields the later lines again."""
        self._again = chain(io.BytesIO(self._kept).readlines(), self._again)
        self._kept.clear()

    def taken(self) -> bytes:
        """Return the kept text, and stop keeping it."""
        kept = bytes(self._kept)
        self._kept.clear()
        self._begun = True
        return kept

    @property
    def many_are_blank(self) -> bool:
        """Whether the kept text exceeds `_BLOCK_BYTES`, as after very many blank lines."""
        return len(self._kept) >= _BLOCK_BYTES


_QUOTED = re.compile('"[^"]*"')


def _delimiter(lines: _CsvLines) -> str:
    """Detect the delimiter in the header record: comma, semicolon or tab. The record is read again afterwards."""
    line = ""
    with contextlib.suppress(StopIteration):
        while not line.strip():
            with contextlib.suppress(_PausedError):
                line = next(lines)
    lines.again()
    names = _QUOTED.sub("", line)
    return next((one for one in ",;\t" if one in names), ",")


def _records(lines: _CsvLines) -> Iterator[list[str] | None]:
    """Yield the records of CSV; an empty record for a blank line, and None at `_PAUSE`."""
    records = csv.reader(lines, delimiter=_delimiter(lines), strict=True)
    while True:
        try:
            record = next(records, None)
        except _PausedError:  # the CSV reader will read the incomplete record again from its beginning
            yield None
            continue
        if record is None:
            return
        yield record
