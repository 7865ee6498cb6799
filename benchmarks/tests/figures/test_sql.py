"""The figures of `table`: complete rounds, true ratios, and statements that ran over all messages."""

from __future__ import annotations

import pyarrow as pa
import pytest
import topicstore

pytest.importorskip("duckdb", reason='needs duckdb: pip install "topicstore[duckdb]"')

from topicstore_benchmarks.figures.sql import STATEMENTS, SqlOutcome, measure_sql, sql_section

MESSAGES = topicstore.MessageBatch.from_messages(
    [
        topicstore.Message(f"fleet/eu/bus-{number % 9}", b"x" * 60, f"c{number % 5}", timestamp=10**15 + number)
        for number in range(3_000)
    ]
)


def test_a_set_is_measured() -> None:
    """Every side and statement took time, in the rounds that count."""
    outcome = measure_sql("made", pa.Table.from_batches([MESSAGES.to_arrow()]), 2)
    assert (3_000, 2, list(STATEMENTS)) == (outcome.messages, len(outcome.rounds), list(outcome.statements))
    assert all(store > 0 < insert for store, insert in outcome.rounds)
    assert all(seconds > 0 for seconds in outcome.statements.values())


def test_figures_say_what_they_should_be() -> None:
    """The ratio is the median of the rounds' own, and a statement of more than 100 ms is too slow."""
    rounds = [(1.0, 0.7), (10.0, 9.0), (2.0, 1.0)]
    outcome = SqlOutcome(name="made", messages=1_000, rounds=rounds, statements={"quick": 0.1, "slow": 0.2})
    section = sql_section(outcome)
    held = {figure.name: (round(figure.value, 3), figure.held) for figure in section.figures}
    assert {"store / insert": (0.7, False), "quick": (100.0, True), "slow": (200.0, False)} == held
    assert "| 0.50 |" in section.sheets[0].markdown()


def test_what_was_not_stored_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    """A fast store that lost a message is none."""
    store = topicstore.Database.store
    monkeypatch.setattr(topicstore.Database, "store", lambda db, batch: store(db, batch.slice(1)))
    with pytest.raises(AssertionError, match=r"2,999 of 3,000"):
        measure_sql("made", pa.Table.from_batches([MESSAGES.to_arrow()]), 1)
