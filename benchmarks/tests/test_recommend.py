"""The choice of a layout: the rule applied to invented figures, and measured comparisons."""

from __future__ import annotations

from pathlib import Path

import pytest
import topicstore as ts
from topicstore_benchmarks.recommend.choosing import ORACLE, LayoutFigures, choose, compare, representative_filters


def figures(layout: str, total: float, cost: float = 1.0) -> LayoutFigures:
    nothing = dict.fromkeys(("store_rate", "compact_seconds", "bytes_per_message", "delay_seconds"), 0.0)
    return LayoutFigures(
        layout=layout, total_seconds=total, cost=cost, merged=0, replays=[], unmerged_seconds=None, **nothing
    )


@pytest.mark.parametrize(
    ("others", "says"),
    [
        ([], "a is the only layout to choose"),
        ([("b", 2.0, 0.1)], "1,000.00 ms for all filters; the next is b 2,000.00 ms"),
        ([("b", 1.11, 0.1)], "1,000.00 ms for all filters; the next is b 1,110.00 ms"),
        ([("b", 1.09, 0.1)], "as fast within 10 %: b 1,090.00 ms against a 1,000.00 ms; of these it costs least"),
        ([("b", 1.09, 2.0)], "as fast within 10 %: a 1,000.00 ms against b 1,090.00 ms; "),
        ([("b", 1.09, 0.2), ("c", 1.05, 0.1)], "as fast within 10 %: c 1,050.00 ms against a 1,000.00 ms, b 1,090.00"),
        ([("b", 1.09, 0.2), ("c", 2.0, 0.1)], "as fast within 10 %: b 1,090.00 ms against a 1,000.00 ms; "),
    ],
)
def test_the_rule(others: list[tuple[str, float, float]], says: str) -> None:
    """The layout with the smallest total wins, or the cheapest one if totals differ by less than a tenth.

    The reason names the criterion.
    """
    best, reason = choose([figures("a", 1.0), *(figures(*one) for one in others)])
    assert reason.startswith(says)
    assert best.layout == (says.partition(": ")[2] or "a")[0]


@pytest.mark.parametrize(
    ("others", "chosen", "says"),
    [
        ([("b", 0.0059, 0.1)], "b", "too short to tell: b 5.90 ms against a 1.00 ms; "),
        ([("b", 0.0061, 0.1)], "a", "1.00 ms for all filters; the next is b 6.10 ms"),
        ([("b", 0.00105, 1.0), ("c", 0.002, 0.5)], "c", "too short to tell: c 2.00 ms against a 1.00 ms, b 1.05 ms; "),
    ],
)
def test_what_is_too_short_to_tell(others: list[tuple[str, float, float]], chosen: str, says: str) -> None:
    """Totals that differ by under five milliseconds count as equal; the reason says that the times are too short."""
    best, reason = choose([figures("a", 0.001), *(figures(*one) for one in others)])
    assert (chosen, True) == (best.layout, reason.startswith(says)), reason


def test_representative_filters() -> None:
    """Representative filters are the median topic, the busiest topic, and the median topic with one level as ``+``."""
    counts = {"a/1/x": 1, "a/2/x": 5, "a/2/y": 9, "b": 50, "$SYS/load": 2}
    assert ["a/2/x", "b", "a/+/x", "a/2/+"] == representative_filters(counts)
    assert ["only"] == representative_filters({"only": 3})
    assert ["$a/b", "$a/+"] == representative_filters({"$a/a": 1, "$a/b": 1})


def test_a_comparison(tmp_path: Path) -> None:
    """Every layout is measured with all filters, and again after compaction if the layout compacts.

    Totals equal the weighted sums of the replays' times.
    """
    rows = [
        ts.Message(f"fleet/{n % 9}/{'ab'[n % 2]}", b"%d" % n, f"bus-{n % 5}", timestamp=1_000 * n) for n in range(900)
    ]
    batches = [ts.MessageBatch.from_messages(rows[n : n + 100]) for n in range(0, 900, 100)]
    told: list[str] = []
    found = compare(batches, ["fleet/+/a", "fleet/3/+", "fleet/+/a"], tmp_path, progress=told.append)
    assert (900, 18) == (found.messages, found.topics)
    assert [("#", 0), ("fleet/+/a", 2), ("fleet/3/+", 1), ("#", 0)] == [
        (question.topic_filter, question.weight) for question in found.questions
    ]
    assert 891_000 == found.questions[-1].start
    assert {ORACLE, "block"} <= {one.layout for one in found.layouts}
    for one in found.layouts:
        assert [900, 450, 100, 9] == [replay.messages for replay in one.replays]
        assert 2 * one.replays[1].seconds + one.replays[2].seconds == pytest.approx(one.total_seconds)
    assert sorted(one.total_seconds for one in found.layouts) == [one.total_seconds for one in found.layouts]
    assert ORACLE != found.recommended
    assert "wildcard_optimized" in {one.layout for one in found.layouts if one.delay_seconds}
    assert ["store", "replay all", "filter 1", "filter 2", "late start"] == told[:5]
    assert {"block": 900, ORACLE: 0}.items() <= {one.layout: one.merged for one in found.layouts}.items()
    assert [one.merged > 0 for one in found.layouts] == [one.unmerged_seconds is not None for one in found.layouts]
    assert all(one.unmerged_seconds > 0 for one in found.layouts if one.unmerged_seconds is not None)


def test_unusual_samples(tmp_path: Path) -> None:
    """Samples with missing, unordered and future times, and filters that match few or no messages, can be measured."""
    topics = ("a", "$SYS/load", "$SYS/load")
    rows = [
        ts.Message(topics[n // 10], b"%d" % n, timestamp=(None, 5, 4_000_000_000_000_000)[n % 3]) for n in range(30)
    ]
    found = compare([ts.MessageBatch.from_messages(rows)], ["#", "$SYS/#", "nothing"], tmp_path)
    assert [("#", 1), ("$SYS/#", 1), ("nothing", 1)] == [(one.topic_filter, one.weight) for one in found.questions[:3]]
    for one in found.layouts:
        assert [10, 20, 0] == [replay.messages for replay in one.replays[:3]]


def test_refusals(tmp_path: Path) -> None:
    batch = ts.MessageBatch.from_messages([ts.Message("a", b"")])
    with pytest.raises(ts.InvalidArgumentError, match="no messages"):
        compare([ts.MessageBatch.empty()], ["a"], tmp_path)
    with pytest.raises(ts.InvalidArgumentError, match="without filters"):
        compare([batch], [], tmp_path)
    with pytest.raises(ts.InvalidFilterError):
        compare([batch], ["#/a"], tmp_path)
    with pytest.raises(ts.UnsupportedError, match="on 'memory', which keeps nothing"):
        compare([batch], ["a"], tmp_path, backend="memory")
    with pytest.raises(ts.UnknownPluginError):
        compare([batch], ["a"], tmp_path, backend="nonsense")
    with pytest.raises(ts.InvalidArgumentError, match="nothing in the sample matches b or c/#"):
        compare([batch], ["b", "c/#"], tmp_path)
    with pytest.raises(ts.InvalidArgumentError, match="options of nonsense"):
        compare([batch], ["a"], tmp_path, options={"nonsense": {}})
    assert [] == list(tmp_path.iterdir())
