"""How a layout is chosen: the rule on figures made for it, and one comparison measured for real."""

from __future__ import annotations

from pathlib import Path

import pytest
import topicstore as ts
from topicstore_benchmarks.recommend.choosing import ORACLE, LayoutFigures, choose, compare, representative_filters


def figures(layout: str, total: float, *, cost: float = 1.0, unmerged: float | None = None) -> LayoutFigures:
    return LayoutFigures(
        layout=layout,
        store_rate=1.0,
        compact_seconds=0.0,
        merged=0 if unmerged is None else 1,
        bytes_per_message=1.0,
        delay_seconds=0.0,
        replays=[],
        total_seconds=total,
        unmerged_seconds=unmerged,
        cost=cost,
    )


@pytest.mark.parametrize(
    ("layouts", "chosen"),
    [
        ([figures("a", 1.0)], "a"),
        ([figures("a", 1.0), figures("b", 2.0, cost=0.1)], "a"),
        ([figures("a", 1.0), figures("b", 1.11, cost=0.1)], "a"),
        ([figures("a", 1.0), figures("b", 1.09, cost=0.1)], "b"),
        ([figures("a", 1.0), figures("b", 1.09, cost=2.0)], "a"),
        ([figures("a", 1.0), figures("b", 1.09, cost=0.2), figures("c", 1.05, cost=0.1)], "c"),
        ([figures("a", 1.0), figures("b", 1.09, cost=0.2), figures("c", 2.0, cost=0.1)], "b"),
        ([figures("a", 0.001), figures("b", 0.0059, cost=0.1)], "b"),
        ([figures("a", 0.001), figures("b", 0.0061, cost=0.1)], "a"),
    ],
)
def test_the_rule(layouts: list[LayoutFigures], chosen: str) -> None:
    """The smallest total; of those within a tenth or a few ms, the cheapest to store."""
    best, reason = choose(layouts)
    assert chosen == best.layout
    assert chosen in reason or "ms for all filters" in reason


@pytest.mark.parametrize(
    ("layouts", "says"),
    [
        ([figures("a", 1.0)], "a is the only layout to choose"),
        ([figures("a", 1.0), figures("b", 2.0)], "1,000.00 ms for all filters; the next is b 2,000.00 ms"),
        ([figures("a", 1.0), figures("b", 1.05)], "as fast within 10 %: a 1,000.00 ms against b 1,050.00 ms; "),
        ([figures("a", 0.00443), figures("b", 0.00881)], "too short to tell: a 4.43 ms against b 8.81 ms; "),
        (
            [figures("a", 0.001), figures("b", 0.00105), figures("c", 0.002, cost=0.5)],
            "too short to tell: c 2.00 ms against a 1.00 ms, b 1.05 ms; of these it costs least to store",
        ),
    ],
)
def test_the_reason(layouts: list[LayoutFigures], says: str) -> None:
    """What can't be told is not called as fast, and what decided instead is named."""
    assert choose(layouts)[1].startswith(says)


def test_representative_filters() -> None:
    """The median topic, the busiest, and the median with its varying levels as wildcards."""
    counts = {"a/1/x": 1, "a/2/x": 5, "a/2/y": 9, "b": 50, "$SYS/load": 2}
    assert ["a/2/x", "b", "a/+/x", "a/2/+"] == representative_filters(counts)
    assert ["only"] == representative_filters({"only": 3})
    assert ["$a/b", "$a/+"] == representative_filters({"$a/a": 1, "$a/b": 1})


def test_a_comparison(tmp_path: Path) -> None:
    """Every layout is measured on everything asked for; figures fit together."""
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


def test_before_compaction(tmp_path: Path) -> None:
    """Filters are timed before it too, but only where it then merged something."""
    batches = [ts.MessageBatch.from_messages([ts.Message(f"a/{n}", b"") for n in range(50)]) for _ in range(9)]
    found = compare(batches, ["a/7"], tmp_path)
    merged = {one.layout: one.merged for one in found.layouts}
    assert merged["block"] >= 450
    assert 0 == merged[ORACLE]
    assert [one.merged > 0 for one in found.layouts] == [one.unmerged_seconds is not None for one in found.layouts]
    assert all(one.unmerged_seconds > 0 for one in found.layouts if one.unmerged_seconds is not None)


def test_unusual_samples(tmp_path: Path) -> None:
    """Messages without times, late ones, and ones of the next century are measured like any other."""
    rows = [ts.Message("a", b"%d" % n, timestamp=(None, 5, 4_000_000_000_000_000)[n % 3]) for n in range(30)]
    found = compare([ts.MessageBatch.from_messages(rows)], ["a"], tmp_path)
    assert [30] * len(found.layouts) == [one.replays[1].messages for one in found.layouts]


def test_topics_that_a_wildcard_in_front_leaves_out(tmp_path: Path) -> None:
    """Are counted where they match, and a filter that nothing matches is measured too."""
    rows = [ts.Message(topic, b"", timestamp=1) for topic in ("a", "$SYS/load", "$SYS/load")]
    found = compare([ts.MessageBatch.from_messages(rows)], ["#", "$SYS/#", "nothing"], tmp_path)
    assert [("#", 1), ("$SYS/#", 1), ("nothing", 1)] == [(one.topic_filter, one.weight) for one in found.questions[:3]]
    assert [1, 2, 0, 1] == [replay.messages for replay in found.layouts[0].replays]


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
