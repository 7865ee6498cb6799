"""The command ``topicstore sql``."""

from __future__ import annotations

import csv
import io
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import msgspec

from topicstore.cli.connecting import opened
from topicstore.cli.terminal.display import console, count_of, make_table, print_json
from topicstore.cli.terminal.options import PATH, json_option
from topicstore.sql.values import rows

if TYPE_CHECKING:
    import pyarrow as pa

__all__ = ["sql"]


@click.command()
@click.argument("path", type=PATH)
@click.argument("statement")
@json_option
@click.option("--csv", "as_csv", is_flag=True, help="Print CSV instead, with the names of the columns first.")
def sql(path: Path, statement: str, *, as_json: bool, as_csv: bool) -> None:
    """Run an SQL STATEMENT that only reads over the messages in PATH, on any backend.

    DuckDB runs it (topicstore[duckdb]). The table `messages` has the columns time, timestamp, topic, client_id,
    qos, retain, payload, payload_bytes, properties, shard, position. `time` is the time of the position;
    `timestamp` is the message's own time. The tables `topics` and `clients` have the counts that the commands of
    these names print; `latest` has the last message of each topic. Times are in UTC; decode(payload) is the
    payload as text.

    Comparisons of topics, client ids and times with constants narrow the range that is read; LIKE doesn't.

    \b
    Examples:
      topicstore sql data 'select topic, messages from topics order by 2 desc'
      topicstore sql data 'select time, topic from messages order by time desc'
      topicstore sql data "select * from messages where time > '2026-06-01'"
      topicstore sql data 'describe messages'
    """  # noqa: D301 - click wants the character
    if as_json and as_csv:
        raise click.UsageError("--json and --csv are two ways to print; choose one")
    with opened(path, "r") as db:
        found = db.sql(statement)
    if as_json:
        print_json({"columns": found.column_names, "rows": list(rows(found))})
    elif as_csv:
        text = io.StringIO()
        writer = csv.writer(text, lineterminator="\n")
        writer.writerow(found.column_names)
        writer.writerows(map(_flat, row) for row in rows(found))
        click.echo(text.getvalue().encode(), nl=False)  # UTF-8, whatever the locale's encoding
    else:
        columns = [f"{field.name}{'>' * _is_number(field.type)}" for field in found.schema]
        cells = ((value if isinstance(value, int) else _flat(value) for value in row) for row in rows(found))
        console().print(make_table(*columns, rows=cells))
        click.echo(count_of(found.num_rows, "row"))


def _is_number(kind: pa.DataType) -> bool:
    return str(kind).startswith(("int", "uint", "float", "double", "decimal"))


def _flat(value: Any) -> Any:
    """Return a value for a table cell; nested values become JSON."""
    return msgspec.json.encode(value).decode() if isinstance(value, (dict, list)) else value
