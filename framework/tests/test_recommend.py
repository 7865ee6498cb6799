"""How a layout is chosen: the rule on figures made for it, and one comparison measured for real."""

from __future__ import annotations

from pathlib import Path

import pytest
import topicstore as ts
from topicstore.recommend import ORACLE, LayoutFigures, choose, compare, representative_filters


def figures(layout: str, total: float, *, cost: float = 1.0, error: float = 0.0) -> LayoutFigures:
    return LayoutFigures(
        layout=layout,
        store_rate=1.0,
        compact_seconds=0.0,
        bytes_per_message=1.0,
        delay_seconds=0.0,
        replays=[],
        total_seconds=total,
        error_seconds=error,
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
        ([figures("a", 1.0, error=0.3), figures("b", 1.5, cost=0.1, error=0.3)], "b"),
        ([figures("a", 1.0, error=0.1), figures("b", 1.5, cost=0.1, error=0.2)], "a"),
    ],
)
def test_the_rule(layouts: list[LayoutFigures], chosen: str) -> None:
    """The smallest total; of those within a tenth, or within the noise, the cheapest to store."""
    best, reason = choose(layouts)
    assert chosen == best.layout
    assert chosen in reason or "ms for all filters" in reason


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
    found = compare(batches, ["fleet/+/a", "fleet/3/+", "fleet/+/a"], tmp_path, backend="memory", progress=told.append)
    assert (900, 18) == (found.messages, found.topics)
    assert [("fleet/+/a", 2), ("fleet/3/+", 1), ("#", 0), ("#", 0)] == [
        (question.topic_filter, question.weight) for question in found.questions
    ]
    assert 891_000 == found.questions[-1].start
    assert {ORACLE, "block"} <= {one.layout for one in found.layouts}
    for one in found.layouts:
        assert [450, 100, 900, 9] == [replay.messages for replay in one.replays]
        assert 2 * one.replays[0].seconds + one.replays[1].seconds == pytest.approx(one.total_seconds)
        assert [450, 100, 900, 9] == [replay.reads.rows for replay in one.replays]
        assert all(replay.runs >= 3 for replay in one.replays)
    assert sorted(one.total_seconds for one in found.layouts) == [one.total_seconds for one in found.layouts]
    assert ORACLE != found.recommended
    assert ["storing", "compacting", "replaying fleet/+/a"] == told[:3]


def test_unusual_samples(tmp_path: Path) -> None:
    """Messages without times, late ones, and ones of the next century are measured like any other."""
    rows = [ts.Message("a", b"%d" % n, timestamp=(None, 5, 4_000_000_000_000_000)[n % 3]) for n in range(30)]
    found = compare([ts.MessageBatch.from_messages(rows)], ["a"], tmp_path, backend="memory")
    assert [30] * len(found.layouts) == [one.replays[0].messages for one in found.layouts]


def test_refusals(tmp_path: Path) -> None:
    batch = ts.MessageBatch.from_messages([ts.Message("a", b"")])
    with pytest.raises(ts.InvalidArgumentError, match="no messages"):
        compare([ts.MessageBatch.empty()], ["a"], tmp_path)
    with pytest.raises(ts.InvalidArgumentError, match="without filters"):
        compare([batch], [], tmp_path)
    with pytest.raises(ts.InvalidFilterError):
        compare([batch], ["#/a"], tmp_path)
    with pytest.raises(ts.UnknownPluginError):
        compare([batch], ["a"], tmp_path, backend="nonsense")
    assert [] == list(tmp_path.iterdir())
