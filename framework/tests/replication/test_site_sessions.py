"""Sessions in a cluster: each lives at the owner of its shard, and moves with the shard."""

from __future__ import annotations

import threading
import warnings
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

import pytest
import topicstore as ts
from topicstore.contract.log_store import StorageUnavailableError
from topicstore.replication import names
from topicstore.sessions import Ended, Publish, PubRel, Session
from topicstore_conformance.faults.clock import Clock
from topicstore_conformance.faults.threads import wait_until

from .conftest import Sites
from .test_site_settings import divided, in_shard
from .test_sites import owns, replicas

HOUR = 3_600_000_000
SECOND = 1_000_000


def published(db: ts.Database, session: Session) -> list[tuple[bytes, int, bool]]:
    """Return payload, packet id and DUP flag of the messages that a session delivers now."""
    db.sessions.wait(0)
    return [(one.message.payload, one.packet_id, one.dup) for one in session.deliver() if isinstance(one, Publish)]


def hand_over(first: ts.Database, second: ts.Database) -> None:
    """Close the first site when the second has replicas of all shards; return when the second owns all shards."""
    wait_until(lambda: all({"a", "b"} <= some for some in replicas(first)), "replicas at both sites")
    first.close()
    wait_until(lambda: all(owns(second)), "the shards at the other site")


def test_a_session_opens_where_its_shard_is_owned(sites: Sites) -> None:
    """Opening a session at a site that isn't the owner raises an error with the owner's address, and changes nothing.

    This applies to sessions in memory, too.
    """
    with sites.open("a", address="host-a:1883") as a, sites.open("b") as b:
        for how in ({}, {"in_memory": True, "clean_start": True}):
            with pytest.raises(ts.ShardElsewhereError, match=r"site a \(host-a:1883\)"):
                b.sessions.open("c", **how)
        assert (0, []) == (len(a.sessions), b.sessions.clients())
        a.sessions.open("c", expiry_interval=None).subscribe("#", 2)
        b.cluster.refresh()  # type: ignore[union-attr]
        assert ["c"] == b.sessions.clients()
        assert a.sessions["c"].subscriptions == b.sessions["c"].subscriptions


def test_a_session_continues_on_another_site_from_what_is_committed(sites: Sites, closing: ExitStack) -> None:
    """Packet ids, acknowledgements, subscriptions, PUBRECs and incoming QoS 2 packet ids survive a change of owner."""
    a, b = closing.enter_context(sites.open("a")), closing.enter_context(sites.open("b"))
    session = a.sessions.open("reader", expiry_interval=None)
    session.subscribe("one/#", 1)
    session.subscribe("two/#", 2)
    a.publish([ts.Message("one/1", b"1", "p", qos=1), ts.Message("two/1", b"2", "p", qos=2)])
    a.publish([ts.Message("one/1", b"3", "p", qos=1), ts.Message("two/1", b"4", "p", qos=2)])
    ids = {payload: number for payload, number, _ in published(a, session)}
    session.puback(ids[b"1"])
    session.pubrec(ids[b"2"])
    assert [PubRel(ids[b"2"])] == session.deliver()
    assert session.publish([ts.Message("in", b"5", "reader", qos=2)], [9]).stored == 1
    hand_over(a, b)
    again = b.sessions.open("reader", expiry_interval=None)
    assert again.present
    packets = again.deliver()
    assert [PubRel(ids[b"2"])] == [one for one in packets if isinstance(one, PubRel)]
    assert [(b"3", ids[b"3"], True), (b"4", ids[b"4"], True)] == sorted(
        (one.message.payload, one.packet_id, one.dup) for one in packets if isinstance(one, Publish)
    )
    again.publish([ts.Message("in", b"5", "reader", qos=2)], [9])
    assert 1 == len(list(b.replay("in")))
    assert again.pubrel(9)
    b.publish([ts.Message("one/1", b"6", "p", qos=1)])
    ((payload, number, dup),) = published(b, again)
    assert (b"6", False) == (payload, dup)
    assert number not in (ids[b"2"], ids[b"3"], ids[b"4"])


