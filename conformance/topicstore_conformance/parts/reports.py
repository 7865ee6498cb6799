"""Tests of a database's reports about itself: counts, sizes, times and states."""

from __future__ import annotations

import time
from datetime import datetime
from random import Random

import topicstore as ts
from topicstore import Message

from topicstore_conformance.faults.threads import PATIENCE
from topicstore_conformance.parts.fixtures import SECOND, Fixtures, delivered, numbered
from topicstore_conformance.parts.followers import fetched
from topicstore_conformance.parts.machines import World
from topicstore_conformance.parts.sessions import sent, settled, subscribed
from topicstore_conformance.subjects.pairs import Pair

__all__ = ["Reports"]


class Reports(Fixtures):
    """Tests of a database's reports about itself."""

    def test_reports_of_generations(self, world: World) -> None:
        """A generation reports the times of its beginning and end, and its messages and bytes without deleted ones."""
        first = world.clock.now
        for number in range(3):
            world.db.store([Message(f"t/{n % 4}", Random(n).randbytes(300), f"p{n % 3}") for n in range(20)])
            world.clock.now += SECOND
            if number < 2:
                world.db.add_generation()
        infos = world.db.generations()
        times = [first + number * SECOND for number in (1, 2)]
        assert [(1, 20), (2, 20), (3, 20)] == [(info.number, info.messages) for info in infos]
        assert ([first, *times], [*times, None]) == ([info.created for info in infos], [info.sealed for info in infos])
        assert infos == world.db.info().generations
        assert 5 == world.db.delete("t/1", until=times[0])
        world.db.delete("#", first + 2 * SECOND)
        world.db.compact()
        after = world.db.generations()
        assert [15, 20, 0] == [info.messages for info in after]
        assert after[0].live_bytes < infos[0].live_bytes
        assert after[2].live_bytes < infos[2].live_bytes
        assert sum(info.live_bytes for info in after) == world.db.info().live_bytes

    def test_reports_of_the_creation(self, world: World, pair: Pair) -> None:
        """A database reports the wall-clock time of its creation, and the version of the program that created it."""
        began = int(time.time())
        with pair.open(world.path.with_name("new"), clock=world.clock) as db:
            created = datetime.fromisoformat(db.manifest.created).timestamp()
            assert began <= created <= time.time()
            assert f"topicstore {ts.__version__}" == db.manifest.created_by

    def test_reports_of_topics(self, world: World) -> None:
        """`topics` and `clients` count messages and bytes over all generations, also of a topic with one message.

        `latest` returns the last message of the topic.
        """
        for number in range(1, 4):
            world.db.store([Message("t/a", b"123", "p")])
            list(world.db.replay("#"))  # ends the current epochs, if the layout has epochs
            [topic], [client] = world.db.topics(), world.db.clients()
            assert ("t/a", number, 6 * number) == (topic.topic, topic.messages, topic.bytes)
            assert ("p", number, 6 * number) == (client.client_id, client.messages, client.bytes)
            assert [(b"123", "t/a")] == [(message.payload, message.topic) for message in world.db.latest()]
            world.db.add_generation()

    def test_reports_of_work(self, world: World) -> None:
        """A database counts the batches, messages and bytes that it stores, deletes and reads, and measures times."""
        before = world.db.info().total  # the opening makes commits, too
        began = time.perf_counter()
        rows = [Message(f"t/{number}", bytes(number), f"p{number}") for number in range(10)]
        for _ in range(3):
            assert 10 == world.db.store(rows).count
        elapsed = time.perf_counter() - began
        total, both = world.db.info().total, len({world.db.shard_of(row.client_id) for row in rows})
        assert (3 * both, 30, 3 * 45) == (total.batches, total.messages, total.payload_bytes)
        assert (0, 0, 0) == (total.failed_batches, total.failures, total.deleted)
        assert total.bytes >= total.payload_bytes
        stores = [shard.writer.latencies.store for shard in world.db.storage.shards]
        assert 3 * both == sum(sum(one.counts) for one in stores)
        committing = total.commit_seconds - before.commit_seconds
        assert 0 <= committing <= sum(one.seconds for one in stores) <= elapsed * both
        assert 30 == len(list(world.db.replay("#")))
        assert 3 == world.db.delete("t/1")
        after = world.db.info().total
        assert (3, 30) == (after.deleted, after.read_messages - total.read_messages)

    def test_reports_of_sessions(self, world: World) -> None:
        """A session reports its messages in flight, those to be redelivered, its subscriptions, and why it waits."""
        session = subscribed(world, receive_maximum=3)
        world.db.sessions.open("away", expiry_interval=None).lost()
        world.db.publish(numbered(range(5)))
        settled(world)
        items = sent(session)
        found = session.status()
        assert ("client", 3, 3, 0, "acknowledgements") == (
            found.client_id,
            found.in_flight,
            found.receive_maximum,
            found.to_resend,
            found.waits_for,
        )
        assert ["t/#"] == [one.topic_filter for one in found.subscriptions]
        counts = world.db.sessions.counts()
        assert (1, 0, 1, 3) == (counts.connected, counts.paused, counts.subscriptions, counts.in_flight)
        assert (["away", "client"], ["client"], ["away"]) == tuple(
            sorted(world.db.sessions.clients(connected=connected)) for connected in (None, True, False)
        )
        session.puback(items[0].packet_id)
        assert 2 == session.status().in_flight
        session.lost()
        again = world.db.sessions.open("client", expiry_interval=None)
        assert (2, 2, 65_535) == ((found := again.status()).in_flight, found.to_resend, found.receive_maximum)
        assert 4 == len(delivered(again, acknowledge=True))
        found = again.status()
        assert ("nothing", 0, 0) == (found.waits_for, found.in_flight, found.to_resend)

    def test_reports_of_subscriptions(self, world: World) -> None:
        """A subscription reports its unread and unacknowledged messages, and whether its window is full."""
        world.db.store(numbered(range(7), client_id="p"))
        with world.db.subscribe("t/#", 0, window=5) as subscription:
            assert (7, True, 0) == (subscription.lag().messages, (one := subscription.status()).lagging, one.dropped)
            sizes = list[int]()
            while sum(sizes) < 5:
                sizes.append(len(subscription.fetch(3, timeout=PATIENCE)))
            full, one = subscription.fetch(timeout=0), subscription.status()
            assert (3, True) == (max(sizes), full.stuck)
            assert ([], 5, True, 5) == (full.messages, full.sequence, one.stuck, one.unacknowledged)
            subscription.acknowledge(4)
            one = subscription.status()
            assert ("t/#", False, 1, 2) == (
                one.topic_filter,
                one.stuck,
                one.unacknowledged,
                subscription.lag().messages,
            )
            assert [5, 6] == fetched(subscription, 2)
            assert (0, 0) == (subscription.lag().messages, subscription.status().unacknowledged)
