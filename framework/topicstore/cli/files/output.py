"""Messages out: JSON lines, CSV, Parquet, or a table for people; each in chunks, to a stream or a file."""

from __future__ import annotations

import contextlib
import csv
import gzip
import io
import sys
from collections.abc import Iterable, Iterator
from itertools import islice
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import click

from topicstore import Message
from topicstore.times import format_time

from .formats import CSV_COLUMNS, csv_record, encode_lines, format_of_name

if TYPE_CHECKING:
    import pyarrow as pa

__all__ = ["FORMATS", "format_of", "open_output", "write_messages", "write_parquet"]

FORMATS = ("jsonl", "table", "parquet", "csv")

_CHUNK = 4_096
_GROUP_ROWS, _GROUP_BYTES = 131_072, 64 << 20
"""A Parquet row group ends at either."""


def format_of(output: Path | None, *, terminal: bool) -> str:
    """Return the format that an output's name, or a terminal, asks for."""
    if output is None:
        return "table" if terminal else "jsonl"
    return format_of_name(output) or "jsonl"


@contextlib.contextmanager
def open_output(output: Path | None, *, packed: bool) -> Iterator[IO[bytes]]:
    """Open what is written to: standard output, or a file that appears under its name once it is whole."""
    if output is None:
        yield sys.stdout.buffer
        sys.stdout.buffer.flush()
        return
    in_place = output.exists() and not output.is_file()  # a pipe or a device
    draft = output if in_place else output.with_name(f".{output.name}.part")
    try:
        if not in_place:
            draft.unlink(missing_ok=True)  # of a killed one, or a link that would be followed
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


def write_messages(messages: Iterator[Message], file_format: str, output: Path | None = None) -> int:
    """Write messages as anything but Parquet, to a file or standard output; return how many."""
    if file_format == "table" and output is not None:
        raise click.UsageError("a table goes to standard output, not to a file")
    if file_format == "table":
        return _write_table(messages)
    write = {"jsonl": _write_jsonl, "csv": _write_csv}[file_format]
    with open_output(output, packed=output is not None and output.name.endswith(".gz")) as file:
        return write(messages, file)


def _chunks(messages: Iterator[Message]) -> Iterator[list[Message]]:
    while chunk := list(islice(messages, _CHUNK)):
        yield chunk


def _write_jsonl(messages: Iterator[Message], file: IO[bytes]) -> int:
    count = 0
    for chunk in _chunks(messages):
        file.write(encode_lines(chunk))
        count += len(chunk)
    return count


def _write_csv(messages: Iterator[Message], file: IO[bytes]) -> int:
    count = 0
    text = io.StringIO(newline="")
    writer = csv.writer(text)
    writer.writerow(CSV_COLUMNS)
    for chunk in _chunks(messages):
        writer.writerows(map(csv_record, chunk))
        count += len(chunk)
        file.write(text.getvalue().encode())
        text.seek(0)
        text.truncate()
    file.write(text.getvalue().encode())
    return count


def write_parquet(batches: Iterable[pa.RecordBatch], file: IO[bytes]) -> int:
    """Write record batches as Parquet, in row groups worth reading; return how many rows."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    from topicstore import SCHEMA

    count = rows = size = 0
    group: list[pa.RecordBatch] = []
    with pq.ParquetWriter(file, SCHEMA, compression="zstd") as writer:
        for batch in batches:
            group.append(batch)
            count, rows, size = count + batch.num_rows, rows + batch.num_rows, size + batch.nbytes
            if rows >= _GROUP_ROWS or size >= _GROUP_BYTES:
                writer.write_table(pa.Table.from_batches(group))
                group, rows, size = [], 0, 0
        if group:
            writer.write_table(pa.Table.from_batches(group))
    return count


_TIME_WIDTH = len("2015-03-07T06:00:22.123456Z")


def _write_table(messages: Iterator[Message]) -> int:
    """Print messages as they come, in columns as wide as the first of them need; return how many."""
    from topicstore.cli.terminal.display import console, readable, visible

    line = console().width
    widths: tuple[int, int, int] | None = None
    count = 0
    for chunk in _chunks(messages):
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
