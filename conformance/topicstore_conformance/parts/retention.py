"""Tests of retention: the messages that are removed by age and size, and those that stay."""

from __future__ import annotations

import pytest
import topicstore as ts
from topicstore.pubsub.publish import PERSIST

from topicstore_conformance.conditions.capabilities import requires
from topicstore_conformance.faults.striking import Fault
from topicstore_conformance.faults.threads import wait_until
from topicstore_conformance.parts.fixtures import DAY, SECOND, Fixtures, deaths, numbered, payloads
from topicstore_conformance.parts.machines import World
from topicstore_conformance.parts.whole import keys_of

__all__ = ["Retention"]

HOUR = 3_600 * SECOND


def days(world: World, count: int) -> None:
    """Store ten messages a day, with a run of retention each, so that each day has a generation."""
    world.db.retention.set(rotate_every=86_400.0)
    for day in range(count):
        world.db.store(numbered(range(10 * day, 10 * day + 10)))
        world.clock.now += DAY
        world.db.retention.run()


def left(world: World) -> list[int]:
    """Return the numbers of all stored messages."""
    return sorted(payloads(world.db.replay("#")))


class Retention(Fixtures):
    """Tests of retention."""

    def test_nothing_goes_without_a_limit(self, world: World) -> None:
        """Without a limit retention removes nothing, however old and large the messages are."""
        days(world, 3)
        world.clock.now += 10_000 * DAY
        world.db.retention.run()
        assert list(range(30)) == left(world)

    def test_young_messages_stay(self, world: World) -> None:
        """Retention removes no message before it has reached the maximum age, and all messages afterwards."""
        world.db.retention.set(max_age=10 * 86_400.0)
        days(world, 6)
        assert list(range(60)) == left(world)
        world.clock.now += 4 * DAY - SECOND
        world.db.retention.run()
        assert list(range(60)) == left(world)
        world.clock.now += 3 * DAY
        world.db.retention.run()
        assert set(range(30, 60)) <= set(left(world)) <= set(range(20, 60))
        world.clock.now += 30 * DAY
        for _ in range(2):
            world.db.retention.run()
        assert [] == left(world)

    def test_filters_have_ages_of_their_own(self, world: World) -> None:
        """Messages of a filter are removed at the filter's own maximum age, earlier or later than all others."""
        world.db.retention.set(max_age=10 * 86_400.0, rotate_every=86_400.0, filters={"t/0": 86_400.0, "t/1": None})
        world.db.store(numbered(range(12)))
        world.clock.now += DAY + HOUR
        world.db.retention.run()
        assert [number for number in range(12) if number % 4 != 0] == left(world)
        world.clock.now += 30 * DAY
        for _ in range(3):
            world.db.retention.run()
        assert [1, 5, 9] == left(world)

    def test_the_oldest_go_first(self, world: World) -> None:
        """If the stored bytes exceed their limit, the oldest generations are dropped, and no more than necessary."""
        days(world, 6)
        sizes = [info.live_bytes for info in world.db.generations()]
        world.db.retention.set(max_bytes=sum(sizes[3:]) + sizes[2] // 2, when_full="drop")
        world.db.retention.run()
        assert list(range(30, 60)) == left(world)

    @requires("persistent")
    def test_settings_outlast_reopening(self, world: World) -> None:
        """After the database is opened again, the limits and the ages of messages are unchanged."""
        wanted = world.db.retention.set(max_age=86_400.0, filters={"keep/#": None}, rotate_every=3_600.0)
        world.db.store(numbered(range(5)))
        world.db.store(numbered(range(5, 8), topic="keep"))
        world.clock.now += DAY // 2
        world.reopen()
        assert wanted == world.db.retention.settings
        world.db.retention.run()
        world.db.store(numbered(range(8, 10)))
        world.clock.now += DAY // 2 + 2 * HOUR
        for _ in range(2):
            world.db.retention.run()
        assert list(range(5, 10)) == left(world)

    def test_a_clock_that_jumps_ahead_removes_nothing(self, world: World) -> None:
        """If the wall clock jumps ahead and back, a message is removed only after its age by the monotonic clock."""
        world.db.retention.set(max_age=86_400.0, rotate_every=3_600.0)
        world.db.store(numbered(range(5)))
        world.clock.now += SECOND
        world.db.retention.run()
        world.clock.jump(40 * DAY)
        with pytest.warns(RuntimeWarning, match="the clock is"):
            world.db.retention.run()
        assert list(range(5)) == left(world)
        world.clock.jump(-40 * DAY)
        world.db.store(numbered(range(5, 8)))
        world.db.retention.run()
        assert list(range(8)) == left(world)

    @requires("persistent")
    def test_full_databases_refuse_or_drop(self, world: World) -> None:
        """Above ``max_bytes``, a store is refused or the oldest are removed, as configured, also after a reopening."""
        days(world, 4)
        most = sum(info.live_bytes for info in world.db.generations()) // 2
        world.db.retention.set(max_bytes=most, when_full="refuse")
        for _ in range(2):
            world.db.retention.run()
            with pytest.raises(ts.QuotaExceededError):
                world.db.store(numbered([99]))
            with pytest.raises(ts.QuotaExceededError):
                world.db.publish([ts.Message("t", b"99", properties=ts.Properties(user_properties=((PERSIST, "1"),)))])
            assert list(range(40)) == left(world)
            world.reopen()
        world.db.retention.set(when_full="drop")
        world.reopen()
        assert "drop" == world.db.retention.settings.when_full
        world.db.retention.run()
        there = left(world)
        assert 0 < len(there) < 40
        assert list(range(40 - len(there), 40)) == there
        world.db.store(numbered([40]))
        world.db.retention.set(max_bytes=None)
        world.db.store(numbered([41]))
        assert [*there, 40, 41] == left(world)

    @requires("persistent")
    def test_changed_filters_apply_to_old_messages(self, world: World) -> None:
        """After the filters are changed, messages that the earlier filters had spared are removed at their new age."""
        world.db.retention.set(rotate_every=86_400.0, filters={"t/0": 3_600.0, "t/1": 3_600.0 * 48})
        world.db.store(numbered(range(12)))
        world.clock.now += DAY
        world.db.retention.run()
        assert [number for number in range(12) if number % 4] == left(world)
        world.db.retention.set(filters={"t/0": 3_600.0, "t/1": 3_600.0 * 12})
        world.reopen()
        world.db.retention.run()
        assert [number for number in range(12) if number % 4 > 1] == left(world)
        world.db.retention.set(filters={"t/+": 3_600.0, "t/3": None})
        world.db.retention.run()
        assert [3, 7, 11] == left(world)
        world.db.retention.set(filters={"t/+": 3_600.0})
        world.db.retention.run()
        assert [] == left(world)

    def test_filters_remove_nothing_that_is_new(self, world: World) -> None:
        """A run keeps messages that have exactly their filter's age, and messages that are stored after the run."""
        world.db.retention.set(filters={"t/#": 60.0})
        for number in range(10):
            world.db.store(numbered([number], client_id="p"))
            world.clock.now += 10 * SECOND
            world.db.retention.run()
            oldest = max(0, number - 5)
            assert list(range(oldest, number + 1)) == left(world)

    def test_stores_cause_removals(self, world: World) -> None:
        """Without a call of `run`, messages that are due are removed in the background after others are stored."""
        world.db.retention.set(max_age=86_400.0, rotate_every=3_600.0)
        world.db.store(numbered(range(5)))
        world.clock.now += 2 * HOUR
        world.db.store(numbered([5]))
        wait_until(lambda: len(world.db.generations()) > 1, "a generation to be begun")
        world.clock.now += 2 * DAY
        world.db.store(numbered([6]))
        wait_until(lambda: world.db.generations()[0].number > 1, "old messages to be removed")
        wait_until(lambda: keys_of(world.db, 1) == 0, "the engine to have removed them")
        world.db.retention.stop()  # a replay concurrent with a removal may raise
        assert {6} <= set(left(world)) <= {5, 6}

    def test_stores_cause_removals_by_filter(self, world: World) -> None:
        """Without a call of `run`, messages of a filter are removed when they reach its maximum age, repeatedly."""
        world.db.retention.set(filters={"t/#": 86_400.0})

        def deleted() -> bool:
            return world.db.info().total.deleted == number

        for number in range(1, 4):
            world.db.store(numbered([number]))
            world.clock.now += 2 * DAY
            world.db.store(numbered([number], topic="kept"))
            wait_until(deleted, "a message to be removed")
        world.db.retention.stop()  # a replay concurrent with a removal may raise
        assert ([], [1, 2, 3]) == (list(world.db.replay("t/#")), left(world))

    def test_an_outlook_changes_nothing(self, world: World) -> None:
        """An outlook lists the generations in the order of their future removal, with the times, and removes none."""
        world.db.retention.set(max_age=10 * 86_400.0)
        days(world, 3)
        before = left(world), [info.number for info in world.db.generations()]
        found = world.db.retention.outlook()
        times = [one.when for one in found if one.when is not None]
        assert sorted(times) == times
        assert before == (left(world), [info.number for info in world.db.generations()])
        world.clock.now = times[0] - SECOND
        assert () == world.db.retention.run().dropped
        world.clock.now += 2 * SECOND
        assert () != world.db.retention.run().dropped

    @requires("persistent")
    @deaths
    def test_a_killed_run(self, world: World, death: Fault) -> None:
        """After a kill during a run, no young message is missing, and a later run removes all old ones."""
        days(world, 4)
        world.db.retention.set(max_age=2.5 * 86_400.0)
        with world.dying(death):
            world.db.retention.run()
        assert set(range(20, 40)) <= set(left(world))
        for _ in range(2):
            world.db.retention.run()
        assert set(range(20, 40)) <= set(left(world)) <= set(range(10, 40))
        assert world.db.verify().ok

    def test_removed_messages_are_counted_nowhere(self, world: World) -> None:
        """Every count excludes the messages that retention has removed, and includes those that it kept."""
        days(world, 3)
        world.db.retention.set(max_age=1.5 * 86_400.0)
        world.db.retention.run()
        count = len(left(world))
        assert 0 < count < 30
        assert count == world.db.info().messages == sum(tally.messages for tally in world.db.topics())
        assert count == sum(info.messages for info in world.db.generations()) == world.db.verify().messages
