"""Redelivery after a crash, a lost connection or a takeover, and the starts of replays."""

from __future__ import annotations

import shutil
import warnings
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
import topicstore as ts
from topicstore.contract.positions import first_position
from topicstore.sessions import Publish, PubRel, Session, Sessions, Start
from topicstore.shard.state import OWN, FrameworkWrite
from topicstore_conformance.faults.clock import START, Clock

Publishing = Callable[..., None]
Crash = Callable[[], Sessions]
SECOND = 1_000_000


def seen(items: list[Publish | PubRel]) -> list[tuple[str, int, bool]]:
    return [(i.message.payload.decode(), i.packet_id, i.dup) for i in items if isinstance(i, Publish)]


def opened(sessions: Sessions, qos: int = 1, **options: int) -> Session:
    session = sessions.open("subscriber", expiry_interval=None, **options)  # type: ignore[arg-type]
    if not session.present:
        session.subscribe("a/#", qos)
    return session


# --- after a crash ---


def test_acknowledgements_without_a_checkpoint_cost_repetitions(
    sessions: Sessions, publish: Publishing, crash: Crash
) -> None:
    """After a crash, acknowledged messages are redelivered unless a checkpoint or a later commit included them."""
    session = opened(sessions)
    publish("1")
    session.deliver()
    session.puback(1)
    assert [("1", 1, True)] == seen(opened(crash()).deliver())
    session = opened(crash())
    session.deliver()
    session.puback(1)
    publish("2")
    session.deliver()
    assert [("2", 2, True)] == seen(opened(crash()).deliver())


def test_what_was_received_is_released_in_the_order_it_was(
    sessions: Sessions, publish: Publishing, crash: Crash
) -> None:
    """After a crash, PUBRELs come first, in the order of the PUBRECs, then unacknowledged messages.

    Packet ids in use stay in use.
    """
    session = opened(sessions, qos=2)
    publish("1", "2", "3", "4", qos=2)
    session.deliver()
    for packet_id in (3, 1):
        assert session.pubrec(packet_id)
    assert [PubRel(3), PubRel(1)] == session.deliver()
    assert session.pubrec(4)
    session = opened(crash())
    assert [PubRel(3), PubRel(1)] == session.deliver(limit=2)
    assert [("2", 2, True), ("4", 4, True)] == seen(session.deliver())
    assert session.pubcomp(3)
    session.checkpoint()
    assert [PubRel(1)] == opened(crash()).deliver(limit=1)


def test_an_acknowledgement_may_overtake_the_repetition(sessions: Sessions, publish: Publishing, crash: Crash) -> None:
    """A message that is acknowledged before its redelivery is not redelivered."""
    opened(sessions)
    publish("1", "2")
    sessions.deliver()
    session = opened(crash(), receive_maximum=1)
    assert 1 == session.puback(1)
    assert [("2", 2, True)] == seen(session.deliver())
    assert 1 == session.status().in_flight


def test_messages_that_were_deleted_do_not_come_again(
    db: ts.Database, sessions: Sessions, publish: Publishing, crash: Crash
) -> None:
    """Messages deleted in flight are not redelivered; their packet ids become free at QoS 1.

    At QoS 2 the client may hold the id: it stays in use, without a PUBREL, and doesn't count against the receive
    maximum.
    """
    session = opened(sessions, qos=2)
    publish("1", "2", qos=1)
    publish("3", qos=2)
    db.publish([ts.Message("a/kept", b"4", "publisher", 1)])
    session.deliver()
    assert 3 == db.delete("a/b")
    session = opened(crash(), receive_maximum=2)
    assert [("4", 4, True)] == seen(session.deliver())
    publish("5", "6", qos=2)
    assert [("5", 5, False)] == seen(session.deliver())
    assert (3, "acknowledgements") == (session.status().in_flight, session.status().waits_for)
    assert session.pubrec(3)  # a late PUBREC for the first delivery
    assert [PubRel(3)] == session.deliver()
    assert session.pubcomp(3)
    assert session.puback(4)
    assert [("6", 6, False)] == seen(session.deliver())


