"""Files to import, read a batch of rows at a time: JSON lines, CSV, Parquet; the first two also gzipped.

A file is known by its content, not by its name: its source id is its size and the XXH3 of its
first and its last mebibyte. So a file that was renamed or moved is still the same source; one
that changed in size, or there, is another. A stream (standard input, a pipe) is known by the name
that a person gives it, or not at all.

Text also has *prefixes*: the bytes (unpacked) that its first rows came from, by their number and
XXH3. A text file that begins with all that an earlier import has stored goes on behind it: that is
how an import goes on when a bad row was corrected, or when the file grew. Parquet has none.

What `topicstore export` wrote is a directory; each generation in it is a source of its own, known by the
database that it was exported from, its number, and the digests of its files.
"""

from __future__ import annotations

import contextlib
import csv
import gzip
import io
import stat
import sys
import zlib
from abc import ABC, abstractmethod
from collections.abc import Generator, Iterator, Sequence
from itertools import compress
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Self, cast

import xxhash

from topicstore import Database, ImportSourceError, Message
from topicstore.contract.positions import MAX_TIME, first_position

from .rows import csv_parser, decode_line, decode_lines

if TYPE_CHECKING:
    import pyarrow as pa

    from topicstore.lifecycle.restoring import ExportedGeneration

__all__ = ["FORMATS", "NO_PREFIX", "BadRowError", "Prefix", "Rows", "Source", "open_export", "open_source"]

FORMATS = ("jsonl", "csv", "parquet")
STANDARD_INPUT = Path("-")

_ENDINGS = {".jsonl": "jsonl", ".ndjson": "jsonl", ".json": "jsonl", ".csv": "csv", ".parquet": "parquet"}
_SAMPLE = 1 << 20
_BLOCK_BYTES = 16 << 20
"""Bytes of text after which a batch ends, however few its rows, so that long lines don't fill memory."""
_LONGEST_LINE = 1 << 30
_BOM = b"\xef\xbb\xbf"

Prefix = tuple[int, bytes]
"""Bytes, and their XXH3."""
NO_PREFIX: Prefix = (0, b"")


class BadRowError(ImportSourceError):
    """A row is bad; ``row`` counts from 0."""

    def __init__(self, row: int, reason: str) -> None:
        super().__init__(reason)
        self.row = row
        self.reason = reason


class Rows:
    """Consecutive rows of a source that became messages, in a form that `Database.store` takes.

    ``first`` is the number, from 0, of the first row, ``end`` that of the row behind the last.
    Blank lines are rows without a message; ``numbers`` then has each message's row.
    """

    def __init__(
        self,
        messages: list[Message] | pa.RecordBatch,
        first: int,
        end: int,
        numbers: list[int] | None = None,
        text: _Text | None = None,
    ) -> None:
        self.messages = messages
        self.first = first
        self.end = end
        self._numbers = numbers
        self._text = text

    def __len__(self) -> int:
        return len(self.messages)

    def number(self, message: int) -> int:
        """Return the row of a message."""
        return self._numbers[message] if self._numbers is not None else self.first + message

    def head(self, messages: int) -> Rows:
        """Return the rows before message number ``messages``."""
        if messages >= len(self):
            return self
        kept = self.messages[:messages] if isinstance(self.messages, list) else self.messages.slice(0, messages)
        return Rows(kept, self.first, self.number(messages), self._numbers, self._text)

    def only(self, wanted: Sequence[bool]) -> Rows:
        """Return the same rows with the wanted ones of their messages."""
        numbers = [self.number(message) for message in compress(range(len(self)), wanted)]
        if isinstance(self.messages, list):
            messages: Any = list(compress(self.messages, wanted))
        else:
            import pyarrow as pa

            messages = self.messages.filter(pa.array(wanted, pa.bool_()))
        return Rows(messages, self.first, self.end, numbers, self._text)

    def client_ids(self) -> list[str]:
        """Return each message's client id."""
        if isinstance(self.messages, list):
            return [message.client_id for message in self.messages]
        if "client_id" not in self.messages.schema.names:
            return [""] * len(self)
        return cast("list[str]", self.messages.column("client_id").to_pylist())

    def first_time(self) -> int | None:
        """Return the timestamp of the first message, if it is a number."""
        if isinstance(self.messages, list):
            return self.messages[0].timestamp if self.messages else None
        if "timestamp" not in self.messages.schema.names or not len(self):
            return None
        first = self.messages.column("timestamp")[0].as_py()
        return first if isinstance(first, int) else None

    def prefix(self) -> Prefix:
        """Return the prefix that ends with these rows."""
        return NO_PREFIX if self._text is None else self._text.prefix(self.end - self.first)