def test_open_sessions_end_when_their_shard_moves(sites: Sites, closing: ExitStack) -> None:
    """Sessions of a shard that moves to another site end with `ShardMovedError`, and can be opened there.

    Sessions of other shards stay open.
    """
    ended: list[tuple[str, Ended]] = []
    a = closing.enter_context(sites.open("a", shards=4))
    sessions = {
        shard: a.sessions.open(
            in_shard(a, shard),
            expiry_interval=None,
            on_end=lambda session, why: ended.append((session.client_id, why)),
        )
        for shard in range(4)
    }
    for session in sessions.values():
        session.subscribe("#", 1)
    b = closing.enter_context(sites.open("b"))
    divided(a, b)
    a.sessions.tick()
    moved = [shard for shard, owned in enumerate(owns(b)) if owned]
    assert [(sessions[shard].client_id, Ended.MOVED) for shard in moved] == ended
    for shard, session in sessions.items():
        if shard in moved:
            with pytest.raises(ts.ShardMovedError):
                session.deliver()
            assert b.sessions.open(session.client_id, expiry_interval=None).filters == 1
        else:
            session.checkpoint()
            session.subscribe("more", 1)


def test_a_deposed_site_hands_out_nothing(sites: Sites, closing: ExitStack) -> None:
    """An owner that has not yet noticed a takeover delivers no packet: it ends the session."""
    a, b = closing.enter_context(sites.open("a")), closing.enter_context(sites.open("b", takeover_after=0.1))
    assert a.cluster is not None
    session = a.sessions.open("reader", expiry_interval=None)
    session.subscribe("#", 1)
    a.publish([ts.Message("t", b"1", "p", qos=1)])
    wait_until(lambda: replicas(b) == [{"a", "b"}], "a second replica")
    with warnings.catch_warnings(action="ignore"):
        a.cluster._stopping.set()  # its thread sends no more heartbeats, and doesn't watch the other sites
        wait_until(lambda: all(owns(b)), "the takeover")
        assert all(owns(a))
        for _ in range(3):
            with pytest.raises(ts.ShardMovedError):
                session.deliver()
    again = b.sessions.open("reader", expiry_interval=None)
    assert [(b"1", 1, False)] == published(b, again)


def test_a_session_ends_if_the_log_store_does_not_answer(sites: Sites, monkeypatch: pytest.MonkeyPatch) -> None:
    """A session whose commit gets no answer ends, because the commit may be stored later; the next opening reads it.

    Until then the session counts as disconnected, so that it can expire.
    """
    cluster = ts.Cluster(sites.url, beat_interval=0.02, poll_interval=0.02, takeover_after=3_600, store_timeout=0.2)
    with warnings.catch_warnings(action="ignore"), ts.open(sites.root / "a", cluster=cluster, site="a") as db:
        assert db.cluster is not None
        session = db.sessions.open("reader", expiry_interval=None)
        session.subscribe("#", 1)
        db.publish([ts.Message("t", b"1", "p", qos=1)])

        def silent(_: str, __: bytes) -> None:
            raise StorageUnavailableError("no answer")

        with monkeypatch.context() as patched:
            patched.setattr(db.cluster.store, "create", silent)
            with pytest.raises(StorageUnavailableError):
                session.deliver()
            assert Ended.UNCERTAIN is session.ended
            with pytest.raises(StorageUnavailableError, match="nothing was queued"):
                db.sessions.open("refused", expiry_interval=None)
        wait_until(lambda: len(db.sessions["reader"].subscriptions) == 1 and db.sessions["reader"].in_flight == 1, "it")
        with monkeypatch.context() as patched:
            patched.setattr(db.cluster.store, "create", silent)
            with pytest.raises(StorageUnavailableError, match="may be stored"):
                db.sessions.open("late", expiry_interval=None)
        wait_until(lambda: "late" in db.sessions, "the session that was stored late")
        assert "refused" not in db.sessions
        for _ in range(2):
            db.sessions.tick()
        assert [False, False] == [db.sessions[client].connected for client in ("late", "reader")]
        again = db.sessions.open("reader", expiry_interval=None)
        assert [(b"1", 1, True)] == published(db, again)


