"""Sites of a cluster remove messages that only sessions needed, once no session on any site needs them."""

from __future__ import annotations

import random
import threading
import warnings
from collections.abc import Callable
from contextlib import ExitStack, suppress
from functools import partial
from typing import Any

import pytest
import topicstore as ts
from topicstore.contract.log_store import StorageUnavailableError
from topicstore.pubsub.publish import PERSIST
from topicstore.replication import names
from topicstore.replication.bases import cut_log
from topicstore.replication.log import Proposal
from topicstore.sessions import Publish, Session, delivered_removal, interest_notes
from topicstore.sessions.shared.records import WAITING
from topicstore.shard.interest_records import SPANS
from topicstore.shard.state import FrameworkWrite
from topicstore.storage.maintenance import delete_local
from topicstore_conformance.faults.clock import Clock
from topicstore_conformance.faults.threads import PATIENCE, begin, wait_until

from .conftest import Sites
from .test_site_settings import divided, in_shard
from .test_sites import owns, replicas

SECOND = 1_000_000
AGE = 10
"""The age, in seconds, at which messages may go."""


@pytest.fixture
def clock() -> Clock:
    return Clock()


def own(db: ts.Database) -> str:
    """Return a client id whose shard a site owns."""
    return in_shard(db, owns(db).index(True))


def two(sites: Sites, closing: ExitStack, clock: Clock, **how: Any) -> tuple[ts.Database, ts.Database]:
    """Open two sites, each the owner of some of four shards, and set ``delivered`` to `AGE`.

    Messages stored only for sessions are then removed at this age, once they are delivered.
    """
    a = closing.enter_context(sites.open("a", shards=4, clock=clock, monotonic=clock.monotonic, **how))
    b = closing.enter_context(sites.open("b", clock=clock, monotonic=clock.monotonic, **how))
    divided(a, b)
    next(db for db in (a, b) if owns(db)[0]).retention.set(delivered=AGE)
    for db in (a, b):
        db.cluster.refresh()  # type: ignore[union-attr]
        assert db.retention.settings.delivered == AGE
        db.sessions  # noqa: B018
    return a, b


def publish(db: ts.Database, *payloads: bytes, topic: str = "t/a", **how: Any) -> None:
    db.publish([ts.Message(topic, payload, own(db), qos=1, **how) for payload in payloads])


def stored(db: ts.Database) -> list[bytes]:
    return sorted(message.payload for message in db.replay("#"))


def take(session: Session, limit: int = 100, *, acknowledge: bool = True) -> list[bytes]:
    """Deliver available messages to a session; return their payloads."""
    packets = [packet for packet in session.deliver(limit) if isinstance(packet, Publish)]
    if acknowledge:
        session.puback(*(packet.packet_id for packet in packets if packet.qos))
        session.checkpoint()
    return [packet.message.payload for packet in packets]


def take_all(db: ts.Database, session: Session, count: int) -> list[bytes]:
    """Deliver and acknowledge messages until the session has received a number of them; return their payloads."""
    found: list[bytes] = []
    while len(found) < count:
        assert db.sessions.wait(30)
        found += take(session)
    return sorted(found)


def removed(*dbs: ts.Database) -> int:
    """Run `noted` on each site twice, because the first removal relies on earlier notes; return the removed count."""
    return sum(noted(db) for _ in range(2) for db in dbs)


def noted(db: ts.Database) -> int:
    """Let a site apply the log, commit notes and remove messages; return the number of removed messages."""
    assert db.cluster is not None
    db.cluster.refresh()
    return db.sessions.remove_delivered()


@pytest.mark.parametrize("in_memory", [False, True])
def test_what_sessions_at_another_site_have_goes(
    sites: Sites, closing: ExitStack, clock: Clock, in_memory: bool
) -> None:
    """A message for a session at another site is removed once the session has received it and it is old enough."""
    a, b = two(sites, closing, clock)
    how: dict[str, Any] = {"in_memory": True, "clean_start": True} if in_memory else {"expiry_interval": None}
    session = b.sessions.open(own(b), **how)
    session.subscribe("t/#", 1)
    publish(a, b"1", b"2")
    publish(b, b"3")
    clock.now += 2 * AGE * SECOND
    assert (0, [b"1", b"2", b"3"]) == (removed(a, b), stored(a))
    assert [b"1", b"2", b"3"] == take_all(b, session, 3)
    publish(a, b"4")
    assert (3, [b"4"]) == (removed(a, b), stored(a))
    assert [b"4"] == take_all(b, session, 1)
    clock.now += 2 * AGE * SECOND
    assert (1, [], []) == (removed(a, b), stored(a), stored(b))


