"""Output of messages: JSON lines, CSV, Parquet, Arrow, or a table for people; each in chunks, to a stream or a file."""

from __future__ import annotations

import contextlib
import gzip
import sys
from collections.abc import Callable, Iterable, Iterator, Sized
from itertools import islice
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, TypeVar

import click

from topicstore import Message
from topicstore.contract.times import format_time
from topicstore.files import encoding
from topicstore.files.formats import format_of_name

if TYPE_CHECKING:
    import pyarrow as pa

__all__ = [
    "FORMATS",
    "format_of",
    "in_chunks",
    "limited",
    "open_output",
    "write_arrow",
    "write_messages",
    "write_parquet",
]

FORMATS = ("jsonl", "table", "parquet", "csv", "arrow")

_CHUNK = 4_096
_P = TypeVar("_P", bound=Sized)


def format_of(output: Path | None, *, terminal: bool) -> str:
    """Return the format for an output's name, or for a terminal."""
    if output is None:
        return "table" if terminal else "jsonl"
    found = format_of_name(output)
    return found if found in FORMATS else "jsonl"


@contextlib.contextmanager
def open_output(output: Path | None, *, packed: bool) -> Iterator[IO[bytes]]:
    """Open the output: standard output, or a file that appears under its name once it is whole."""
    if output is None:
        yield sys.stdout.buffer
        sys.stdout.buffer.flush()
        return
    in_place = output.exists() and not output.is_file()  # a pipe or a device
    draft = output if in_place else output.with_name(f".{output.name}.part")
    try:
        if not in_place:
            draft.unlink(missing_ok=True)  # left by a killed process, or a link that would be followed
        file = draft.open("wb" if in_place else "xb")
    except OSError as bad:
        raise click.BadParameter(f"{output}: {bad.strerror}", param_hint="'--output'") from bad
    try:
        with file, contextlib.ExitStack() as stack:
            target: Any = file
            if packed:
                target = stack.enter_context(gzip.GzipFile(fileobj=file, mode="wb", compresslevel=6))
            yield target
        if not in_place:
            draft.replace(output)
    except BaseException:
        if not in_place:
            draft.unlink(missing_ok=True)
        raise


def in_chunks(messages: Iterator[Message]) -> Iterator[list[Message]]:
    """Yield messages in lists that are long enough to be written at once."""
    while chunk := list(islice(messages, _CHUNK)):
        yield chunk


def limited(chunks: Iterable[list[Message]], limit: int | None) -> Iterator[list[Message]]:
    """Yield chunks up to a number of messages; None: all. No further chunk is asked for after that number."""
    left = sys.maxsize if limit is None else limit
    source = iter(chunks)
    while left > 0 and (chunk := next(source, None)) is not None:
        yield chunk[:left]
        left -= len(chunk)


def write_messages(chunks: Iterable[list[Message]], file_format: str, output: Path | None = None) -> int:
    """Write messages in any format but Parquet and Arrow, to a file or standard output; return how many.

    Each chunk is written before the next one is asked for.
    """
    if file_format == "table" and output is not None:
        raise click.UsageError("a table goes to standard output, not to a file")
    if file_format == "table":
        return _write_table(chunks)
    encode = {"jsonl": encoding.json_lines, "csv": encoding.csv_text}[file_format]
    with open_output(output, packed=output is not None and output.name.endswith(".gz")) as file:
        return _write(chunks, encode, file)


def write_parquet(batches: Iterable[pa.RecordBatch], file: IO[bytes]) -> int:
    """Write record batches as Parquet, in row groups of a useful size; return how many rows."""
    return _write(batches, encoding.parquet, file)


def write_arrow(batches: Iterable[pa.RecordBatch], file: IO[bytes]) -> int:
    """Write record batches as a stream of Arrow's IPC format, each before the next is asked for; return the rows."""
    return _write(batches, encoding.arrow_stream, file)


def _write(parts: Iterable[_P], encode: Callable[[Iterable[_P]], Iterator[bytes | memoryview]], file: IO[bytes]) -> int:
    """Write each part as soon as it is encoded; return how many messages they had."""
    count = 0

    def counted() -> Iterator[_P]:
        nonlocal count
        for part in parts:
            count += len(part)
            yield part

    for piece in encode(counted()):
        file.write(piece)
        file.flush()
    return count


_TIME_WIDTH = len("2015-03-07T06:00:22.123456Z")


def _write_table(chunks: Iterable[list[Message]]) -> int:
    """Print messages as they come, in columns as wide as the first of them need; return how many."""
    from topicstore.cli.terminal.display import console, readable, visible

    line = console().width
    widths: tuple[int, int, int] | None = None
    count = 0
    for chunk in chunks:
        if widths is None:
            time = max(len(format_time(m.timestamp or 0)) for m in chunk)
            topic = max(len(visible(m.topic)) for m in chunk)
            client = max(len(visible(m.client_id)) for m in chunk)
            widths = min(time, _TIME_WIDTH), min(max(topic, 5), line // 3), min(max(client, 6), line // 6)
            heading = _line(("time", "topic", "client", "qos", "payload"), widths)
            click.secho(heading, bold=True)
        for m in chunk:
            kind = f"{m.qos}{' R' if m.retain else ''}"
            row = (format_time(m.timestamp or 0), visible(m.topic), visible(m.client_id), kind)
            click.echo(_line((*row, readable(m.payload, line)), widths)[:line])
        count += len(chunk)
    return count


def _line(row: tuple[str, str, str, str, str], widths: tuple[int, int, int]) -> str:
    time, topic, client, kind, payload = row
    cells = (text.ljust(width) for text, width in zip((time, topic, client), widths, strict=True))
    return f"{'  '.join(cells)}  {kind.ljust(3)}  {payload}"
