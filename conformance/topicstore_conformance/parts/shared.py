"""Tests of shared subscriptions."""

from __future__ import annotations

from collections import Counter

import topicstore as ts
from topicstore.sessions import Publish, Session

from topicstore_conformance.conditions.capabilities import requires
from topicstore_conformance.faults.striking import Fault
from topicstore_conformance.parts.fixtures import SECOND, Fixtures, deaths, drop_first, payloads
from topicstore_conformance.parts.machines import World

__all__ = ["Shared"]

MEMBERS = ("a", "b", "c")


def members(world: World, *, expiry: int | None = None) -> list[Session]:
    """Return the sessions of the members of a shared subscription to ``t/#``."""
    found = [world.db.sessions.open(name, expiry_interval=expiry) for name in MEMBERS]
    for session in found:
        session.subscribe("$share/group/t/#", 1)
    return found


def publish(world: World, numbers: range) -> None:
    """Publish each message to a topic of its own, so that each member gets a share."""
    world.db.publish([ts.Message(f"t/{number}", b"%d" % number, f"p{number % 5}", 1) for number in numbers])
    list(world.db.replay("#"))  # ends the current epochs, if the layout has epochs


def shares(sessions: list[Session], *, acknowledge: bool = True, limit: int = 1_000) -> dict[str, list[int]]:
    """Return the messages that each member receives, until none is left or, with a limit, in one delivery each."""
    found: dict[str, list[int]] = {session.client_id: [] for session in sessions}
    more = True
    while more:
        more = False
        for session in sessions:
            items = [item for item in session.deliver(limit) if isinstance(item, Publish)]
            found[session.client_id] += payloads(item.message for item in items)
            if acknowledge:
                session.puback(*(item.packet_id for item in items))
            more |= bool(items) and limit == 1_000
    return found


class Shared(Fixtures):
    """Tests of shared subscriptions."""

    def test_each_message_to_one_member(self, world: World) -> None:
        """Each message goes to one member of a shared subscription, and of many topics each member gets some."""
        sessions = members(world)
        publish(world, range(100))
        found = shares(sessions)
        assert list(range(100)) == sorted(number for mine in found.values() for number in mine)
        assert all(found.values())

    def test_refused_messages_go_to_other_members(self, world: World) -> None:
        """A message that a member's ``allow`` refuses goes to another member, or waits until one may be sent it."""
        sessions = members(world)
        for session in sessions[:2]:
            session.restrict(lambda messages: [False] * len(messages))
        publish(world, range(30))
        assert {"a": [], "b": []} == shares(sessions[:2])
        assert list(range(30)) == sorted(shares(sessions)["c"])
        sessions[2].restrict(lambda messages: [False] * len(messages))
        publish(world, range(30, 60))
        assert {name: [] for name in MEMBERS} == shares(sessions)
        sessions[1].restrict(None)
        assert list(range(30, 60)) == sorted(shares(sessions)["b"])

    @requires("persistent")
    def test_groups_outlast_reopening(self, world: World) -> None:
        """After a reopening a shared subscription continues after the messages that its members have acknowledged."""
        sessions = members(world)
        publish(world, range(30))
        acknowledged = [number for mine in shares(sessions).values() for number in mine]
        publish(world, range(30, 60))
        unanswered = shares(sessions, acknowledge=False, limit=5)
        for session in sessions:
            session.checkpoint()
        world.reopen()
        sessions = [world.db.sessions.open(name, expiry_interval=None) for name in MEMBERS]
        found = shares(sessions)
        assert list(range(30)) == sorted(acknowledged)
        assert list(range(30, 60)) == sorted(number for mine in found.values() for number in mine)
        for name, numbers in unanswered.items():
            assert set(numbers) <= set(found[name])

    def test_groups_outlive_generations(self, world: World) -> None:
        """A shared subscription skips the messages of a dropped generation, and continues with the next one."""
        sessions = members(world)
        publish(world, range(20))
        drop_first(world.db)
        publish(world, range(20, 40))
        found = shares(sessions)
        assert list(range(20, 40)) == sorted(number for mine in found.values() for number in mine)

    def test_an_expired_member_leaves_its_messages(self, world: World) -> None:
        """When a member's session expires, other members get its unacknowledged messages of the group only."""
        sessions = members(world, expiry=10)
        sessions[0].subscribe("own", 1)
        world.db.publish([ts.Message("own", b"99", "p", 1)])
        publish(world, range(40))
        unanswered = shares(sessions, acknowledge=False)
        left = sessions.pop(0)
        left.lost()
        for session in sessions:
            session.puback(*range(1, 41))
        world.clock.now += 11 * SECOND
        world.db.sessions.tick()
        assert "a" not in world.db.sessions.clients()
        found = Counter(number for mine in shares(sessions).values() for number in mine)
        assert Counter(unanswered["a"]) == found + Counter([99])

    def test_what_was_sent_at_qos_2_goes_to_no_other_member(self, world: World) -> None:
        """Messages of QoS 2 that a member has in flight when its session expires end with it [MQTT-4.8.2-5]."""
        sessions = [world.db.sessions.open(name, expiry_interval=10) for name in MEMBERS[:2]]
        for session in sessions:
            session.subscribe("$share/group/t/#", 2)
        world.db.publish([ts.Message(f"t/{number}", b"%d" % number, f"p{number % 5}", 2) for number in range(20)])
        list(world.db.replay("#"))  # ends the current epochs, if the layout has epochs
        at_2 = shares(sessions, acknowledge=False)
        assert all(at_2.values())
        publish(world, range(20, 40))
        unanswered = shares(sessions, acknowledge=False)
        assert all(unanswered.values())
        left, stays = sessions
        left.lost()
        world.clock.now += 11 * SECOND
        world.db.sessions.tick()
        assert ["b"] == world.db.sessions.clients()
        assert sorted(unanswered["a"]) == sorted(shares([stays], acknowledge=False)["b"])

    @requires("persistent")
    @deaths
    def test_a_killed_group(self, world: World, death: Fault) -> None:
        """After a kill during a delivery, each message of a shared subscription still goes to a member."""
        members(world)
        publish(world, range(30))
        with world.dying(death):
            world.db.sessions.deliver(7)
        sessions = [world.db.sessions.open(name, expiry_interval=None) for name in MEMBERS]
        found = shares(sessions)
        assert list(range(30)) == sorted(number for mine in found.values() for number in mine)