def test_nothing_goes_before_every_site_has_noted_what_its_sessions_need(
    sites: Sites, closing: ExitStack, clock: Clock
) -> None:
    """No message is removed until every other site has written a note of what its sessions in memory need."""
    a, b = two(sites, closing, clock)
    publish(a, b"1")
    clock.now += 2 * AGE * SECOND
    assert 0 == sum(a.sessions.remove_delivered() for _ in range(3))
    assert 0 == noted(b)
    assert 1 == a.sessions.remove_delivered()


@pytest.mark.parametrize("how", ["stored", "in memory", "at QoS 0"])
def test_what_a_site_that_lags_has_not_received_stays(
    sites: Sites, closing: ExitStack, clock: Clock, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    """Messages that a site has not applied yet stay for its sessions, and are removed after their delivery."""
    a, b = two(sites, closing, clock)
    in_memory: dict[str, Any] = {"in_memory": True, "clean_start": True}
    session = b.sessions.open(own(b), **(in_memory if how == "in memory" else {"expiry_interval": None}))
    session.subscribe("t/#", 0 if how == "at QoS 0" else 1)
    assert 0 == removed(a, b)
    assert b.cluster is not None
    shard = owns(a).index(True)
    with monkeypatch.context() as patched:
        patched.setattr(b.cluster.replicas[shard], "follow", lambda **_: None)
        patched.setattr(b.cluster.replicas[shard], "confirm", lambda: None)
        publish(a, b"1", b"2")
        publish(b, b"3")
        clock.now += 2 * AGE * SECOND
        assert [b"3"] == take_all(b, session, 1)
        assert (0, [b"1", b"2", b"3"]) == (removed(a, b), stored(a))
    assert [b"1", b"2"] == take_all(b, session, 2)
    assert (3, []) == (removed(a, b), stored(a))


def test_a_session_that_is_away_holds_messages_at_other_sites(sites: Sites, closing: ExitStack, clock: Clock) -> None:
    """A message that another site's session waits for, or has in flight, is not removed before its acknowledgement."""
    a, b = two(sites, closing, clock)
    session = b.sessions.open(own(b), expiry_interval=None)
    session.subscribe("t/#", 1)
    publish(a, b"other", topic="u")
    publish(a, b"1", b"2")
    clock.now += 2 * AGE * SECOND
    found = list[bytes]()
    wait_until(lambda: b.sessions.wait(30) and found.extend(take(session, 1, acknowledge=False)) is None and found, "1")
    assert [b"1"] == found
    session.disconnect()
    assert (1, [b"1", b"2"]) == (removed(a, b), stored(a))
    again = b.sessions.open(own(b), expiry_interval=None)
    assert [b"1", b"2"] == take_all(b, again, 2)
    assert (2, []) == (removed(a, b), stored(a))


def test_what_else_asked_for_it_stays_at_every_site(sites: Sites, closing: ExitStack, clock: Clock) -> None:
    """Messages stored for a rule, a publisher or a program are never removed, whatever was stored before and after."""
    a, b = two(sites, closing, clock)
    leader = a if owns(a)[0] else b
    leader.persistence.add("keep/#")
    for db in (a, b):
        db.cluster.refresh()  # type: ignore[union-attr]
    for number, db in enumerate((a, b, a, b)):
        publish(db, b"session %d" % number)
        publish(db, b"rule %d" % number, topic="keep/a")
        publish(db, b"asked %d" % number, properties=ts.Properties(user_properties=((PERSIST, "1"),)))
        publish(db, b"session %d" % number)
        db.store([ts.Message("t", b"program %d" % number, own(db))])
        publish(db, b"session %d" % number)
    clock.now += 2 * AGE * SECOND
    assert 12 == removed(a, b)
    assert sorted(b"%s %d" % (kind, number) for kind in (b"asked", b"program", b"rule") for number in range(4)) == (
        stored(a)
    )


@pytest.mark.parametrize("takeover_after", [0.3, None])
def test_what_a_former_owner_stored_goes_and_what_programs_store_later_stays(
    sites: Sites, closing: ExitStack, clock: Clock, takeover_after: float | None
) -> None:
    """After a change of owner, messages stored only for sessions are removed, and no others.

    Some were stored before the change and some after. The former owner still had an open span of interest, and sessions
    in memory; both end with that owner.
    """
    a, b = two(sites, closing, clock, **({} if takeover_after is None else {"takeover_after": takeover_after}))
    wait_until(lambda: all({"a", "b"} <= some for some in replicas(b)), "two replicas")
    lost = a.sessions.open(own(a), in_memory=True, clean_start=True)
    lost.subscribe("t/#", 1)
    publish(a, b"before")
    b.store([ts.Message("t/a", b"program", own(b))])  # ends the open spans of interest of b's shards
    removed(a, b)
    client = own(a)
    with warnings.catch_warnings(action="ignore"):
        if takeover_after is None:
            a.close()
        else:
            assert a.cluster is not None
            a.cluster._stopping.set()  # as if its process were paused
        wait_until(lambda: all(owns(b)), "the shards at the other site")
        b.store([ts.Message("t/a", b"program", client)])
        b.publish([ts.Message("t/a", b"after", client, qos=1)])
        b.store([ts.Message("t/a", b"program", client)])
        clock.now += 2 * AGE * SECOND
        assert (2, [b"program"] * 3) == (removed(b), stored(b))
        if takeover_after is not None:
            assert all(one != other for one, other in zip(owns(b), b.cluster is None or [False] * 4, strict=True))
            with pytest.raises((ts.ShardMovedError, ts.ShardElsewhereError)):
                a.store([ts.Message("t/a", b"late", client)])


@pytest.mark.parametrize("program", [False, True])
def test_a_shard_that_leaves_its_owner_and_comes_back_has_a_new_span(
    sites: Sites, closing: ExitStack, clock: Clock, program: bool
) -> None:
    """A program's message stored while another site was the owner is kept; later messages for sessions are removed.

    The first owner had a span of interest open when the shard moved, and the other owner's first entry ended that span.
    """
    a, b = two(sites, closing, clock)
    wait_until(lambda: all({"a", "b"} <= some for some in replicas(b)), "two replicas")
    shard = next(number for number in (1, 2, 3) if owns(a)[number])
    client = in_shard(a, shard)

    def publish_at(db: ts.Database, payload: bytes) -> None:
        db.publish([ts.Message("t/a", payload, client, qos=1)])

    def move(*names: str) -> None:
        assert a.cluster is not None
        a.cluster.set_replicas(shard, names)
        wait_until(lambda: [set(names)] == [replicas(a)[shard]], f"replicas at {names}")
        for db in (a, b):
            db.cluster.refresh()  # type: ignore[union-attr]

    publish_at(a, b"before")
    move("b")
    wait_until(lambda: owns(b)[shard], "the shard at the other site")
    if program:
        b.store([ts.Message("t/a", b"program", client)])
    move("a")
    wait_until(lambda: owns(a)[shard], "the shard at its first owner")
    publish_at(a, b"after")
    move("a", "b")

    def settled() -> bool:
        places = a.cluster.document.shards  # type: ignore[union-attr]
        whole = not any(one.writer.elsewhere for db in (a, b) for one in db.storage.shards)
        owned = all(sum(some) == 1 for some in zip(owns(a), owns(b), strict=True))
        return whole and owned and all({*place.replicas} == {"a", "b"} and not place.heir for place in places)

    wait_until(settled, "copies and owners")
    clock.now += 2 * AGE * SECOND
    kept = [b"program"] if program else []
    count = sum(removed(a, b) for _ in range(3))
    assert (2, kept) == (count, stored(a))


def test_a_span_that_was_proposed_without_an_answer_covers_nothing_else(
    sites: Sites, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A program's message is kept if it follows the opening of a span of interest that got no answer and took effect.

    A program's message that got no answer itself, and precedes the span, is kept too.
    """
    cluster = ts.Cluster(sites.url, beat_interval=0.02, poll_interval=0.02, takeover_after=3_600, store_timeout=0.2)
    how: dict[str, Any] = {"cluster": cluster, "site": "a", "clock": clock, "monotonic": clock.monotonic}
    with warnings.catch_warnings(action="ignore"), ts.open(sites.root / "a", shards=1, **how) as db:
        assert db.cluster is not None
        db.retention.set(delivered=AGE)
        db.sessions  # noqa: B018
        create, silent = db.cluster.store.create, [""]

        def answer(name: str, data: bytes) -> None:
            if any(name.startswith(prefix) for prefix in silent):
                raise StorageUnavailableError("no answer")
            create(name, data)

        def stores(write: Callable[[], object]) -> bool:
            try:
                write()
            except StorageUnavailableError:
                return False
            return True

        monkeypatch.setattr(db.cluster.store, "create", answer)
        assert not stores(lambda: db.store([ts.Message("t", b"program 1", "c")]))
        assert not stores(lambda: db.publish([ts.Message("t", b"refused", "c", qos=1)]))
        silent.clear()
        wait_until(lambda: stores(lambda: db.publish([ts.Message("t", b"session", "c", qos=1)])), "the store")
        db.storage.interest.end()
        silent.append(names.entries(0))
        publishing = [ts.Message("t", b"unsure", "c", qos=1)]
        assert not stores(lambda: db.publish(publishing))
        assert not stores(lambda: db.store([ts.Message("t", b"refused", "c")]))
        silent.clear()
        wait_until(lambda: stores(lambda: db.store([ts.Message("t", b"program 2", "c")])), "the store")
        assert not db.storage.interest.may_be_open
        clock.now += 2 * AGE * SECOND
        db.sessions.remove_delivered()
        assert [b"program 1", b"program 2"] == [one for one in stored(db) if one.startswith(b"program")]


@pytest.mark.parametrize("how", ["in memory", "at QoS 0"])
@pytest.mark.parametrize("shard", ["its own", "another"])
def test_a_session_of_an_owner_that_was_paused_gets_no_later_messages_after_a_gap(
    sites: Sites, closing: ExitStack, clock: Clock, how: str, shard: str
) -> None:
    """A session that isn't stored ends, instead of receiving messages after a gap of removed ones.

    Its owner was paused and lost the shard, and messages that the session had not received were removed meanwhile.
    """
    a, b = two(sites, closing, clock, takeover_after=0.5)
    wait_until(lambda: all({"a", "b"} <= some for some in replicas(a)), "two replicas")
    in_memory: dict[str, Any] = {"in_memory": True, "clean_start": True}
    client = own(b)
    session = b.sessions.open(client, **(in_memory if how == "in memory" else {"expiry_interval": None}))
    session.subscribe("t/#", 0 if how == "at QoS 0" else 1)
    publisher = client if shard == "its own" else own(a)
    publish(a, b"1")
    assert [b"1"] == take_all(b, session, 1)
    assert a.cluster is not None
    assert b.cluster is not None
    with warnings.catch_warnings(action="ignore"):
        b.cluster._stopping.set()  # as if its process were paused
        wait_until(lambda: all(owns(a)), "the shards at the other site")
        a.publish([ts.Message("t/a", b"%d" % number, publisher, qos=1) for number in range(2, 6)])
        clock.now += 2 * AGE * SECOND
        wait_until(lambda: removed(a) >= 0 and b"5" not in stored(a), "the removal")
        a.publish([ts.Message("t/a", b"6", publisher, qos=1)])
        b.cluster.refresh()  # as another thread of the resumed process may do before the site's own
        found = []
        with suppress(ts.SessionTakenOverError, ts.ShardMovedError, ts.ShardElsewhereError):
            found = take(session)
        assert [] == found


def test_a_damaged_span_keeps_no_shard_from_moving(sites: Sites, clock: Clock) -> None:
    """A site takes over a shard with an undecodable span of interest; removals and stores raise `CorruptionError`."""
    with sites.open("a", shards=1, clock=clock, monotonic=clock.monotonic) as db:
        db.retention.set(delivered=AGE)
        db.sessions  # noqa: B018
        publish(db, b"session")
        db.storage.shards[0].writer.write_state([FrameworkWrite(SPANS + bytes(8), b"damaged")])
    with sites.open("a", clock=clock, monotonic=clock.monotonic) as db:
        assert [True] == owns(db)
        clock.now += 2 * AGE * SECOND
        for call in (db.sessions.remove_delivered, lambda: db.store([ts.Message("t", b"program", "c")])):
            with pytest.raises(ts.CorruptionError):
                call()
        assert [b"session"] == stored(db)


@pytest.mark.parametrize("interrupted", ["store", "span"])
def test_a_span_covers_no_message_before_or_after_it_whatever_is_interrupted(
    sites: Sites, clock: Clock, monkeypatch: pytest.MonkeyPatch, interrupted: str
) -> None:
    """A program's message is kept, even if its own store, or the opening of a span of interest, was interrupted.

    The interrupted write was already proposed to the log, so it takes effect.
    """
    with sites.open("a", shards=1, clock=clock, monotonic=clock.monotonic) as db:
        assert db.cluster is not None
        db.retention.set(delivered=AGE)
        calls = [lambda: db.store([ts.Message("t", b"program", "c")]), lambda: publish(db, b"session")]
        first, second = calls if interrupted == "store" else calls[::-1]
        create, wait, going, waits = db.cluster.store.create, Proposal.wait, threading.Event(), list[Proposal]()
        db.storage.interest.end()

        def hold(name: str, data: bytes) -> None:
            assert not name.startswith(names.entries(0)) or going.wait(PATIENCE)
            create(name, data)

        def interrupt(proposal: Proposal, timeout: float | None = None) -> None:
            waits.append(proposal)
            if len(waits) == 1:
                raise KeyboardInterrupt
            wait(proposal, timeout)

        monkeypatch.setattr(db.cluster.store, "create", hold)
        monkeypatch.setattr(Proposal, "wait", interrupt)
        with pytest.raises(KeyboardInterrupt):
            first()
        running = begin(second)
        try:
            wait_until(lambda: len(waits) == 2, "the other call to wait for the log")
        finally:
            going.set()
        running.result(PATIENCE)
    with sites.open("a", clock=clock, monotonic=clock.monotonic) as db:
        clock.now += 2 * AGE * SECOND
        db.sessions.remove_delivered()
        assert [b"program"] == stored(db)


@pytest.mark.parametrize("in_memory", [False, True])
def test_a_subscription_at_another_site_that_begins_in_the_past_gets_what_is_left(
    sites: Sites, closing: ExitStack, clock: Clock, monkeypatch: pytest.MonkeyPatch, in_memory: bool
) -> None:
    """A removal stops after its current batch when another site subscribes with a start in the past.

    The subscriber gets the remaining messages.
    """
    a, b = two(sites, closing, clock)
    publish(a, *(b"%02d" % number for number in range(30)))
    clock.now += 2 * AGE * SECOND
    how: dict[str, Any] = {"in_memory": True, "clean_start": True} if in_memory else {"expiry_interval": None}
    late = b.sessions.open(own(b), **how)
    assert 0 == noted(b)
    steps = list[int]()

    def delete(*arguments: Any) -> int:
        count = delete_local(*arguments)
        steps.append(count)
        if len(steps) == 1:
            b.cluster.refresh()  # type: ignore[union-attr]
            late.subscribe("t/#", 1, start=0)
        return count

    monkeypatch.setattr(delivered_removal, "_ROWS", 10)
    monkeypatch.setattr(delivered_removal, "delete_local", delete)
    assert 10 == a.sessions.remove_delivered()
    assert [10] == steps
    assert [b"%02d" % number for number in range(10, 30)] == take_all(b, late, 20)
    monkeypatch.undo()
    assert (20, []) == (removed(a, b), stored(a))


def test_many_filters_in_memory_are_noted_as_one(
    sites: Sites, closing: ExitStack, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A note has a bounded size: with too many filters that have unread messages, it has only their lowest place."""
    monkeypatch.setattr(interest_notes, "_MOST_FILTERS", 3)
    a, b = two(sites, closing, clock)
    session = b.sessions.open(own(b), in_memory=True, clean_start=True, receive_maximum=1)
    for number in range(10):
        session.subscribe(f"t/{number}", 1)
    assert 0 == removed(a, b)
    for number in range(5):
        publish(a, b"%d" % number, topic=f"t/{number}")
    clock.now += 2 * AGE * SECOND
    assert b.sessions.wait(30)
    removed(a, b)
    assert [b"%d" % number for number in range(5)] == stored(a)
    assert {} == b.sessions._registry.notes.stored(owns(b).index(True)).filters  # type: ignore[union-attr]
    found = list[bytes]()
    while len(found) < 5:
        assert b.sessions.wait(30)
        found += take(session)
    assert [] == take(session)  # moves the cursors of all filters past the messages that were read
    assert (5, []) == (removed(a, b), stored(a))


def test_an_idle_site_writes_no_notes(sites: Sites, closing: ExitStack, clock: Clock) -> None:
    """Without new messages, further removals append nothing to the logs."""
    a, b = two(sites, closing, clock)
    publish(a, b"1")
    b.cluster.refresh()  # type: ignore[union-attr]
    clock.now += 2 * AGE * SECOND
    removed(a, b, a, b)
    before = [replica.progress.next for db in (a, b) for replica in db.cluster.replicas]  # type: ignore[union-attr]
    clock.now += 2 * AGE * SECOND
    assert 0 == removed(a, b)
    assert before == [replica.progress.next for db in (a, b) for replica in db.cluster.replicas]  # type: ignore[union-attr]


def test_a_message_of_a_group_stays_while_it_passes_between_sites(
    sites: Sites, closing: ExitStack, clock: Clock
) -> None:
    """A message that a member hands back when its session ends is not removed until another member has received it."""
    a, b = two(sites, closing, clock)
    first, idle = b.sessions.open(own(b), expiry_interval=None), a.sessions.open(own(a), expiry_interval=None)
    first.subscribe("$share/g/t/#", 1)
    publish(a, b"1", b"2")

    def ticked() -> bool:
        for db in (a, b):
            db.sessions.tick()
            db.sessions.wait(0)
        return True

    found = list[bytes]()
    wait_until(lambda: ticked() and found.extend(take(first, acknowledge=False)) is None and len(found) == 2, "both")
    idle.subscribe("$share/g/t/#", 1)
    clock.now += 2 * AGE * SECOND
    assert (0, [b"1", b"2"]) == (removed(a, b), stored(a))
    first.disconnect()
    b.sessions.expire(own(b))
    assert (0, [b"1", b"2"]) == (removed(a, b), stored(a))
    received = list[bytes]()
    wait_until(
        lambda: ticked() and removed(a, b) >= 0 and received.extend(take(idle)) is None and len(received) == 2,
        "both at the other member",
    )
    wait_until(lambda: ticked() and removed(a, b) >= 0 and not stored(a), "the removal of both")


def test_what_a_group_has_taken_back_stays(sites: Sites, closing: ExitStack, clock: Clock) -> None:
    """Messages handed back by a session that ended are not removed while they wait for a disconnected member."""
    a, b = two(sites, closing, clock)
    first, idle = b.sessions.open(own(b), expiry_interval=None), a.sessions.open(own(a), expiry_interval=None)
    for session in (idle, first):
        session.subscribe("$share/g/t/#", 1)
    idle.disconnect()

    def ticked() -> bool:
        for db in (a, b):
            db.cluster.refresh()  # type: ignore[union-attr]
            db.sessions.tick()
            db.sessions.wait(0)
        return True

    publish(a, b"1", b"2")
    found = list[bytes]()
    wait_until(lambda: ticked() and found.extend(take(first, acknowledge=False)) is None and len(found) == 2, "both")
    first.disconnect()
    b.sessions.expire(own(b))

    def waiting() -> bool:
        states = a.sessions._registry.states.states
        return ticked() and any(True for state in states for _ in state.scan(WAITING))

    wait_until(waiting, "the messages at the owner of the group")
    clock.now += 2 * AGE * SECOND
    assert (0, [b"1", b"2"]) == (removed(a, b), stored(a))
    again, received = a.sessions.open(own(a), expiry_interval=None), list[bytes]()
    wait_until(lambda: ticked() and received.extend(take(again)) is None and len(received) == 2, "both, once more")
    wait_until(lambda: ticked() and removed(a, b) >= 0 and not stored(a), "the removal of both")


def test_what_a_group_has_not_delivered_stays(sites: Sites, closing: ExitStack, clock: Clock) -> None:
    """A message of a shared subscription is not removed while all members, at whichever site, are disconnected."""
    a, b = two(sites, closing, clock)
    b.sessions.open(own(b), expiry_interval=None).subscribe("$share/g/t/#", 1)
    for db in (a, b):
        db.cluster.refresh()  # type: ignore[union-attr]
        db.sessions.tick()
    b.sessions.connected(own(b)).disconnect()  # type: ignore[union-attr]
    publish(a, b"1")
    publish(a, b"other", topic="u")
    clock.now += 2 * AGE * SECOND
    removed(a, b)
    assert b"1" in stored(a)
    again, found = b.sessions.open(own(b), expiry_interval=None), list[bytes]()

    def received() -> list[bytes]:
        for db in (a, b):
            db.sessions.tick()
            db.sessions.wait(0)
        found.extend(take(again))
        return found

    wait_until(received, "the message")
    assert [b"1"] == found
    wait_until(lambda: received() and removed(a, b) >= 0 and not stored(a), "the removal")


def test_a_site_whose_copies_lag_reads_the_logs_before_it_removes(
    sites: Sites, closing: ExitStack, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A message is kept for another site's session, even if the removing site has not yet applied its subscription."""
    a, b = two(sites, closing, clock)
    removed(a, b)
    assert a.cluster is not None
    for replica in a.cluster.replicas:
        monkeypatch.setattr(replica, "follow", lambda **_: None)  # this site reads the log only when asked
    session = b.sessions.open(own(b), expiry_interval=None)
    session.subscribe("t/#", 1)
    publish(a, b"1")
    noted(b)
    clock.now += 2 * AGE * SECOND
    assert (0, [b"1"]) == (a.sessions.remove_delivered(), stored(a))
    assert [b"1"] == take_all(b, session, 1)
    assert (1, []) == (removed(a, b), stored(a))


def test_a_note_is_right_while_a_site_takes_a_copy(
    sites: Sites, closing: ExitStack, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A note has what sessions need, even if a base replaced the replica and no cursor has noticed this yet."""
    a, b = two(sites, closing, clock)
    assert b.cluster is not None
    session = b.sessions.open(own(b), in_memory=True, clean_start=True)
    session.subscribe("t/#", 1)
    publish(a, b"1")
    assert [b"1"] == take_all(b, session, 1)
    assert [] == take(session)  # after this empty read, the session's cursor is known to be at the end
    shard, number, listener = owns(a).index(True), owns(b).index(True), b.storage.listener
    place = b.storage.shards[shard].writer.watermark
    notes = list[Any]()

    def replaced(which: int) -> None:
        if which == shard:
            assert {} == b.sessions._registry.notes.commit([number])  # type: ignore[union-attr]
            notes.append(b.sessions._registry.notes.stored(number))  # type: ignore[union-attr]
        hub_replaced(which)

    assert listener is not None
    hub_replaced = listener.replaced
    monkeypatch.setattr(listener, "replaced", replaced)
    with b.cluster.replicas[shard]._reading:  # stops this replica from reading the log
        publish(a, b"2")
        assert a.cluster is not None
        a.cluster.replicas[shard].write_base()
        cut_log(sites.store, shard, "a", a.cluster.replicas[shard].base)
    wait_until(lambda: notes, "the copy")
    assert place < notes[0].horizon[shard]
    assert place == notes[0].filters["t/#"][shard]
    assert [b"2"] == take_all(b, session, 1)


class World:
    """Three sites with four shards, and the messages that sessions on them have not received yet."""

    def __init__(self, sites: Sites, clock: Clock, closing: ExitStack, chance: random.Random) -> None:
        self.sites, self.clock, self.chance = sites, clock, chance
        self.dbs: dict[str, ts.Database] = {}
        self.number = 0
        self.kept = set[bytes]()
        self.waiting = {name: set[bytes]() for name in ("reader", "qos0", "group", "memory")}
        self.connected: dict[str, tuple[ts.Database, Session]] = {}
        self.sent: dict[str, list[Publish]] = {}
        closing.callback(lambda: [db.close() for db in self.dbs.values()])
        for name in "abc":
            self.start(name)
        wait_until(lambda: all({"a", "b", "c"} <= some for some in replicas(self.dbs["a"])), "replicas at all sites")
        wait_until(lambda: all(sum(some) == 1 for some in zip(*map(owns, self.dbs.values()), strict=True)), "owners")
        for setting in (lambda db: db.retention.set(delivered=AGE), lambda db: db.persistence.add("keep/#")):
            wait_until(partial(self.done, partial(self.lead, setting)), "the settings")
        self.refresh()
        for name in ("reader", "member idle"):
            wait_until(partial(self.done, partial(self.session, name)), f"the session of {name}")
        idle = self.session("member idle")  # keeps the shared subscription from ending
        wait_until(lambda: self.done(idle.disconnect), "the member to leave")

    def start(self, name: str) -> None:
        how = {"shards": 4, "clock": self.clock, "monotonic": self.clock.monotonic}
        db = self.dbs[name] = self.sites.open(name, **how)
        db.sessions.groups.handover_after = 30

    def refresh(self) -> None:
        for db in self.dbs.values():
            db.cluster.refresh()  # type: ignore[union-attr]
            assert db.retention.settings.delivered == AGE

    def owner(self, client_id: str) -> ts.Database:
        """Wait until exactly one site owns the shard of a client, and return its database."""

        def found() -> list[ts.Database]:
            return [db for db in self.dbs.values() if owns(db)[db.shard_of(client_id)]]

        wait_until(lambda: len(found()) == 1, f"an owner of the shard of {client_id}")
        return found()[0]

    def lead(self, change: Callable[[ts.Database], object]) -> None:
        """Change a setting at the owner of the shard that has the settings."""
        change(self.owner(in_shard(self.dbs["a"], 0)))

    def session(self, name: str) -> Session:
        """Return a connected session, which is opened at its owner if necessary."""
        db, session = self.connected.get(name, (None, None))
        if session is None or session.ended is not None:
            db = self.owner(name)
            in_memory: dict[str, Any] = {"in_memory": True, "clean_start": True}
            session = db.sessions.open(name, **(in_memory if name == "memory" else {"expiry_interval": None}))
            for lost in {"memory": ["memory"], "qos0": ["qos0"]}.get(name, []):
                self.waiting[lost].clear()
            session.subscribe("$share/g/#" if name.startswith("member") else "#", 0 if name == "qos0" else 1)
            self.connected[name], self.sent[name] = (db, session), []
        return session

    def publish(self) -> None:
        kind = self.chance.choice(["session", "session", "session", "rule", "asked", "program"])
        self.number += 1
        asking = ts.Properties(user_properties=((PERSIST, "true"),)) if kind == "asked" else None
        client, payload = f"p{self.number % 7}", b"%d" % self.number
        topic = "keep/a" if kind == "rule" else f"t/{self.number % 5}"
        message = ts.Message(topic, payload, client, qos=1, properties=asking)
        db = self.owner(client)
        (db.store if kind == "program" else db.publish)([message])
        self.kept |= {payload} if kind != "session" else set()
        for name, waiting in self.waiting.items():
            if name in ("reader", "group") or (name in self.connected and self.connected[name][1].ended is None):
                waiting.add(payload)

    def take(self, name: str, limit: int, *, acknowledge: bool) -> None:
        """Deliver messages to a session, and perhaps acknowledge them.

        Sessions in memory and at QoS 0 always acknowledge, because nothing is delivered to them again.
        """
        session = self.session(name)
        self.sent[name] += [packet for packet in session.deliver(limit) if isinstance(packet, Publish)]
        if acknowledge or name in ("memory", "qos0"):
            session.puback(*(packet.packet_id for packet in self.sent[name] if packet.qos))
            session.checkpoint()
            taken, self.sent[name] = self.sent[name], []
            self.waiting["group" if name.startswith("member") else name] -= {one.message.payload for one in taken}

    def deliver(self) -> None:
        name = self.chance.choice(["reader", "qos0", "memory", "member1", "member2"])
        self.take(name, 3, acknowledge=self.chance.random() < 0.7)

    def leave(self) -> None:
        name = self.chance.choice(["member1", "member2"])
        self.session(name).disconnect()
        if self.chance.random() < 0.5:
            self.owner(name).sessions.expire(name)

    def tick(self) -> None:
        for db in self.dbs.values():
            self.done(db.sessions.tick)
            db.sessions.wait(0)

    def restart(self) -> None:
        name = self.chance.choice("abc")
        self.dbs.pop(name).close()
        self.waiting["memory"] = self.living("memory")
        self.waiting["qos0"] = self.living("qos0")
        try:
            if self.chance.random() < 0.5:
                self.publish()
        finally:
            self.start(name)
            self.refresh()

    def living(self, name: str) -> set[bytes]:
        """Return the messages that a session has yet to receive; none if its connection has ended."""
        connected = name in self.connected and self.connected[name][1].ended is None
        return self.waiting[name] if connected else set()

    def done(self, work: Callable[[], object]) -> bool:
        """Call ``work``; return False if it had no effect, because a shard has moved or is moving."""
        try:
            work()
        except (ts.ShardElsewhereError, ts.ShardMovedError):
            return False
        return True

    def step(self) -> None:
        work = (
            [self.publish] * 6 + [self.deliver] * 6 + [self.remove] * 3 + [self.tick] * 3 + [self.leave, self.restart]
        )
        self.done(self.chance.choice(work))
        for name in ("memory", "qos0"):
            self.waiting[name] = self.living(name)

    def remove(self) -> None:
        self.clock.now += AGE * SECOND // 2
        for db in self.chance.sample([*self.dbs.values()], 3):
            noted(db)
        self.check()

    def check(self) -> None:
        there = set(stored(self.dbs["a"]))
        for name, waiting in self.waiting.items():
            assert waiting <= there, name
        assert self.kept <= there

    def drain(self) -> None:
        """Deliver everything; check that all messages were received, and that the sites then store only the others.

        The others are messages stored for a rule, their publisher or a program.
        """

        def drained() -> bool:
            for name in ("reader", "qos0", "memory", "member1", "member2"):
                self.tick()
                self.done(partial(self.take, name, 100, acknowledge=True))
            return not any(self.waiting.values())

        wait_until(drained, "all messages at all sessions")

        def gone() -> bool:
            drained()
            self.clock.now += AGE * SECOND
            return removed(*self.dbs.values()) == 0 and set(stored(self.dbs["a"])) == self.kept

        wait_until(gone, "the removal of all else")


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(1, 30))])
def test_nothing_goes_that_a_session_needs_in_any_order_of_events(
    sites: Sites, closing: ExitStack, clock: Clock, seed: int
) -> None:
    """A message is removed once no session on any site needs it, and not before, while sites are closed and opened."""
    with warnings.catch_warnings(action="ignore"):
        world = World(sites, clock, closing, random.Random(seed))
        for _ in range(60 if seed == 0 else 200):
            world.step()
        world.drain()