class _Text:
    """The raw rows of a batch, and the hash of all before them."""

    def __init__(self, raw: list[bytes], size: int, before: xxhash.xxh3_128) -> None:
        self._raw = raw
        self._size = size
        self._before = before

    def prefix(self, rows: int) -> Prefix:
        hasher = self._before.copy()
        data = b"".join(self._raw[:rows])
        hasher.update(data)
        return self._size + len(data), hasher.digest()


class Source(ABC):
    """One file or stream to import. ``id`` is None for a stream without a name."""

    format: str
    corrected_goes_on = False
    """The import of a corrected copy goes on by itself, because text has prefixes."""

    def __init__(self, name: str, source_id: str | None, *, named: bool) -> None:
        self.name = name
        self.id = source_id
        self.named = named
        """Known by a name from a person, not by content, so that it may grow."""

    @abstractmethod
    def read(self, skip: int, size: int) -> Generator[Rows]:
        """Yield the rows from number ``skip`` on, about ``size`` at a time.

        Where a row is bad, yields those before it, then raises `BadRowError`; `ImportSourceError`
        if the source as a whole can't be read.
        """

    @abstractmethod
    def progress(self) -> tuple[float, float | None]:
        """Return how much was read, of how much, if that is known."""

    def has_prefixes(self, prefixes: Sequence[Prefix]) -> list[Prefix]:
        """Return those prefixes, in rising order of size, with which the source begins."""
        return []

    @abstractmethod
    def close(self) -> None:
        """Close the file."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


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
        source_id = f"name:{name}" if name is not None else None if size is None else _content_id(file, size)
    except OSError as bad:
        raise ImportSourceError(f"{shown}: {bad.strerror or bad}") from bad
    if chosen == "parquet":
        if stream:
            raise ImportSourceError(f"{shown}: Parquet can't be read from a stream; name a file")
        file.close()
        return _Parquet(path, shown, source_id, named=name is not None)
    kind = _JsonLines if chosen == "jsonl" else _Csv
    return kind(file, path, size, shown, source_id, named=name is not None)


def open_export(path: Path, db: Database) -> list[Source]:
    """Return the generations of an export, oldest first, to be put back into a database.

    Those that the database has itself, because it is the one that was exported, are left out.
    Raises `ImportSourceError` for rows that can't be put back as they were, and if nothing is left.
    """
    from topicstore.lifecycle.restoring import exported_generations

    found = exported_generations(path)
    plugins = ", ".join(found[0].head.plugins) if found else ""
    if plugins:
        raise ImportSourceError(f"{path}: its rows are as plugins stored them ({plugins}), not as they were published")
    own = bool(found) and found[0].head.database == db.manifest.id
    there = {info.number for info in db.generations()} if own else set()
    missing = [one for one in found if one.number not in there]
    if found and not missing:
        numbers = ", ".join(str(one.number) for one in found)
        raise ImportSourceError(
            f"{path}: the database is the one it was exported from, and has generation {numbers} itself"
        )
    return [_Export(path, one, db) for one in missing]


def _is_regular(path: Path) -> bool:
    try:
        return stat.S_ISREG(path.stat().st_mode)
    except OSError as bad:
        raise ImportSourceError(f"{path}: {bad.strerror or bad}") from bad


def _format_of(path: Path, *, stream: bool) -> str:
    endings = [ending.lower() for ending in path.suffixes if ending.lower() != ".gz"]
    found = _ENDINGS.get(endings[-1]) if endings else None
    if found is None and not stream:
        raise ImportSourceError(f"{path}: unknown ending; choose with --format: {', '.join(FORMATS)}")
    return found or "jsonl"


def _standard_input() -> IO[bytes]:
    # Unbuffered where possible, so that looking at the first bytes doesn't wait for many more.
    return cast("IO[bytes]", getattr(sys.stdin.buffer, "raw", sys.stdin.buffer))


def _content_id(file: IO[bytes], size: int) -> str:
    hasher = xxhash.xxh3_128(file.read(_SAMPLE))
    file.seek(max(0, size - _SAMPLE))
    hasher.update(file.read(_SAMPLE))
    file.seek(0)
    return f"content:{size}:{hasher.hexdigest()}"


# --- text ---


class _TextSource(Source):
    corrected_goes_on = True

    def __init__(
        self, raw: IO[bytes], path: Path, size: int | None, name: str, source_id: str | None, *, named: bool
    ) -> None:
        super().__init__(name, source_id, named=named)
        self._raw = raw
        self._path = path
        self._size = size
        self._hasher = xxhash.xxh3_128()
        self._hashed = 0
        try:
            self._file = _unpacked(raw)
        except OSError as bad:
            raise ImportSourceError(f"{name}: {bad.strerror or bad}") from bad

    def progress(self) -> tuple[float, float | None]:
        return (float(self._raw.tell()), self._size) if self._size is not None else (0.0, None)

    def has_prefixes(self, prefixes: Sequence[Prefix]) -> list[Prefix]:
        found: list[Prefix] = []
        if self._size is None:
            return found
        hasher, hashed, ends_line = xxhash.xxh3_128(), 0, True
        # A damaged file has the prefixes that could be read of it.
        with self._path.open("rb", buffering=0) as raw, contextlib.suppress(EOFError, OSError, zlib.error):
            file = _unpacked(raw)
            for size, digest in sorted(prefixes):
                while hashed < size and (data := file.read(min(1 << 20, size - hashed))):
                    hasher.update(data)
                    hashed += len(data)
                    ends_line = data.endswith(b"\n")
                # A last line without an end may have become longer, and thus another row.
                whole = ends_line or file.peek(1)[:1] in (b"", b"\n", b"\r")
                if hashed == size and whole and hasher.digest() == digest:
                    found.append((size, digest))
        return found

    def close(self) -> None:
        self._file.close()
        self._raw.close()

    def _lines(self) -> Iterator[bytes]:
        readline = self._file.readline
        try:
            while line := readline(_LONGEST_LINE):
                if len(line) == _LONGEST_LINE:
                    raise ImportSourceError(f"a line is longer than {_LONGEST_LINE:,} bytes")
                yield line
        except (OSError, EOFError, zlib.error) as bad:
            raise ImportSourceError(str(bad)) from bad

    def _take(self, raw: list[bytes]) -> tuple[bytes, _Text]:
        """Return rows as one piece, and account for them in the prefix."""
        text = _Text(raw, self._hashed, self._hasher.copy())
        data = b"".join(raw)
        self._hasher.update(data)
        self._hashed += len(data)
        return data, text


def _unpacked(raw: IO[bytes]) -> io.BufferedReader[io.RawIOBase]:
    file = io.BufferedReader(cast("io.RawIOBase", raw), 1 << 18)
    if file.peek(2)[:2] != b"\x1f\x8b":
        return file
    return io.BufferedReader(cast("io.RawIOBase", gzip.GzipFile(fileobj=file)), 1 << 18)


class _JsonLines(_TextSource):
    format = "jsonl"

    def read(self, skip: int, size: int) -> Generator[Rows]:
        at, lines = 0, self._lines()
        for block, trouble in _blocks(lines, skip, size):
            first, at = at, at + len(block)
            data, text = self._take(block)
            if first >= skip:
                yield from self._decoded(data, block, first, text)
            if trouble is not None:
                raise BadRowError(at, str(trouble)) from trouble

    @staticmethod
    def _decoded(data: bytes, lines: list[bytes], first: int, text: _Text) -> Iterator[Rows]:
        end = first + len(lines)
        try:
            messages = decode_lines(data.removeprefix(_BOM) if first == 0 else data)
        except ValueError:  # which line? the common case needn't know
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
                    messages.append(decode_line(line.removeprefix(_BOM) if row == 0 else line))
                    numbers.append(row)
            except ValueError as bad:
                yield Rows(messages, first, row, numbers, text)
                raise BadRowError(row, str(bad)) from bad
        yield Rows(messages, first, end, numbers, text)


def _blocks(lines: Iterator[bytes], skip: int, size: int) -> Iterator[tuple[list[bytes], ImportSourceError | None]]:
    """Yield lines in blocks of ``size``, with a boundary at ``skip``; with the last, what ended it."""
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


class _Csv(_TextSource):
    format = "csv"

    def read(self, skip: int, size: int) -> Generator[Rows]:
        csv.field_size_limit(_LONGEST_LINE)
        used: list[bytes] = []  # lines of the record at hand
        records = csv.reader(self._text(used), strict=True)
        try:
            header = next((record for record in records if record), [])
            parse = csv_parser(header) if header else None
        except (ValueError, csv.Error) as bad:
            raise ImportSourceError(f"{self.name}: {bad}") from bad
        self._take(used[:])
        used.clear()
        messages: list[Message] = []
        raw: list[bytes] = []
        first = held = 0
        trouble: Exception | None = None
        try:
            for record in records if parse is not None else ():
                if not record:
                    continue  # a blank line
                if first + len(raw) >= skip:
                    messages.append(parse(record))  # type: ignore[misc]
                raw.append(b"".join(used))
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

    def _text(self, used: list[bytes]) -> Iterator[str]:
        for number, line in enumerate(self._lines()):
            used.append(line)
            yield (line.removeprefix(_BOM) if number == 0 else line).decode()


# --- Parquet ---


class _Parquet(Source):
    format = "parquet"

    def __init__(self, path: Path, name: str, source_id: str | None, *, named: bool) -> None:
        import pyarrow as pa
        import pyarrow.parquet as pq

        from topicstore.contract.batch import MessageBatch

        super().__init__(name, source_id, named=named)
        self._read = 0
        try:
            self._file = pq.ParquetFile(path)
            # Columns that can't be messages are refused before the first row.
            MessageBatch.from_arrow(pa.RecordBatch.from_pylist([], self._file.schema_arrow))
        except (OSError, ValueError, pa.ArrowException) as bad:
            raise ImportSourceError(f"{name}: {bad}") from bad

    def read(self, skip: int, size: int) -> Generator[Rows]:
        import pyarrow as pa

        first, groups = 0, list(range(self._file.num_row_groups))
        while groups and first + (rows := self._file.metadata.row_group(groups[0]).num_rows) <= skip:
            first += rows
            del groups[0]
        try:
            for batch in self._file.iter_batches(size, row_groups=groups) if groups else ():
                end = first + batch.num_rows
                self._read = end
                if end > skip:
                    start = max(first, skip)
                    yield Rows(batch.slice(start - first), start, end)
                first = end
        except (OSError, pa.ArrowException) as bad:
            raise BadRowError(first, str(bad)) from bad

    def progress(self) -> tuple[float, float | None]:
        return float(self._read), float(self._file.metadata.num_rows)

    def close(self) -> None:
        self._file.close()


# --- an export ---


class _Export(Source):
    """A generation of an export. Its rows come in order of positions, and are looked for in the database at the end."""

    format = "export"

    def __init__(self, path: Path, exported: ExportedGeneration, db: Database) -> None:
        content = xxhash.xxh3_128_hexdigest("".join(exported.digests).encode())
        source_id = f"export:{exported.head.database}:{exported.number}:{content}"
        super().__init__(f"{path}, generation {exported.number}", source_id, named=False)
        self._exported = exported
        self._db = db
        self._by_message = db.manifest.timestamps == "message"
        self._read = 0

    def read(self, skip: int, size: int) -> Generator[Rows]:
        """Yield the rows from ``skip`` on; with the last of them stored, check that the database has all.

        Raises `CorruptionError` for damage, and if the database lacks a row: then the import is not finished, and
        looks again when it is run again.
        """
        from topicstore.lifecycle.restoring import check_stored
        from topicstore.storage.replays import slices

        self._read, oldest = 0, MAX_TIME
        for batch in slices(self._exported.rows(), size):
            first, self._read = self._read, self._read + len(batch)
            oldest = min(oldest, int(batch.timestamps.min()))
            if self._read > skip:
                start = max(first, skip)
                yield Rows(batch[start - first :].to_arrow(), start, self._read)
        # No position lies before its message's time, where they go by that.
        check_stored(self._db.storage, self._exported, first_position(oldest) if self._by_message else 0)

    def progress(self) -> tuple[float, float | None]:
        return float(self._read), float(self._exported.messages)

    def close(self) -> None:
        """Nothing is open."""
