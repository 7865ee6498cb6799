"""Sums of tally tables."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from itertools import pairwise

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given
from topicstore.shard import tally_records
from topicstore.shard.tally_records import Tally, sum_tables

PARTS = 10
"""The most rows of a part in these tests."""

Pair = tuple[str, str]
Rows = dict[Pair, int]


def tally(rows: Rows, base: int) -> Tally:
    """Return a tally with these numbers of messages, the first of them at ``base`` and the last after all others."""
    ordered = sorted(rows)
    topics, clients = (sorted({pair[at] for pair in ordered}) for at in (0, 1))
    messages = np.array([rows[pair] for pair in ordered], np.uint64)
    return Tally(
        topics,
        clients,
        np.array([topics.index(topic) for topic, _ in ordered], np.uint64),
        np.array([clients.index(client) for _, client in ordered], np.uint64),
        np.full(len(rows), base, np.uint64),
        messages + np.uint64(base),
        messages,
        messages * np.uint64(2),
    )


def parts(whole: Tally, rows: int) -> Iterator[Tally]:
    """Yield a tally in parts of ``rows`` rows."""
    for start in range(0, len(whole), rows):
        yield whole.window(start, min(start + rows, len(whole)))


def rows_of(found: Tally) -> list[tuple[str, str, int, int, int, int]]:
    """Return the rows of a tally, with the topic and the client id of each row as text."""
    columns = (found.topic, found.client_id, found.first, found.last, found.messages, found.size)
    return [
        (found.topics[topic], found.client_ids[client], *rest)
        for topic, client, *rest in zip(*(column.tolist() for column in columns), strict=True)
    ]


pairs = st.tuples(
    st.sampled_from(["a", "a/b", "b", "\u00e9", "c"]), st.sampled_from(["", "x", "y", "\u00fc", "z1", "z2"])
)


@given(st.lists(st.tuples(st.dictionaries(pairs, st.integers(1, 9)), st.integers(1, PARTS)), max_size=4))
def test_the_parts_of_a_sum_are_the_sum_in_order(tables: list[tuple[Rows, int]]) -> None:
    """The sum of tables in parts has one row for each pair of topic and client id, in order, with all its messages."""
    expected = Counter[Pair]()
    for rows, _ in tables:
        expected.update(rows)
    wholes = [tally(rows, 100 * number) for number, (rows, _) in enumerate(tables)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tally_records, "_HELD", 6)
        found = list(sum_tables([parts(whole, size) for whole, (_, size) in zip(wholes, tables, strict=True)]))
    rows = [row for part in found for row in rows_of(part)]
    assert rows == rows_of(Tally.sum(wholes))
    assert all(before[:2] < after[:2] for before, after in pairwise(rows))
    assert {row[:2]: row[4] for row in rows} == expected


@pytest.mark.parametrize("step", [0, 1])
def test_a_sum_does_not_hold_its_tables(step: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A sum of tables of many rows holds few rows in memory at any time, whether their pairs are the same or differ."""
    monkeypatch.setattr(tally_records, "_HELD", 100)
    read = summed = most = 0

    def counted(whole: Tally) -> Iterator[Tally]:
        nonlocal read, most
        for part in parts(whole, PARTS):
            read += len(part)
            most = max(most, read - summed)
            yield part

    tables = [tally({(f"t/{n + step * k:05}", "c"): 1 for n in range(0, 2_000, 2)}, k) for k in range(3)]
    for part in sum_tables([counted(table) for table in tables]):
        summed += int(part.messages.sum())
    assert summed == read == 3_000
    assert most <= 100 + 3 * PARTS
