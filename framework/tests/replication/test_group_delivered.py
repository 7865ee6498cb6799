"""Removal on any site never deletes a message that a shared subscription needs while it passes between members."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from itertools import combinations_with_replacement
from typing import Any
from unittest.mock import patch

import pytest
import topicstore as ts
from topicstore.contract.errors import EngineError
from topicstore.sessions.shared.group import Group
from topicstore.sessions.shared.records import HANDED_BACK, RETURNED, REVOKED, WAITING
from topicstore_conformance.faults.clock import Clock
from topicstore_conformance.faults.threads import wait_until

from .conftest import Sites
from .test_site_delivered import AGE, SECOND, noted, own, publish, removed, stored, take, two

TEXT = "$share/g/t/#"
READS = 5
"""The number of times that one look at what sessions need reads the logs of all shards to their ends."""


@pytest.fixture
def clock() -> Clock:
    return Clock()


def there(db: ts.Database, head: bytes) -> bool:
    """Return whether a site has a record of a kind."""
    return any(True for state in db.sessions._registry.states.states for _ in state.scan(head))


class Moving:
    """A message that waits for a member, is in flight at the second site, and is handed back, again and again."""

    def __init__(self, a: ts.Database, b: ts.Database) -> None:
        self.a, self.b = a, b
        self.member = own(b)
        idle = a.sessions.open(own(a), expiry_interval=None)  # so that the subscription never ends
        for session in (idle, b.sessions.open(self.member, expiry_interval=None)):
            session.subscribe(TEXT, 1)
        idle.disconnect()
        publish(a, b"1")
        self.receive()
        self.hand_back()
        self.take_back()

    def settle(self, condition: Callable[[], object], why: str) -> None:
        """Run the periodic work of both sites until a condition is met."""

        def met() -> object:
            for db in (self.a, self.b):
                assert db.cluster is not None
                db.cluster.refresh()
                db.sessions.tick()
                db.sessions.wait(0)
            return condition()

        wait_until(met, why)

    def receive(self) -> None:
        """Deliver the message to the member at the second site, so that it is in flight there and nowhere else."""
        session = self.b.sessions.open(self.member, expiry_interval=None)
        if not session.present:
            session.subscribe(TEXT, 1)
        found = list[bytes]()
        self.settle(lambda: found.extend(take(session, acknowledge=False)) is None and found, "the message")
        assert [b"1"] == found
        self.settle(lambda: not there(self.a, WAITING), "the group to see the delivery")

    def hand_back(self) -> None:
        """End the member's session, which hands the message back to the group; the group has not read this yet."""
        session = self.b.sessions.connected(self.member)
        assert session is not None
        session.disconnect()
        self.b.sessions.expire(self.member)

    def take_back(self) -> None:
        """Let the group take the message back, so that it waits for a member; none is connected."""
        self.settle(lambda: there(self.a, WAITING) and not there(self.a, HANDED_BACK), "the group")


def test_a_message_that_moves_while_needs_are_read_stays(
    sites: Sites, closing: ExitStack, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A removal deletes no message that a group needs, though the message moves between sites while the removal reads.

    The test tries every interleaving of the moves with these reads.
    """
    a, b = two(sites, closing, clock)
    moving = Moving(a, b)
    moves = (moving.receive, moving.hand_back, moving.take_back)
    clock.now += 2 * AGE * SECOND
    assert a.cluster is not None
    refresh, due, reads = a.cluster.refresh, dict[int, list[Callable[[], None]]](), iter(())

    def refreshed(*shards: Any) -> None:
        for move in due.pop(next(reads, READS), ()):
            with patch.object(a.cluster, "refresh", refresh):
                move()
        refresh(*shards)

    monkeypatch.setattr(a.cluster, "refresh", refreshed)
    for times in combinations_with_replacement(range(READS + 1), len(moves)):
        removed(b)
        due, reads = {}, iter(range(READS))
        for when, move in zip(times, moves, strict=True):
            due.setdefault(when, []).append(move)
        later = due.pop(READS, [])
        assert 0 == a.sessions.remove_delivered(), times
        assert {} == due, times
        assert [b"1"] == stored(a), times
        for move in later:
            move()
    received = list[bytes]()
    session = a.sessions.open(own(a), expiry_interval=None)
    moving.settle(lambda: received.extend(take(session)) is None and received, "the message at the other member")
    moving.settle(lambda: removed(a, b) >= 0 and not stored(a), "the removal")


@pytest.mark.parametrize("kind", [RETURNED, REVOKED])
def test_what_was_between_members_when_a_cluster_began_stays(sites: Sites, clock: Clock, kind: bytes) -> None:
    """A message that waited for a member, or was revoked, before a cluster began with the database is not removed."""
    how: dict[str, Any] = {"clock": clock, "monotonic": clock.monotonic}
    with ts.open(sites.root / "a", shards=2, **how) as db:
        db.retention.set(delivered=AGE)
        first, idle = (db.sessions.open(name, expiry_interval=None) for name in ("first", "idle"))
        first.subscribe(TEXT, 1)
        db.publish([ts.Message("t/a", b"1", "c", qos=1)])
        assert [b"1"] == take(first, acknowledge=False)
        idle.subscribe(TEXT, 1)
        for session in (idle, first):
            session.disconnect()
        with ExitStack() as failing:
            if kind == REVOKED:  # as if the process had been killed before the group took the message back
                failing.enter_context(patch.object(Group, "take_back", side_effect=EngineError("no disk")))
            db.sessions.expire("first")
            assert there(db, kind)
            db.close()
    ts.begin_cluster(sites.root / "a", sites.url)
    with sites.open("a", **how) as a:
        clock.now += 2 * AGE * SECOND
        assert there(a, kind)
        assert (0, [b"1"]) == (noted(a), stored(a))
        again, received = a.sessions.open("idle", expiry_interval=None), list[bytes]()

        def ticked() -> list[bytes]:
            a.sessions.tick()
            a.sessions.wait(0)
            received.extend(take(again))
            return received

        wait_until(ticked, "the message")
        wait_until(lambda: ticked() and noted(a) >= 0 and not stored(a), "the removal")
        assert [b"1"] == received
