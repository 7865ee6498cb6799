"""Tests of queues."""

from __future__ import annotations

import pytest
import topicstore as ts
from topicstore import Message
from topicstore.queues.queue import Queue

from topicstore_conformance.conditions.capabilities import requires
from topicstore_conformance.faults.striking import Fault, striking
from topicstore_conformance.parts.fixtures import DAY, Fixtures, deaths, drop_first, numbered, payloads
from topicstore_conformance.parts.machines import World

__all__ = ["Queueing"]


def read(queue: Queue) -> list[int]:
    """Return the numbers of all messages of a queue from its head on."""
    queue.rewind()
    found: list[int] = []
    while batch := queue.read(3).messages:
        found += payloads(batch)
    return found


class Queueing(Fixtures):
    """Tests of queues."""

    def test_first_in_first_out(self, world: World) -> None:
        """A queue hands out messages in the order of their appends, and a commit removes those up to its id."""
        queue, other = world.db.queues.open("q"), world.db.queues.open("other")
        rows = [Message(f"t/{n}", b"%d" % n, f"p{n % 3}", n % 3, n % 2 == 0, n) for n in range(12)]
        ids = [id_ for first in range(0, 12, 4) for id_ in queue.append(rows[first : first + 4])]
        other.append(numbered(range(3)))
        assert rows == queue.peek().messages
        assert (5, 0) == (queue.commit(ids[4]), queue.commit(ids[2]))
        assert list(range(5, 12)) == read(queue)
        assert (7, 3) == (len(queue), len(other))
        assert [0, 1, 2] == read(other)

    def test_bounds(self, world: World) -> None:
        """A full queue refuses a batch as a whole, drops the oldest or drops the newest, as its policy says."""
        for policy, expected in (("refuse", [0, 1, 2]), ("drop_oldest", [2, 3, 4]), ("drop_newest", [0, 1, 2])):
            queue = world.db.queues.open(policy, max_messages=3, overflow=policy)  # type: ignore[arg-type]
            queue.append(numbered(range(3)))
            if policy == "refuse":
                with pytest.raises(ts.QuotaExceededError):
                    queue.append(numbered(range(3, 5)))
            else:
                queue.append(numbered(range(3, 5)))
            assert expected == read(queue)
            assert (0 if policy == "refuse" else 2) == queue.dropped

    @requires("persistent")
    def test_queues_outlast_reopening(self, world: World) -> None:
        """After the database is opened again, a queue has its bounds and the messages that were not committed."""
        queue = world.db.queues.open("q", max_messages=10, overflow="drop_oldest")
        ids = queue.append(numbered(range(8)))
        queue.commit(ids[2])
        queue.read()
        world.reopen()
        queue = world.db.queues.open("q")
        assert list(range(3, 8)) == payloads(queue.read().messages)
        queue.append(numbered(range(8, 16)))
        assert list(range(6, 16)) == read(queue)
        assert ["q"] == [info.name for info in world.db.queues]

    def test_queues_outlive_generations(self, world: World) -> None:
        """A queue keeps its messages when generations of the database are dropped, deleted from and removed by age."""
        queue = world.db.queues.open("q")
        queue.append(numbered(range(5)))
        world.db.store(numbered(range(5)))
        drop_first(world.db)
        world.db.delete("#")
        world.db.retention.set(max_age=10.0)
        world.clock.now += 10 * DAY
        world.db.retention.run()
        assert [0, 1, 2, 3, 4] == read(queue)
        assert [] == list(world.db.replay("#"))

    @requires("persistent")
    @deaths
    def test_a_killed_append(self, world: World, death: Fault) -> None:
        """After a kill within an append, the queue has the batch behind all earlier messages or not at all."""
        queue = world.db.queues.open("q")
        queue.append(numbered(range(4)))
        self._die(world, death, queue, lambda: queue.append(numbered(range(4, 9))))
        assert read(world.db.queues.open("q")) in (list(range(4)), list(range(9)))

    @requires("persistent")
    @deaths
    def test_a_killed_commit(self, world: World, death: Fault) -> None:
        """After a kill within a commit, the queue has lost the committed messages together, or none."""
        queue = world.db.queues.open("q")
        ids = queue.append(numbered(range(9)))
        self._die(world, death, queue, lambda: queue.commit(ids[3]))
        assert read(world.db.queues.open("q")) in (list(range(9)), list(range(4, 9)))

    @staticmethod
    def _die(world: World, death: Fault, queue: Queue, call: object) -> None:
        """Kill the process within a call of a queue, whose messages are in an engine of their own."""
        copy, engines = world.path.with_name("left"), [shard.writer.engine for shard in queue._storage.shards]
        with striking(death, engines, world.path, copy):
            call()  # type: ignore[operator]
        world.become(copy)
