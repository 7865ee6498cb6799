"""Messages that are stored only because sessions wait for them go once no session needs them, and no others."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import topicstore as ts
from hypothesis import given, settings
from hypothesis import strategies as st
from topicstore.contract.checksums import add_checksum
from topicstore.contract.engine import STATE
from topicstore.pubsub.publish import PERSIST
from topicstore.storage.interest import Span
from topicstore_conformance.backend.fixtures import put
from topicstore_conformance.faults.clock import Clock
from topicstore_conformance.faults.threads import wait_until

SECOND, MINUTE = 1_000_000, 60_000_000


def opened(path: Path | str, clock: Clock, **arguments: object) -> ts.Database:
    """Open a database whose sessions' messages go after a minute, and in which tracking has begun."""
    db = ts.open(path, clock=clock, **arguments)  # type: ignore[arg-type]
    db.retention.set(delivered="1m")
    db.sessions.load_filters()
    clock.now += 2 * SECOND
    return db


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def db(tmp_path: Path, clock: Clock) -> Iterator[ts.Database]:
    with opened(tmp_path / "db", clock) as found:
        yield found


def stored(db: ts.Database) -> list[bytes]:
    return sorted(message.payload for message in db.replay("#"))


def publish(db: ts.Database, *payloads: bytes, topic: str = "a/b", **fields: object) -> None:
    db.publish([ts.Message(topic, payload, "c", qos=1, **fields) for payload in payloads])  # type: ignore[arg-type]


def acknowledge(session: ts.Session, limit: int = 100) -> int:
    """Deliver messages, acknowledge them, and store that; return their number."""
    packets = session.deliver(limit)
    for packet in packets:
        session.puback(packet.packet_id)
    session.checkpoint()
    return len(packets)


def reader(db: ts.Database, client_id: str = "reader", topic_filter: str = "#") -> ts.Session:
    session = db.sessions.open(client_id, expiry_interval=None)
    session.subscribe(topic_filter, 1)
    return session


def test_a_message_goes_once_it_is_delivered_and_old_enough(db: ts.Database, clock: Clock) -> None:
    """A message that only a session needed goes after it was acknowledged, and not before its age."""
    session = reader(db)
    publish(db, b"1", b"2")
    clock.now += 2 * MINUTE
    assert (0, [b"1", b"2"]) == (db.sessions.remove_delivered(), stored(db))
    assert 2 == acknowledge(session)
    publish(db, b"3")
    assert 1 == acknowledge(session)
    assert (2, [b"3"]) == (db.sessions.remove_delivered(), stored(db))
    clock.now += 2 * MINUTE
    assert (1, []) == (db.sessions.remove_delivered(), stored(db))


def test_what_is_in_flight_stays(db: ts.Database, clock: Clock) -> None:
    """A message that was sent and not acknowledged stays, and so do younger ones; it is sent again."""
    session = reader(db)
    publish(db, b"1", b"2")
    assert 1 == acknowledge(session, 1)
    assert [b"2"] == [packet.message.payload for packet in session.deliver(1)]  # type: ignore[union-attr]
    session.disconnect()
    clock.now += 2 * MINUTE
    assert (1, [b"2"]) == (db.sessions.remove_delivered(), stored(db))
    again = db.sessions.open("reader", clean_start=False, expiry_interval=None)
    assert [b"2"] == [packet.message.payload for packet in again.deliver()]  # type: ignore[union-attr]


def test_a_session_that_is_away_holds_back_what_it_waits_for(db: ts.Database, clock: Clock) -> None:
    """A message that one of several sessions has still to deliver stays until that session has ended."""
    near, _ = reader(db), reader(db, "away", "a/+").disconnect()
    publish(db, b"1", topic="b")
    publish(db, b"2", topic="a/x")
    assert 2 == acknowledge(near)
    clock.now += 2 * MINUTE
    assert (1, [b"2"]) == (db.sessions.remove_delivered(), stored(db))
    db.sessions.expire("away")
    assert (1, []) == (db.sessions.remove_delivered(), stored(db))


def test_what_else_asked_for_it_stays(db: ts.Database, clock: Clock) -> None:
    """What a rule, the publisher or a program stores stays, whether it was stored before, between or after others."""
    session = reader(db)
    db.persistence.add("keep/#")
    publish(db, b"session 1")
    publish(db, b"rule", topic="keep/a")
    publish(db, b"asked", properties=ts.Properties(user_properties=((PERSIST, "1"),)))
    publish(db, b"session 2")
    db.store([ts.Message("a", b"program")])
    publish(db, b"session 3")
    acknowledge(session)
    clock.now += 2 * MINUTE
    assert 3 == db.sessions.remove_delivered()
    assert [b"asked", b"program", b"rule"] == stored(db)


def test_a_rule_that_was_removed_keeps_what_it_stored(db: ts.Database, clock: Clock) -> None:
    """What a rule stored stays when the rule is removed, and a new rule keeps what was stored before it."""
    session = reader(db)
    rule = db.persistence.add("x")
    publish(db, b"old rule", topic="x")
    db.persistence.remove(rule)
    publish(db, b"no rule", topic="x")
    publish(db, b"new rule", topic="y")
    db.persistence.add("y")
    acknowledge(session)
    clock.now += 2 * MINUTE
    assert 1 == db.sessions.remove_delivered()
    assert [b"new rule", b"old rule"] == stored(db)


