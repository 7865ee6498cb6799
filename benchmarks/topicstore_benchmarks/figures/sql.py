"""The section ``sql``: `table` on DuckDB against plain inserts into a table like its own, and aggregates over it.

Every round stores the set's Arrow batches and inserts the same rows, ready as the table has them, by
DuckDB itself; both commit after each batch. Then statements are run over what was stored.
"""

from __future__ import annotations

import gc
import statistics
import tempfile
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path

import attrs
import pyarrow as pa
import topicstore

from topicstore_benchmarks.contenders.plain_table import PlainTable
from topicstore_benchmarks.timing import check, median_of, timed

from .figure import Cell, Figure, Section, Sheet, shown

__all__ = ["STATEMENTS", "SqlOutcome", "measure_sql", "sql_section"]

BATCH = 50_000

STATEMENTS = {
    "messages by topic": "SELECT topic, count(*) FROM messages GROUP BY topic",
    "payloads by hour": "SELECT date_trunc('hour', time), count(*), avg(payload_bytes) FROM messages GROUP BY 1",
    "busiest publishers": "SELECT client_id, count(*) FROM messages GROUP BY 1 ORDER BY 2 DESC LIMIT 10",
    "topics by line": "SELECT split_part(topic, '/', 3), count(DISTINCT topic), max(time) FROM messages GROUP BY 1",
}
"""Aggregates over all messages."""


@attrs.frozen(kw_only=True)
class SqlOutcome:
    """The results of a message set."""

    name: str
    messages: int
    rounds: Sequence[tuple[float, float]]
    """Seconds of topicstore's store and of the plain insert in each round."""
    statements: dict[str, float]
    """Median seconds of each statement."""

    @property
    def store(self) -> float:
        """The store rate as a multiple of the plain insert's."""
        return statistics.median(insert / store for store, insert in self.rounds)


def measure_sql(name: str, table: pa.Table, rounds: int) -> SqlOutcome:
    """Store a set, in order of time, and query it; the first round warms up and doesn't count."""
    batches = table.to_batches(max_chunksize=BATCH)
    found = []
    for _ in range(rounds + 1):
        with tempfile.TemporaryDirectory(prefix="topicstore-bench-") as directory:
            path = Path(directory)
            with topicstore.open(
                path / "ours", backend="duckdb", layout="table", timestamps="message", late="lift"
            ) as db:
                gc.collect()
                store = timed(lambda db=db: [db.store(batch) for batch in batches])  # type: ignore[misc]
                rows = db.sql("SELECT * FROM messages")
                check(rows.num_rows, table.num_rows)
                insert = _insert(path / "plain.duckdb", rows)
                taken = {
                    title: median_of(lambda db=db, text=text: db.sql(text), 2 * rounds + 1)  # type: ignore[misc]
                    for title, text in STATEMENTS.items()
                }
            found.append((store, insert))
    return SqlOutcome(name=name, messages=table.num_rows, rounds=found[1:], statements=taken)


def _insert(path: Path, rows: pa.Table) -> float:
    """Insert rows into a table of their own; return the seconds."""
    batches = [pa.Table.from_batches([batch]) for batch in rows.combine_chunks().to_batches(max_chunksize=BATCH)]
    with closing(PlainTable(path, rows)) as plain:
        gc.collect()

        def insert() -> None:
            for batch in batches:
                plain.insert(batch)

        return timed(insert)


def sql_section(outcome: SqlOutcome) -> Section:
    """Return the figures of a set."""
    data = outcome.name
    figures = [Figure(data=data, subject="table", name="store / insert", value=outcome.store, least=0.8)]
    figures += [
        Figure(data=data, subject="table", name=title, value=seconds * 1_000, unit="ms", most=100)
        for title, seconds in outcome.statements.items()
    ]
    store, insert = (statistics.median(each) for each in zip(*outcome.rounds, strict=True))
    rates = [Cell(shown(outcome.messages / seconds / 1_000)) for seconds in (store, insert)]
    return Section(
        name="sql",
        figures=figures,
        sheets=[
            Sheet(
                title=f"table on DuckDB, {outcome.messages:,} messages of {data} in Arrow batches of {BATCH:,}",
                columns=["store", "insert", *(figure.name for figure in figures)],
                rows=[[*rates, *(figure.cell() for figure in figures)]],
                note=f"1,000 messages/s, ms; medians of {len(outcome.rounds)} rounds; in brackets what they should be",
            )
        ],
    )
