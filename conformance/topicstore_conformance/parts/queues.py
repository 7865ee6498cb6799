"""Tests of queues."""

from __future__ import annotations

import contextlib
from random import Random

import pytest
import topicstore as ts
from topicstore import Message
from topicstore.queues.queue import Queue
from topicstore.queues.queues import DIRECTORY
from topicstore.queues.record import Overflow

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
        """A full queue refuses a batch as a whole, or drops its oldest or newest messages, as its policy says."""
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

    def test_commits_move_the_reading(self, world: World) -> None:
        """No read of a queue returns a committed message, whatever the position at which it begins."""
        queue = world.db.queues.open("q")
        ids = queue.append(numbered(range(20)))
        queue.commit(ids[4])
        assert [5, 6, 7] == payloads(queue.read(3).messages)
        assert list(range(5, 20)) == payloads(queue.peek(after=ids[1]).messages)
        queue.commit(ids[9])
        assert [10, 11] == payloads(queue.read(2).messages)
        assert [10, 11] == payloads(queue.peek(2).messages)
        assert [13, 14] == payloads(queue.peek(2, after=ids[12]).messages)
        queue.rewind()
        assert list(range(10, 20)) == payloads(queue.read().messages)
        queue.commit(ids[19] + 1_000)
        assert (0, []) == (len(queue), queue.peek().messages)
        queue.append(numbered([20]))
        assert [20] == payloads(queue.read().messages)

    @pytest.mark.parametrize("overflow", ["refuse", "drop_oldest", "drop_newest"])
    def test_counts_of_queues(self, world: World, overflow: Overflow) -> None:
        """A queue counts the messages and bytes that it holds, and the messages that its policy has dropped."""
        model, dropped = list[int](), 0
        world.db.queues.open("alone").append(numbered([10]))
        size = world.db.queues["alone"].bytes
        queue = world.db.queues.open("q", max_messages=6, max_bytes=8 * size, overflow=overflow)
        for first, commit in ((0, 2), (10, 0), (20, 6), (30, 1), (40, 0), (50, 6)):
            with contextlib.suppress(ts.QuotaExceededError):
                batch = list(range(10 + first, 11 + first + first // 10 % 5 * 2))
                queue.append(numbered(batch))
                room = 6 - len(model)
                model, over = {
                    "refuse": (model + batch, 0),
                    "drop_oldest": ((model + batch)[-6:], max(len(batch) - room, 0)),
                    "drop_newest": (model + batch[:room], max(len(batch) - room, 0)),
                }[overflow]
                dropped += over
            ids = queue.peek().ids
            if commit and ids:
                queue.commit(ids[min(commit, len(ids)) - 1])
                model = model[commit:]
            assert model == payloads(queue.peek().messages)
            info = world.db.queues["q"]
            assert (len(model), size * len(model), dropped) == (info.messages, info.bytes, info.dropped)

    @requires("persistent")
    def test_large_queues_keep_what_was_read(self, world: World) -> None:
        """An uncommitted message is kept after it was read, after further appends and after a reopening."""
        queue = world.db.queues.open("q")
        for first in range(0, 40, 4):
            rows = [b"%02d" % number + Random(number).randbytes(1 << 19) for number in range(first, first + 4)]
            queue.append([Message("t", payload, "p") for payload in rows])
            while len(queue.read()):
                pass
        world.reopen()
        queue, found = world.db.queues.open("q"), list[int]()
        while len(found) < 20:
            batch = queue.read(20 - len(found))
            assert len(batch), "read messages are gone"
            found += [int(message.payload[:2]) for message in batch.messages]
        assert list(range(20)) == found
        queue.commit(batch.last)
        queue.rewind()
        assert 20 == int(queue.read(1).messages[0].payload[:2])
        assert 20 == len(queue)

    @requires("persistent")
    def test_changed_bounds_outlast_reopening(self, world: World) -> None:
        """Changed bounds apply immediately, are kept when the database is opened again, and remove no message."""
        queue = world.db.queues.open("q", max_messages=8)
        queue.append(numbered(range(6)))
        queue.bound(max_messages=3, overflow="drop_newest")
        for _ in range(2):
            queue = world.db.queues.open("q")
            assert [] == queue.append(numbered([9]))
            assert list(range(6)) == read(queue)
            assert (3, "drop_newest") == (queue.info().max_messages, queue.info().overflow)
            world.reopen()
        queue = world.db.queues.open("q", max_messages=None)
        assert 4 == len(queue.append(numbered(range(6, 10))))
        assert list(range(10)) == read(queue)

    @requires("persistent")
    def test_a_dropped_queue_is_gone(self, world: World) -> None:
        """A dropped queue is not listed, begins empty under the same name, and leaves all other queues unchanged.

        A directory without a queue, such as an interrupted creation leaves, isn't listed either.
        """
        (world.path / DIRECTORY / "empty").mkdir(parents=True)
        for name in ("q", "other", "Q", "q/q"):
            world.db.queues.open(name).append(numbered(range(3)))
        assert world.db.queues.drop("q")
        assert not world.db.queues.drop("q")
        for _ in range(2):
            assert ["Q", "other", "q/q"] == sorted(info.name for info in world.db.queues)
            assert [] == world.db.verify().damages
            assert ("q" in world.db.queues, [0, 1, 2]) == (False, read(world.db.queues.open("other")))
            world.reopen()
        queue = world.db.queues.open("q")
        assert (0, 0, []) == (len(queue), queue.dropped, read(queue))

    @requires("persistent")
    @deaths
    def test_a_killed_append(self, world: World, death: Fault) -> None:
        """After a kill during an append, the queue has all earlier messages, and then the whole batch or none of it."""
        queue = world.db.queues.open("q")
        queue.append(numbered(range(4)))
        self._die(world, death, queue, lambda: queue.append(numbered(range(4, 9))))
        assert read(world.db.queues.open("q")) in (list(range(4)), list(range(9)))

    @requires("persistent")
    @deaths
    def test_a_killed_commit(self, world: World, death: Fault) -> None:
        """After a kill during a commit, either all committed messages are gone from the queue, or none."""
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