def test_without_the_setting_everything_stays(tmp_path: Path, clock: Clock) -> None:
    """Without `delivered`, what sessions have stays like all that is stored."""
    with ts.open(tmp_path / "db", clock=clock) as db:
        session = reader(db)
        publish(db, b"1")
        acknowledge(session)
        clock.now += 100 * MINUTE
        assert (0, [b"1"]) == (db.sessions.remove_delivered(), stored(db))


def test_it_holds_after_a_restart(tmp_path: Path, clock: Clock) -> None:
    """After a restart the same messages go, and what a program stored in between stays."""
    with opened(tmp_path / "db", clock) as db:
        session = reader(db)
        publish(db, b"1")
        acknowledge(session)
    with ts.open(tmp_path / "db", clock=clock) as db:
        db.store([ts.Message("a", b"program")])
    with opened(tmp_path / "db", clock) as db:
        clock.now += 2 * MINUTE
        assert (1, [b"program"]) == (db.sessions.remove_delivered(), stored(db))


def test_a_tick_removes_in_the_background(db: ts.Database, clock: Clock) -> None:
    """`tick` begins the removal in the background."""
    session = reader(db)
    publish(db, b"1")
    acknowledge(session)
    clock.now += 2 * MINUTE
    db.sessions.tick()
    wait_until(lambda: not stored(db), "the message is removed")
    assert db.sessions.removal_failure is None


def test_stored_forms_of_the_first_versions_are_read(tmp_path: Path) -> None:
    """Spans of version 1, and limits of retention that were stored without ``delivered``, are read as they were."""
    ended, going_on = bytes.fromhex("93010991a3612f23"), bytes.fromhex("9301c090")  # [1, 9, ["a/#"]], [1, nil, []]
    limits = bytes.fromhex("9701cf00000025b7f3d400c0c0a6726566757365c080")  # 45 hours, of which nothing else is set
    with ts.open(tmp_path / "db") as db:
        keys = b"\1pi" + bytes(7) + b"\5", b"\1pi" + bytes(7) + b"\x0c", b"\1ps"
        for key, value in zip(keys, (ended, going_on, limits), strict=True):
            put(db.storage.shards[0].writer.open_engine(), STATE, {key: add_checksum(key, value)})
    with ts.open(tmp_path / "db") as db:
        assert (Span(5, 9, ("a/#",)), Span(12, None, ())) == db.storage.interest.of_shard(0)
        assert ts.RetentionSettings(max_age=162_000) == db.retention.settings
        assert [] == db.verify().damages


ACTIONS = st.sampled_from(["session", "rule", "asked", "program", "deliver", "sent", "away", "remove", "reopen"])


@given(st.lists(ACTIONS, max_size=30))
@settings(max_examples=60)
def test_no_history_removes_what_is_needed(actions: list[str]) -> None:
    """Whatever happens in which order, what was asked for stays, and a session gets every message that it waits for."""
    with tempfile.TemporaryDirectory() as folder:
        clock = Clock()
        db = opened(Path(folder) / "db", clock, shards=2)
        try:
            db.persistence.add("keep/#")
            reader(db).disconnect()
            kept, waiting = set[bytes](), set[bytes]()
            for number, action in enumerate(actions):
                payload = b"%d" % number
                clock.now += 40 * SECOND
                if action in ("session", "rule", "asked"):
                    topic = {"rule": "keep/a", "session": "a"}.get(action, f"t/{number}")
                    asking = ts.Properties(user_properties=((PERSIST, "true"),)) if action == "asked" else None
                    db.publish([ts.Message(topic, payload, f"c{number % 3}", qos=1, properties=asking)])
                    waiting.add(payload)
                    kept |= {payload} if action != "session" else set()
                elif action == "program":
                    db.store([ts.Message("a", payload, f"c{number % 3}", qos=1)])
                    kept.add(payload)
                    waiting.add(payload)
                elif action in ("deliver", "sent", "away"):
                    session = db.sessions.open("reader", clean_start=False, expiry_interval=None)
                    for packet in session.deliver(3):
                        if action == "deliver":
                            waiting.discard(packet.message.payload)  # type: ignore[union-attr]
                            session.puback(packet.packet_id)
                    session.disconnect()
                elif action == "remove":
                    db.sessions.remove_delivered()
                else:
                    db.close()
                    db = opened(Path(folder) / "db", clock, shards=2)
                assert kept | waiting <= set(stored(db))
            session = db.sessions.open("reader", clean_start=False, expiry_interval=None)
            got = set[bytes]()
            while packets := session.deliver(100):
                got |= {packet.message.payload for packet in packets}  # type: ignore[union-attr]
                for packet in packets:
                    session.puback(packet.packet_id)
            assert waiting <= got
            session.checkpoint()
            clock.now += 10 * MINUTE
            db.sessions.remove_delivered()
            db.sessions.remove_delivered()
            assert kept == set(stored(db))
        finally:
            db.close()
