"""`explain`: the costs of one replay, by slab."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import attrs
import pytest
import topicstore as ts
from topicstore.contract.replay_plan import Order
from topicstore.storage.reading.explain import LEGEND, Explanation
from topicstore_conformance.conditions.skipping import need
from topicstore_conformance.subjects.pairs import Pair, known

SECOND = 1_000_000
ROWS = [ts.Message(f"fleet/{n % 3}/speed", b"%03d" % n, f"bus-{n % 5}", timestamp=SECOND * n) for n in range(60)]
FILTERS = ["#", "fleet/+/speed", "fleet/1/speed", "fleet/1/#", "fleet/9/speed", "other"]


@pytest.fixture
def db(tmp_path: Path) -> Iterator[ts.Database]:
    """A database with a generation of the reference layout up to second 30, and then one of the block layout."""
    with ts.open(tmp_path / "db", backend="memory", layout="reference", timestamps="message") as opened:
        opened.store(ROWS[:30])
        opened.add_generation("block", {"thresholds": [2]})
        opened.store(ROWS[30:])
        yield opened


def unread(found: Explanation) -> dict[int, str]:
    return {slab.generation: slab.reason for slab in found.unread}


def test_a_reference_slab_reads_every_message(db: ts.Database) -> None:
    """In a slab of the reference layout, a replay does one scan, and visits every message."""
    found = db.explain("fleet/1/speed")
    assert (20, 60) == (found.messages, found.payload_bytes)
    slab = found.slabs[0]
    assert (0, 1, "reference", 1, 1, ["#"], 1) == (
        slab.shard,
        slab.generation,
        slab.layout,
        slab.streams,
        slab.matching,
        slab.patterns,
        slab.passes,
    )
    assert {"seeks": 1, "visited": 30, "skipped": 0, "rows": 10} == attrs.asdict(slab.reads)
    assert 1 == slab.batches


@pytest.mark.parametrize("order", ["any", "time"])
@pytest.mark.parametrize("topic_filter", FILTERS)
def test_it_is_the_replay(db: ts.Database, topic_filter: str, order: Order) -> None:
    """`explain` reports as many messages and bytes as the replay returns, and the slabs that contain these messages."""
    for start, until in ((0, None), (10 * SECOND, 50 * SECOND), (45 * SECOND, None), (90 * SECOND, None)):
        payloads = [m.payload for m in db.replay(topic_filter, start, until, order=order)]
        found = db.explain(topic_filter, start, until, order=order)
        assert (len(payloads), len(b"".join(payloads))) == (found.messages, found.payload_bytes)
        assert len(payloads) == sum(slab.reads.rows for slab in found.slabs)
        assert found.batches == sum(slab.batches for slab in found.slabs)


def test_only_what_changed(db: ts.Database) -> None:
    """`explain` counts only its own reads, which `info` adds to its totals."""
    first = [slab.reads for slab in db.explain("fleet/1/speed").slabs]
    assert 20 == sum(1 for _ in db.replay("fleet/1/speed"))
    assert first == [slab.reads for slab in db.explain("fleet/1/speed").slabs]
    assert [3 * reads.rows for reads in first] == [reads.rows for reads in db.info().shards[0].reads.values()]


def test_what_is_not_read(db: ts.Database) -> None:
    """`explain` lists each generation as read, or as not read with the reason."""
    assert {} == unread(db.explain("#"))
    assert {1: "it ended before the start"} == unread(db.explain("#", 40 * SECOND))
    assert {2: "it begins behind the end"} == unread(db.explain("#", until=20 * SECOND))
    assert {2: "no topic of it matches"} == unread(db.explain("other"))
    db.add_generation()
    assert {3: "it is empty"} == unread(db.explain("#"))
    assert {1: "it ended before the start", 3: "it is empty"} == unread(db.explain("#", 40 * SECOND))


def test_it_can_be_printed(db: ts.Database) -> None:
    """The text of `explain` has a line for the totals, one line for each slab, and a legend of the counts."""
    first, reference, block, legend = str(db.explain("fleet/1/speed", until=40 * SECOND)).splitlines()
    assert first.startswith("fleet/1/speed: messages 13 in ")
    assert reference.startswith("shard 0, generation 1 (reference): 1 of 1 streams may match; seeks 1, visited 30, ")
    assert block.startswith("shard 0, generation 2 (block): 1 of 3 streams may match; seeks ")
    assert LEGEND == legend
    late = str(db.explain("#", 40 * SECOND)).splitlines()
    assert "not read: shard 0, generation 1 (reference): it ended before the start" == late[2]


def test_every_shard_is_named(tmp_path: Path) -> None:
    with ts.open(tmp_path / "db", backend="memory", shards=3) as opened:
        opened.store(ROWS)
        held = {n: sum(opened.shard_of(m.client_id) == n for m in ROWS) for n in range(3)}
        found = opened.explain("#", order="time")
        assert {n: rows for n, rows in held.items() if rows} == {slab.shard: slab.reads.rows for slab in found.slabs}


def test_learned_patterns_come_first(db: ts.Database) -> None:
    """`explain` lists learned patterns first, because they explain why streams of other topics are read."""
    db.store([ts.Message(f"fleet/{n}/speed", b"", timestamp=60 * SECOND) for n in range(40)])
    slab = db.explain("fleet/30/speed").slabs[-1]
    assert "fleet/+/speed" == slab.patterns[0]
    everything = db.explain("#").slabs[-1]
    assert everything.matching == everything.streams
    assert len(everything.patterns) <= 5


def test_times_add_up(db: ts.Database) -> None:
    found = db.explain("#")
    assert 0 < found.planning_seconds + sum(slab.seconds for slab in found.slabs) <= found.seconds
    assert found.messages / found.seconds == found.rate
    assert [0.0, 0.0] == [slab.epoch_seconds for slab in found.slabs]


def test_it_refuses_what_a_replay_refuses(db: ts.Database) -> None:
    with pytest.raises(ts.InvalidFilterError):
        db.explain("a/#/b")
    with pytest.raises(ts.InvalidArgumentError, match="order is"):
        db.explain("#", order="random")  # type: ignore[arg-type]
    with pytest.raises(ts.InvalidArgumentError, match="not a time"):
        db.explain("#", "yesterday")  # type: ignore[arg-type]
    db.close()
    with pytest.raises(ts.DatabaseClosedError):
        db.explain("#")


@pytest.mark.parametrize("pair", {pair.layout: pair for pair in known()}.values(), ids=str)
def test_every_layout_counts(pair: Pair, tmp_path: Path) -> None:
    """In every layout `explain` counts seeks, visited messages and rows, and the time of epochs if there are any."""
    need(pair)
    with pair.open(tmp_path / "db", timestamps="message", options={pair.layout: pair.small()}) as opened:
        for number in range(0, 60, 5):
            opened.store(ROWS[number : number + 5])
        opened.compact()
        for topic_filter in FILTERS:
            found = opened.explain(topic_filter, 20 * SECOND)
            assert sum(1 for _ in opened.replay(topic_filter, 20 * SECOND)) == found.messages
            for slab in found.slabs:
                assert found.messages == slab.reads.rows
                assert slab.reads.seeks >= 1
                assert (slab.reads.visited > 0) or not found.messages
                assert ("position_order" not in pair.capabilities) == (slab.epoch_seconds > 0)


def test_only_its_beginning_is_run_if_that_is_asked_for(db: ts.Database) -> None:
    """With `limit`, `explain` ends early and its result says so; slabs that it hasn't reached are listed, too."""
    found = db.explain("#", limit=7)
    assert (False, 7) == (found.ended, found.messages)
    assert [(1, 1), (2, 0)] == [(slab.generation, slab.batches) for slab in found.slabs]
    assert "the first messages 7" in str(found)
    whole = db.explain("#", limit=1_000)
    assert (True, 60) == (whole.ended, whole.messages)
    with pytest.raises(ts.InvalidArgumentError):
        db.explain("#", limit=0)
