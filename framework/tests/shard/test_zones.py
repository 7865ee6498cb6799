"""Time spans of consecutive messages (zones), by which a read can skip ranges of positions."""

from __future__ import annotations

import numpy as np
import pytest
import topicstore as ts
from hypothesis import given
from hypothesis import strategies as st
from topicstore import MessageBatch
from topicstore.contract.columns import Column, Constant, to_list
from topicstore.contract.positions import Positions
from topicstore.contract.replay_plan import TimeRange
from topicstore.shard import zones
from topicstore.shard.zones import Zone, ZoneRecord, fill, may_hold

MINUTE = 60_000_000
TIMES = st.one_of(st.integers(0, 20 * MINUTE), st.integers(0, 2**52))
BATCHES = st.lists(st.lists(TIMES, min_size=1, max_size=12), max_size=8)
FORMS = [
    lambda times: times,
    lambda times: np.array(times, dtype=np.int64),
    lambda times: Constant(times[0], len(times)),
]


def placed(positions: Positions, times: Column) -> MessageBatch:
    """Return messages with these positions and timestamps."""
    rows = len(positions)
    new = MessageBatch.from_messages([ts.Message("a", b"", "c") for _ in range(rows)])
    return new.placed(positions, times, 0)


def filled(batches: list[list[int]], form: object = FORMS[0]) -> tuple[list[ZoneRecord], list[tuple[int, int]]]:
    """Return the zones of batches, including the unfinished zone, and the (position, timestamp) of every message."""
    zone, full, stored = Zone(1), [], []
    for batch in batches:
        times = form(batch)  # type: ignore[operator]
        positions = np.arange(3 * len(stored) + 1, 3 * (len(stored) + len(batch)) + 1, 3, dtype=np.uint64)
        records, zone = fill(zone, placed(positions, times))
        full += records
        stored += zip(positions.tolist(), to_list(times), strict=True)
    return [*full, zone.closed(2**64 - 1)], stored


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Use zones of seven messages."""
    monkeypatch.setattr(zones, "SIZE", 7)


@given(BATCHES, st.sampled_from(FORMS))
def test_every_message_lies_in_its_zone(batches: list[list[int]], form: object) -> None:
    """Every message is in one zone, one of whose spans has its timestamp; spans are few, ordered and disjoint."""
    made, stored = filled(batches, form)
    for position, time in stored:
        (zone,) = [zone for zone in made if zone.first <= position <= zone.last]
        assert any(least <= time <= greatest for least, greatest in zone.spans)
    for zone in made:
        assert len(zone.spans) <= 6
        ends = [end for span in zone.spans for end in span]
        assert ends == sorted(ends)
    assert [zone.last + 1 for zone in made[:-1]] == [zone.first for zone in made[1:]]
    assert all(7 == sum(zone.first <= position <= zone.last for position, _ in stored) for zone in made[:-1])


@given(BATCHES, TIMES, TIMES, st.integers(1, 300), st.integers(1, 300))
def test_what_is_left_out_holds_nothing_wanted(batches: list[list[int]], a: int, b: int, first: int, last: int) -> None:
    """The ranges to read are ordered, within the bounds, and contain all messages in the time range."""
    made, stored = filled(batches)
    wanted = TimeRange(min(a, b), max(a, b))
    spans = list(may_hold(wanted, made, first, last))
    ends = [end for span in spans for end in span]
    assert ends == sorted(ends)
    assert all(first <= end <= last for end in ends)
    for position, time in stored:
        if first <= position <= last and wanted.overlaps(time, time):
            assert any(begin <= position <= end for begin, end in spans)


def test_one_outlier_does_not_spoil_a_zone(monkeypatch: pytest.MonkeyPatch) -> None:
    """An outlier gets a time span of its own, so that reads can skip the times between the spans."""
    monkeypatch.setattr(zones, "SIZE", 1_000)
    now = 2**50
    made, _ = filled([[now + n for n in range(100)] + [5], [now - 1], [now + MINUTE]])
    assert [((5, 5), (now - 1, now + MINUTE))] == [zone.spans for zone in made]


def test_of_more_spans_the_nearest_become_one() -> None:
    """If there are too many spans, the two nearest are merged, in one batch or over several."""
    times = [n * n * 1_000 * MINUTE for n in range(7)]
    expected = ((times[0], times[1]), *((time, time) for time in times[2:]))
    for batches in ([times], [[time] for time in times]):
        made, _ = filled(batches)
        assert expected == made[0].spans


def test_a_zone_that_is_too_full() -> None:
    """A zone above the size limit, as another version may have written, is closed at the next message."""
    positions = np.array([200, 201], dtype=np.uint64)
    records, zone = fill(Zone(1, 100, ((3, 3),)), placed(positions, [4, MINUTE * 9]))
    assert [ZoneRecord(first=1, last=200, spans=((3, 4),))] == records
    assert zone == Zone(201, 1, ((MINUTE * 9, MINUTE * 9),))


def test_where_no_zone_is_everything_may_be() -> None:
    """Positions without a zone, as in older databases or between two zones, may hold any timestamp."""
    wanted = TimeRange(10, 20)
    other, same = ((30, 40),), ((15, 15),)
    made = [
        ZoneRecord(first=5, last=7, spans=other),
        ZoneRecord(first=10, last=12, spans=same),
        ZoneRecord(first=13, last=20, spans=()),
        ZoneRecord(first=13, last=2**64 - 1, spans=other),
    ]
    assert [(0, 4), (8, 12)] == list(may_hold(wanted, made, 0, 100))
    assert [(6, 6)] == list(may_hold(wanted, [], 6, 6))
    assert [] == list(may_hold(wanted, made, 5, 7))
