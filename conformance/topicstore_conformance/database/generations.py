"""Tests of databases whose generations have several layouts."""

from __future__ import annotations

from pathlib import Path

import pytest
from topicstore import Message

from topicstore_conformance.conditions.tries import MODE, full
from topicstore_conformance.database.fixtures import Fixtures
from topicstore_conformance.faults.clock import Clock
from topicstore_conformance.oracle.checks import check_all, check_replay, follow_epochs
from topicstore_conformance.oracle.model import Model
from topicstore_conformance.subjects.pairs import Pair, layouts_on, small_options

__all__ = ["Generations"]
CLIENTS = [f"c{number}" for number in range(12)]


class Generations(Fixtures):
    """Tests of generations."""

    @pytest.mark.parametrize("compacted", [pytest.param(False, marks=full), True])
    def test_order_over_layouts_and_shards(self, pair: Pair, directory: Path, compacted: bool) -> None:
        """A replay with ``order="time"`` merges all shards and generations in exact order, whatever their layouts."""
        clock = Clock()
        with pair.open(directory / "db", shards=3, clock=clock, options={pair.layout: pair.small()}) as db:
            model = Model(shards=3, shard_of=db.shard_of, layout=pair.layout)
            names = layouts_on(pair.backend)
            for number, layout in enumerate([pair.layout, *names, *reversed(names)]):
                if number:
                    assert model.add_generation(layout) == db.add_generation(layout, small_options(layout))
                for part in range(5):
                    clock.now += (0, 1, 700, 2_500, 1)[part]  # some messages in the same epoch, some in a later one
                    messages = [
                        Message(f"t/{n % 4}/{'xyz'[(n + part) % 3]}", b"%d/%d" % (part, n), CLIENTS[n % 12])
                        for n in range(40)
                    ]
                    assert [row.id for row in model.store(messages, clock.now)] == db.store(messages).ids
                if compacted and number % 2:
                    db.compact()
                follow_epochs(db, model)
            times = sorted({row.position >> 11 for row in model.rows})
            early, middle, late = (times[len(times) * part // 8] for part in (2, 3, 7))
            smallest = 1 if MODE != "quick" and "fast_seek" in pair.capabilities else 16
            for topic_filter in ("#", "t/1/+", "t/+/x", "t/2/y"):
                check_replay(db, model, topic_filter, order="time", batch_size=64)
                check_replay(db, model, topic_filter, early, late, "time", smallest)
                check_replay(db, model, topic_filter, middle + 1, times[times.index(middle) + 1] + 1, "time", 7)
                check_replay(db, model, topic_filter, times[-1], None, "time", 4096)
            assert [pair.layout, *names, *reversed(names)] == [info.layout for info in db.generations()]
            check_all(db, model)