@pytest.mark.parametrize("most", [None, 1])
def test_messages_in_flight_do_not_expire(
    db: ts.Database, sessions: Sessions, clock: Clock, crash: Crash, most: int | None
) -> None:
    """Messages in flight don't expire [MQTT-4.3.3-7], even if a limit in bytes delays them; unsent messages do.

    No PUBREL is sent without a PUBREC.
    """

    def publish(qos: int, seconds: int) -> None:
        properties = ts.Properties(message_expiry_interval=seconds)
        db.publish([ts.Message("a/b", b"%d" % seconds, "publisher", qos, properties=properties)])

    session = opened(sessions, qos=2)
    for qos, seconds in ((1, 10), (2, 11), (1, 100)):
        publish(qos, seconds)
    session.deliver()
    publish(1, 12)
    clock.now += 12 * SECOND
    session = opened(crash())
    again = session.deliver(max_bytes=most)
    clock.now += SECOND
    while items := session.deliver(max_bytes=most):
        again += items
    expected = [("10", 1, 0), ("11", 2, 0), ("100", 3, 88 if most is None else 87)]
    assert expected == [(i.message.payload.decode(), i.packet_id, i.expiry) for i in again if isinstance(i, Publish)]
    assert 3 == len(again)
    assert 3 == session.status().in_flight


def test_a_dropped_generation_is_reported_and_blocks_nothing(
    db: ts.Database, sessions: Sessions, publish: Publishing
) -> None:
    """Dropping a generation discards its messages in flight, reports unread messages, and blocks no other message."""
    session = opened(sessions)
    publish("1")
    session.deliver()
    publish("2")
    db.add_generation()
    publish("3")
    db.drop_generation(1)
    assert [("3", 2, False)] == seen(session.deliver())
    assert (1,) == session.status().subscriptions[0].dropped
    session.lost()
    assert [("3", 2, True)] == seen(opened(sessions).deliver())


# --- replays ---


