"""``topicstore sql``."""

from __future__ import annotations

import csv
import sys
from collections.abc import Iterator
from decimal import Decimal
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import msgspec

import topicstore
from topicstore.cli.terminal.options import PATH, json_option

if TYPE_CHECKING:
    import pyarrow as pa

__all__ = ["sql"]


@click.command()
@click.argument("statement")
@click.argument("path", type=PATH)
@json_option
@click.option("--csv", "as_csv", is_flag=True, help="Print CSV instead, with the names of the columns first.")
def sql(statement: str, path: Path, *, as_json: bool, as_csv: bool) -> None:
    """Run an SQL STATEMENT that only reads over the messages in PATH, of all shards.

    The database needs a layout that keeps messages as rows (table, on duckdb). Its table `messages`
    has the columns time, timestamp, topic, client_id, qos, retain, payload, payload_bytes,
    properties, and what names a row: shard, generation, stream, position.

    \b
    Examples:
      topicstore sql 'select topic, count(*) from messages group by 1' data
      topicstore sql "select time, payload::varchar from messages where topic like 'a/%' limit 9" data
      topicstore sql 'describe messages' data
    """  # noqa: D301 - click wants the character
    if as_json and as_csv:
        raise click.UsageError("--json and --csv are two ways to print; choose one")
    with topicstore.open_existing(path, auto_compact=False) as db:
        found = db.sql(statement)
    if as_json:
        _print_json(found)
    elif as_csv:
        writer = csv.writer(sys.stdout, lineterminator="\n")
        writer.writerow(found.column_names)
        writer.writerows(map(_flat, row) for row in _rows(found))
    else:
        _print_table(found)


def _print_json(found: pa.Table) -> None:
    from topicstore.cli.terminal.display import print_json

    print_json({"columns": found.column_names, "rows": list(_rows(found))})


def _print_table(found: pa.Table) -> None:
    from topicstore.cli.terminal.display import console, make_table

    columns = [
        f"{name}{'>' * _is_number(kind)}" for name, kind in zip(found.column_names, found.schema.types, strict=True)
    ]
    rows = ((value if isinstance(value, int) else _flat(value) for value in row) for row in _rows(found))
    console().print(make_table(*columns, rows=rows))
    click.echo(f"{found.num_rows:,} row{'s' * (found.num_rows != 1)}")


def _is_number(kind: pa.DataType) -> bool:
    return str(kind).startswith(("int", "uint", "float", "double", "decimal"))


def _rows(found: pa.Table) -> Iterator[list[Any]]:
    """Yield rows of values that JSON has, too."""
    for batch in found.to_batches():
        for row in zip(*(column.to_pylist() for column in batch.columns), strict=True):
            yield list(map(_plain, row))


def _plain(value: Any) -> Any:
    """Return a value as JSON has it: bytes as text, or in hexadecimal after 0x; times as ISO 8601, in UTC."""
    if isinstance(value, bytes):
        try:
            return value.decode()
        except UnicodeDecodeError:
            return f"0x{value.hex()}"
    if isinstance(value, Decimal):
        return int(value) if value.as_tuple().exponent == 0 and abs(value) < 1 << 63 else str(value)
    if isinstance(value, dict):
        return {name: _plain(inner) for name, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return list(map(_plain, value))
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    return value.isoformat() if hasattr(value, "isoformat") else str(value)


def _flat(value: Any) -> Any:
    """Return what stands in one cell: values within values as JSON."""
    return msgspec.json.encode(value).decode() if isinstance(value, (dict, list)) else value
