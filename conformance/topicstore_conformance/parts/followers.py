"""Tests of subscriptions that follow stored messages."""

from __future__ import annotations

from concurrent.futures import Future
from functools import partial
from types import FunctionType
from typing import cast

import pytest
from topicstore.contract.errors import DatabaseClosedError
from topicstore.pubsub.notifier import ThreadWaiter
from topicstore.pubsub.subscription import Subscription, SubscriptionBatch

from topicstore_conformance.conditions.capabilities import requires
from topicstore_conformance.faults.striking import Fault
from topicstore_conformance.faults.threads import PATIENCE, begin, running, wait_until
from topicstore_conformance.parts.fixtures import DAY, Fixtures, deaths, drop_first, numbered, payloads
from topicstore_conformance.parts.machines import World

__all__ = ["Followers", "fetched"]


def fetched(subscription: Subscription, count: int) -> list[int]:
    """Return the numbers of the next messages, at least ``count``, and acknowledge them."""
    found: list[int] = []
    while len(found) < count:
        batch = subscription.fetch(5, timeout=PATIENCE)
        assert batch.messages or batch.dropped
        found += payloads(batch.messages)
        subscription.acknowledge(batch.sequence)
    return found


class Followers(Fixtures):
    """Tests of subscriptions that follow stored messages."""

    def test_stored_then_new(self, world: World) -> None:
        """A subscription yields the stored messages from its start on, then new ones, each once and in order."""
        world.db.store(numbered(range(20)))
        with world.db.subscribe("t/#", 0) as subscription, world.db.subscribe("t/#") as new:
            found = fetched(subscription, 10)
            world.db.store(numbered(range(20, 40)))
            found += fetched(subscription, 40 - len(found))
            assert list(range(40)) == sorted(found)
            assert list(range(20, 40)) == sorted(fetched(new, 20))
            for publisher in range(3):
                for topic in range(4):
                    mine = [number for number in found if (number % 3, number % 4) == (publisher, topic)]
                    assert sorted(mine) == mine

    def test_waiting_followers_are_woken(self, world: World) -> None:
        """A fetch that waits ends with the next matching message, and with an error when the database is closed.

        Other subscriptions of the same filter, which are closed meanwhile, change nothing.
        """

        def begun() -> Future[SubscriptionBatch]:
            waiting = begin(partial(subscription.fetch, timeout=PATIENCE))
            wait_until(lambda: running(cast("FunctionType", ThreadWaiter.wait)), "a fetch to wait")
            return waiting

        with world.db.subscribe("t/#") as subscription:
            for number in range(3):
                waiting = begun()
                with world.db.subscribe("t/#"):
                    pass
                world.db.store(numbered([number]))
                assert [number] == payloads(waiting.result(2 * PATIENCE).messages)
            waiting = begun()
            world.db.close()
            with pytest.raises(DatabaseClosedError):
                waiting.result(2 * PATIENCE)

    @requires("persistent")
    def test_places_outlast_reopening(self, world: World) -> None:
        """After a reopening, a subscription at the place of an earlier one yields the messages not yielded before."""
        world.db.store(numbered(range(30)))
        with world.db.subscribe("t/#", 0) as subscription:
            found = fetched(subscription, 12)
            place = subscription.place
        world.reopen()
        world.db.store(numbered(range(30, 40)))
        with world.db.subscribe("t/#", place) as subscription:
            found += fetched(subscription, 40 - len(found))
        assert list(range(40)) == sorted(found)

    def test_followers_pass_dropped_generations(self, world: World) -> None:
        """A subscription reports a dropped generation, yields none of its messages, and continues with the next one."""
        world.db.store(numbered(range(10)))
        with world.db.subscribe("t/#", 0) as subscription:
            drop_first(world.db)
            world.db.store(numbered(range(10, 20)))
            found, dropped = list[int](), list[int]()
            while len(found) < 10:
                batch = subscription.fetch(timeout=PATIENCE)
                assert batch.messages or batch.dropped
                found += payloads(batch.messages)
                dropped += batch.dropped
            assert list(range(10, 20)) == sorted(found)
            assert {1} == set(dropped)

    def test_followers_pass_expired_messages(self, world: World) -> None:
        """A subscription skips messages that retention has removed, and yields each remaining message once."""
        world.db.retention.set(max_age=86_400.0, rotate_every=3_600.0)
        world.db.store(numbered(range(10)))
        with world.db.subscribe("t/#", 0) as subscription:
            world.clock.now += DAY // 2
            world.db.retention.run()
            world.db.store(numbered(range(10, 20)))
            world.clock.now += DAY * 3 // 4
            world.db.retention.run()
            world.db.store(numbered(range(20, 30)))
            assert list(range(10, 30)) == sorted(fetched(subscription, 20))

    @requires("persistent")
    @deaths
    def test_a_killed_follower(self, world: World, death: Fault) -> None:
        """After a kill, a subscription from the acknowledged place yields all stored messages after it once."""
        world.db.store(numbered(range(20)))
        with world.db.subscribe("t/#", 0, window=100) as subscription:
            first = fetched(subscription, 7)
            place = subscription.acknowledged
            with world.dying(death):
                world.db.store(numbered(range(20, 30)))
        there = payloads(world.db.replay("t/#"))
        with world.db.subscribe("t/#", place) as subscription:
            found = fetched(subscription, len(there) - len(first))
        assert sorted(there) == sorted(first + found)