def test_a_publish_fails_only_for_the_shards_that_are_released(sites: Sites, monkeypatch: pytest.MonkeyPatch) -> None:
    """A publish of many clients is refused for the shard that is being released, and stored for the other shards.

    Sessions of the other shards stay open, and their packet ids are in use.
    """
    with sites.open("a", shards=2) as db:
        assert db.cluster is not None
        stays, moves = (db.sessions.open(in_shard(db, shard), expiry_interval=None) for shard in range(2))
        held, going = threading.Event(), threading.Event()
        create = db.cluster.store.create

        def hold(name: str, data: bytes) -> None:
            if name.startswith(names.entries(1)):
                going.set()
                held.wait()
            create(name, data)

        monkeypatch.setattr(db.cluster.store, "create", hold)
        with ThreadPoolExecutor(1) as thread:
            first = thread.submit(moves.publish, [ts.Message("t", b"0", moves.client_id, qos=1)])
            try:
                going.wait()
                db.cluster.replicas[1].log.leave()
                rows = [(one, ts.Message("t", b"1", one.client_id, qos=2), 7) for one in (moves, stays)]
                outcome = db.sessions.publish(rows, partial=True)
                again = db.sessions.publish(
                    [*rows, (stays, ts.Message("t", b"2", stays.client_id, qos=2), 8)], partial=True
                )
            finally:
                held.set()
            first.result()
        assert {0: ts.ShardMovedError} == {row: type(error) for row, error in outcome.refused.items()}
        assert (1, 1, 0) == (outcome.result.count, outcome.result.stored, outcome.result.routed)
        assert [stays.client_id] == [message.client_id for message in outcome.result.batch.to_messages()]
        assert (1, {0}, {1}) == (again.result.stored, set(again.refused), again.repeated)
        with pytest.raises((ts.ShardMovedError, ts.ShardElsewhereError)):
            db.sessions.publish(rows)
        assert [b"0", b"1", b"2"] == sorted(message.payload for message in db.replay("t", fresh=False))