STORED = [START + number * SECOND // 2 + (0 if number < 10 else 5 * SECOND) for number in range(20)]
PLACE = first_position(START + SECOND) - 1
"""A place in shard 1, the publisher's shard."""


@pytest.mark.parametrize(
    ("start", "count"),
    [
        *((start, 20) for start in ("beginning", 0, "1970-01-01T00:00:00+00:00", {})),
        *((start, 18) for start in (START + SECOND, str(START + SECOND), {1: PLACE}, f"1:{PLACE}")),
        *((start, 18) for start in (" 2023-11-14T22:13:21Z ", "2023-11-14T22:13:21")),
        (datetime(2023, 11, 14, 22, 13, 21, tzinfo=UTC), 18),
        (datetime(2023, 11, 14, 22, 13, 21, 1, tzinfo=UTC), 17),
        ("@1700000001.5", 17),
        ("-1m30s", 10),
        (timedelta(seconds=-90), 10),
        (" now ", 0),
    ],
)
def test_a_replay_begins_at_its_start(
    db: ts.Database, sessions: Sessions, clock: Clock, start: Start, count: int
) -> None:
    """A replay begins at its start, inclusive, and live messages follow.

    The start may be a time, as in `Database.replay`, a place, or the text of either, as in a user property.
    """
    for number, clock.now in enumerate(STORED):
        db.store([ts.Message("a/b", b"%d" % number, "publisher", 1)])
    clock.now = START + 100 * SECOND
    session = sessions.open("late", expiry_interval=None)
    session.subscribe("a/#", 1, start=start)
    db.publish([ts.Message("a/b", b"20", "publisher", 1)])
    assert list(range(20 - count, 21)) == [int(payload) for payload, _, _ in seen(session.deliver())]


def test_a_place_may_be_text(db: ts.Database, sessions: Sessions) -> None:
    """A place may be given as text, as in a user property."""
    db.store([ts.Message("a", b"", f"publisher {number}") for number in range(10)])  # spread over both shards
    session = sessions.open("late", expiry_interval=None)
    session.subscribe("a", 1, start=" 0:5,1:7 ")
    assert (5, 7) == session.status().subscriptions[0].places[:2]


@pytest.mark.parametrize(
    "start",
    [
        *("", "yesterday", "0:5,", "-1", "1:2:3", "17", "1700000000"),
        *({9: 0}, {0: -1}, 1.5, 1_700_000_000, 1_700_000_000_000, -3600, timedelta(1), datetime(2024, 1, 1)),  # noqa: DTZ001
    ],
)
def test_a_start_that_is_none_is_refused(sessions: Sessions, start: Start) -> None:
    """An invalid start raises, including times in seconds or milliseconds, which would mean 1970 in microseconds.

    Nothing is subscribed.
    """
    session = sessions.open("subscriber")
    with pytest.raises(ts.InvalidArgumentError, match="start: " if isinstance(start, str) else "."):
        session.subscribe("a", start=start)
    assert () == session.status().subscriptions


@pytest.mark.parametrize("text", ["a", "$share/group/a"])
def test_a_stored_place_in_what_was_lost_counts_as_the_end(tmp_path: Path, text: str) -> None:
    """A stored place after the end of its shard counts as the end, so that later messages are delivered.

    This happens if one shard lost its last writes and the session's shard did not.
    """

    def stored(db: ts.Database, payload: bytes, second: int) -> None:
        db.store([ts.Message("a", payload, "publisher", 1, timestamp=second * SECOND)])

    with ts.open(tmp_path / "db", timestamps="message", allow_ancient=True) as db:
        session = db.sessions.open("client", expiry_interval=None)
        session.subscribe(text, 1)
        stored(db, b"1", 1)
        assert ["1"] == [payload for payload, _, _ in seen(session.deliver())]
        session.puback(1)
        session.disconnect()
        db.checkpoint(tmp_path / "copy")
        session = db.sessions.open("client", expiry_interval=None)
        stored(db, b"lost", 9)
        session.puback(*[item.packet_id for item in session.deliver()])
        session.disconnect()
        places = [*db.state(0).scan(OWN + b"sc"), *db.state(0).scan(OWN + b"sg"), *db.state(0).scan(OWN + b"g")]
    with ts.open(tmp_path / "copy", allow_ancient=True) as db:
        db.state(0).write([FrameworkWrite(key, value) for key, value in places])
    with ts.open(tmp_path / "copy", allow_ancient=True) as db:
        session = db.sessions.open("client", expiry_interval=None)
        stored(db, b"new", 5)
        assert ["new"] == [payload for payload, _, _ in seen(session.deliver())]


def test_a_session_ahead_of_a_shard_that_lost_its_end_is_reported(tmp_path: Path) -> None:
    """A session ahead of a shard that lost its last writes continues at the shard's end, with one warning.

    A shared subscription continues in the same way.
    """
    path, clients = tmp_path / "db", [f"client-{number}" for number in range(64)]
    with ts.open(path, shards=2, timestamps="message", allow_ancient=True) as db:
        publisher, subscriber = (next(one for one in clients if db.storage.shard_of(one) == shard) for shard in (0, 1))
        session = db.sessions.open(subscriber, expiry_interval=None)
        session.subscribe("a", 1)
        session.subscribe("$share/group/a", 1)
        db.store([ts.Message("a", b"1", publisher, timestamp=1_000_000)])
        db.checkpoint(tmp_path / "copy")
        db.store([ts.Message("a", b"lost", publisher, timestamp=9_000_000)])
        for item in session.deliver():
            session.puback(item.packet_id)  # type: ignore[arg-type]
        session.lost()
    shutil.rmtree(path / "shard-0000")
    shutil.copytree(tmp_path / "copy" / "shard-0000", path / "shard-0000")
    with warnings.catch_warnings(record=True):
        warnings.simplefilter("always")
        db = ts.open(path, recovery="point_in_time", allow_ancient=True)
    with db:
        with warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("default")
            session = db.sessions.open(subscriber, expiry_interval=None)
        assert ["sessions stood after the end of shards 0"] == [str(each.message).split(":")[0] for each in warned]
        db.store([ts.Message("a", b"new", publisher, timestamp=5_000_000)])
        assert [b"new"] * 2 == [item.message.payload for item in session.deliver()]  # type: ignore[union-attr]
