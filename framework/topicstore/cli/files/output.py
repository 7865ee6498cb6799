"""Output of messages in chunks, to standard output or a file: JSON lines, CSV, Parquet, Arrow, or a table."""

from __future__ import annotations

import contextlib
import gzip
import sys
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from pathlib import Path
from typing import IO, Any

import click

from topicstore import Message
from topicstore.cli.terminal.display import console, readable, visible
from topicstore.contract.times import format_time
from topicstore.files import encoding
from topicstore.files.formats import format_of_name

__all__ = [
    "FORMATS",
    "format_option",
    "in_chunks",
    "limited",
    "write_messages",
]

FORMATS = ("jsonl", "table", "parquet", "csv", "arrow")

_ENCODERS: dict[str, tuple[Callable[[Iterable[Any]], Iterator[bytes | memoryview]], bool]] = {
    "jsonl": (encoding.json_lines, True),
    "csv": (encoding.csv_text, True),
    "parquet": (encoding.parquet, False),
    "arrow": (encoding.arrow_stream, False),
}
"""The encoder of each format, and whether its output may be compressed by gzip."""
_CHUNK = 4_096


def format_option(
    *formats: str, otherwise: str = "table on a terminal, jsonl elsewhere"
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Add the option ``--format``. Its default depends on the ending of ``--output``, or on standard output."""

    def chosen(ctx: click.Context, _: click.Parameter, given: str | None) -> str:
        output: Path | None = ctx.params.get("output")  # eager, so it is parsed before this option
        if given is not None:
            return given
        if output is None:
            return "table" if sys.stdout.isatty() else "jsonl"
        endings = [ending for ending in output.suffixes if ending.lower() != ".gz"]
        if not endings or (output.exists() and not output.is_file()):  # a pipe or a device has no format of its own
            return "jsonl"
        found = "arrow" if endings[-1].lower() == ".arrows" else format_of_name(output)
        if found is None:
            known = ".jsonl, .csv, .parquet and .arrows, an Arrow stream"
            raise click.UsageError(
                f"the ending {endings[-1]!r} of --output names no format: give --format, or one of {known}"
            )
        return found if found in FORMATS else "jsonl"

    kind = click.Choice(formats)
    return click.option("--format", "file_format", type=kind, callback=chosen, help=f"[default: {otherwise}]")


@contextlib.contextmanager
def _open_output(output: Path | None, *, packed: bool) -> Iterator[IO[bytes]]:
    """Open standard output, or a file that is renamed to its final name once it is complete."""
    if output is None:
        yield sys.stdout.buffer
        sys.stdout.buffer.flush()
        return
    in_place = output.exists() and not output.is_file()  # a pipe or a device
    draft = output if in_place else output.with_name(f".{output.name}.part")
    try:
        if not in_place:
            draft.unlink(missing_ok=True)  # left by a killed process, or a symbolic link
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


def in_chunks(messages: Iterable[Message]) -> Iterator[list[Message]]:
    """Yield messages in lists of `_CHUNK` messages."""
    left = iter(messages)
    while chunk := list(islice(left, _CHUNK)):
        yield chunk


def limited(chunks: Iterable[list[Message]], limit: int | None) -> Iterator[list[Message]]:
    """Yield chunks with at most ``limit`` messages in all; None for all. No chunk is requested after the limit."""
    left = sys.maxsize if limit is None else limit
    source = iter(chunks)
    while left > 0 and (chunk := next(source, None)) is not None:
        yield chunk[:left]
        left -= len(chunk)


def write_messages(chunks: Iterable[Any], file_format: str, output: Path | None = None) -> int:
    """Write chunks to a file or standard output; return the number of messages written.

    Chunks are lists of messages or, for Parquet and Arrow, record batches. Except for Parquet, each chunk is written
    before the next one is requested.
    """
    if file_format == "table":
        if output is not None:
            raise click.UsageError("a table goes to standard output, not to a file")
        return _write_table(chunks)
    count = 0

    def counted() -> Iterator[Any]:
        nonlocal count
        for chunk in chunks:
            count += len(chunk)
            yield chunk

    encode, may_be_packed = _ENCODERS[file_format]
    packed = may_be_packed and output is not None and output.name.endswith(".gz")
    with _open_output(output, packed=packed) as file:
        for piece in encode(counted()):
            file.write(piece)
            file.flush()
    return count


_TIME_WIDTH = len("2015-03-07T06:00:22.123456Z")


def _write_table(chunks: Iterable[list[Message]]) -> int:
    """Print messages as a table, with column widths from the first chunk; return the number of messages."""
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