def test_a_publish_is_uncertain_only_in_the_shards_without_an_answer(
    sites: Sites, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If the log store answers for some shards only, messages of those shards' clients are stored and acknowledged.

    A session whose packet id may still be stored ends; its message is stored once.
    """
    cluster = ts.Cluster(sites.url, beat_interval=0.02, poll_interval=0.02, takeover_after=3_600, store_timeout=0.2)
    with (
        warnings.catch_warnings(action="ignore"),
        ts.open(sites.root / "a", cluster=cluster, site="a", shards=2) as db,
    ):
        assert db.cluster is not None
        stays, waits = (db.sessions.open(in_shard(db, shard), expiry_interval=None) for shard in range(2))
        rows = [(one, ts.Message("t", b"1", one.client_id, qos=2), 7) for one in (waits, stays)]
        create = db.cluster.store.create

        def silent(name: str, data: bytes) -> None:
            if name.startswith(names.entries(1)):
                raise StorageUnavailableError("no answer")
            create(name, data)

        with monkeypatch.context() as patched:
            patched.setattr(db.cluster.store, "create", silent)
            outcome = db.sessions.publish(rows, partial=True)
            assert {0: StorageUnavailableError} == {row: type(error) for row, error in outcome.refused.items()}
            assert (Ended.UNCERTAIN, None) == (waits.ended, stays.ended)
            assert [stays.client_id] == [message.client_id for message in db.replay("t", fresh=False)]
        wait_until(lambda: len(list(db.replay("t", fresh=False))) == 2, "the message that was stored late")
        again = db.sessions.open(waits.client_id, expiry_interval=None)
        rows = [(again, rows[0][1], 7), (stays, rows[1][1], 7)]
        assert frozenset((0, 1)) == db.sessions.publish(rows, partial=True).repeated


def test_a_wall_clock_that_is_wrong_ends_no_session(sites: Sites, closing: ExitStack) -> None:
    """A new owner measures time from the last note by its monotonic clock, so its wrong wall clock ends no session."""
    clock, ahead = Clock(), Clock()
    ahead.jump(HOUR)
    a = closing.enter_context(sites.open("a", clock=clock, monotonic=clock.monotonic))
    b = closing.enter_context(sites.open("b", clock=ahead, monotonic=ahead.monotonic))
    a.sessions.open("short", expiry_interval=100).disconnect()
    a.sessions.open("long", expiry_interval=1_000).disconnect()
    b.cluster.refresh()  # type: ignore[union-attr]
    for one in (clock, ahead):
        one.now += 60 * SECOND
    hand_over(a, b)
    b.sessions.tick()
    assert ["long", "short"] == b.sessions.clients()
    ahead.now += 39 * SECOND
    b.sessions.tick()
    assert ["long", "short"] == b.sessions.clients()
    ahead.now += 2 * SECOND
    b.sessions.tick()
    assert ["long"] == b.sessions.clients()
    assert abs(b.sessions["long"].expires - (ahead() + 899 * SECOND)) <= SECOND  # type: ignore[operator]


def test_a_site_that_comes_back_goes_by_its_own_wall_clock(sites: Sites) -> None:
    """While no site runs, time passes by the wall clock of the site that wrote the last note, read when it returns."""
    clock = Clock()
    with sites.open("a", clock=clock) as a:
        a.sessions.open("c", expiry_interval=100).disconnect()
    clock.now += 99 * SECOND
    with sites.open("a", clock=clock) as a:
        a.sessions.tick()
        assert ["c"] == a.sessions.clients()
    clock.now += 2 * SECOND
    with sites.open("a", clock=clock) as a:
        a.sessions.tick()
        assert [] == a.sessions.clients()


def test_wills_and_expiry_run_where_the_shard_is_owned(sites: Sites) -> None:
    """A tick fires the timers of owned shards only, so each will is published once, by the owner."""
    clock = Clock()
    with sites.open("a", shards=4, clock=clock) as a, sites.open("b", clock=clock) as b:
        divided(a, b)
        clients = [in_shard(a, shard) for shard in range(4)]
        for shard, client in enumerate(clients):
            db = a if owns(a)[shard] else b
            will = ts.sessions.Will(ts.Message(f"will/{shard}", b"gone", client), delay=10)
            db.sessions.open(client, expiry_interval=20, will=will).lost()
        for db in (a, b):
            db.cluster.refresh()  # type: ignore[union-attr]
            db.sessions.tick()
        clock.now += 11 * SECOND
        a.sessions.tick()
        assert {f"will/{shard}" for shard, owned in enumerate(owns(a)) if owned} == {one.topic for one in a.replay("#")}
        b.sessions.tick()
        assert [f"will/{shard}" for shard in range(4)] == sorted(one.topic for one in b.replay("#"))
        clock.now += 20 * SECOND
        for db in (a, b, a, b):
            db.sessions.tick()
        a.cluster.refresh()  # type: ignore[union-attr]
        assert [] == a.sessions.clients()
        assert 4 == len(list(b.replay("#")))


def test_a_connection_that_its_owner_lost_ends_on_the_next_one(sites: Sites, closing: ExitStack) -> None:
    """Sessions that a dead owner left open are ended as lost by the next owner, whose tick publishes their wills."""
    a, b = closing.enter_context(sites.open("a")), closing.enter_context(sites.open("b", takeover_after=0.1))
    assert a.cluster is not None
    will = ts.sessions.Will(ts.Message("will", b"gone", "c"))
    a.sessions.open("c", expiry_interval=None, will=will)
    wait_until(lambda: replicas(b) == [{"a", "b"}], "a second replica")
    with warnings.catch_warnings(action="ignore"):
        a.cluster._stopping.set()
        wait_until(lambda: all(owns(b)), "the takeover")
        b.sessions.tick()
        b.sessions.tick()
        assert [b"gone"] == [one.payload for one in b.replay("will")]
        assert not b.sessions["c"].connected
        a.close()


def test_a_session_receives_what_other_sites_store(sites: Sites) -> None:
    """Messages of shards that other sites own wake a session, which gets each message once, in order."""
    with sites.open("a", shards=4) as a, sites.open("b") as b:
        leader, other, client = divided(a, b)
        session = leader.sessions.open(in_shard(a, 0), expiry_interval=None)
        session.subscribe("#", 1)
        received: list[bytes] = []
        for number in range(10):
            other.publish([ts.Message("t", b"%d" % number, client, qos=1)])
            while len(received) <= number:
                assert leader.sessions.wait(30)
                for payload, packet_id, _ in published(leader, session):
                    received.append(payload)
                    session.puback(packet_id)
        assert [b"%d" % number for number in range(10)] == received


def test_a_new_owner_that_is_behind_delivers_nothing_twice(
    sites: Sites, closing: ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A session on a site that has not yet applied all delivered messages waits for them, then resends those in flight.

    Otherwise its place would move back to the site's last applied position, and messages in flight would seem deleted.
    """
    a, b = closing.enter_context(sites.open("a", shards=2)), closing.enter_context(sites.open("b"))
    assert b.cluster is not None
    wait_until(lambda: replicas(b) == [{"a", "b"}] * 2, "replicas at both sites")
    session = a.sessions.open(in_shard(a, 0), expiry_interval=None)
    session.subscribe("#", 1)
    slow = b.cluster.replicas[1]
    with monkeypatch.context() as patched:
        patched.setattr(slow, "follow", lambda **_: None)  # the site reads shard 0, and never shard 1
        patched.setattr(slow, "take_over", lambda *_: False)
        a.publish([ts.Message("t", b"%d" % number, in_shard(a, 1), qos=1) for number in range(4)])
        given: list[tuple[bytes, int, bool]] = []
        while len(given) < 4:
            assert a.sessions.wait(30)
            given += published(a, session)
        session.puback(*(number for _, number, _ in given[:2]))
        a.close()
        wait_until(lambda: owns(b)[0], "the next owner of shard 0")
        assert [] == [*b.replay("#", fresh=False)]
        again = b.sessions.open(session.client_id, expiry_interval=None)
        assert [(payload, number, True) for payload, number, _ in given[2:]] == published(b, again)
    b.publish([ts.Message("t", b"4", again.client_id, qos=1)])
    assert [b"4"] == [payload for payload, _, _ in published(b, again)]


def test_places_and_cursors_of_a_site_that_is_ahead_are_valid(sites: Sites, monkeypatch: pytest.MonkeyPatch) -> None:
    """A place or cursor after a site's last applied position is no error: the site reads the log first."""
    with sites.open("a") as a, sites.open("b") as b:
        assert b.cluster is not None
        monkeypatch.setattr(b.cluster.replicas[0], "follow", lambda **_: None)  # the site reads the log only when asked
        a.store([ts.Message("t", b"0")])
        (stream,) = a.streams("#")
        cursor = a.read(a.cursor(stream, "#"), 100).cursor
        assert [] == [*b.replay("#", fresh=False)]
        assert 0 == len(b.read(cursor).batch)
        assert [b"0"] == [one.payload for one in b.replay("#", fresh=False)]
        a.store([ts.Message("t", b"1")])
        with a.subscribe("#") as first, b.subscribe("#", first.place) as second:
            a.store([ts.Message("t", b"2")])
            b.cluster.refresh()
            assert [b"2"] == [one.payload for one in second.fetch(timeout=30).messages]
