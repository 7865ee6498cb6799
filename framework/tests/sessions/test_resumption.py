"""What comes again after a crash, a lost connection or a take-over, and where replays begin."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
import topicstore as ts
from topicstore.contract.positions import first_position
from topicstore.sessions import Publish, PubRel, Session, Sessions, Start
from topicstore.shard.state import OWN, FrameworkWrite
from topicstore_conformance.faults.clock import START, Clock

Publishing = Callable[..., None]
Crash = Callable[[], Sessions]
SECOND = 1_000_000
PREFIXES = (b"sf", b"sp")


def seen(items: list[Publish | PubRel]) -> list[tuple[str, int, bool]]:
    return [(i.message.payload.decode(), i.packet_id, i.dup) for i in items if isinstance(i, Publish)]


def opened(sessions: Sessions, qos: int = 1, **options: int) -> Session:
    session = sessions.open("subscriber", expiry_interval=None, **options)  # type: ignore[arg-type]
    if not session.present:
        session.subscribe("a/#", qos)
    return session


# --- after a crash ---


def test_what_was_not_acknowledged_comes_again(sessions: Sessions, publish: Publishing, crash: Crash) -> None:
    """In the same order, with the same ids and DUP; what follows comes behind it."""
    session = opened(sessions)
    publish("1", "2", "3")
    session.deliver()
    session.puback(2)
    session.checkpoint()
    publish("4")
    session = opened(crash())
    assert session.present
    assert [("1", 1, True), ("3", 3, True)] == seen(session.deliver())
    assert [("4", 4, False)] == seen(session.deliver())


def test_acknowledgements_without_a_checkpoint_cost_repetitions(
    sessions: Sessions, publish: Publishing, crash: Crash
) -> None:
    """That is what a crash may cost; a flight acknowledged as a whole goes with the next commit."""
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
    """PUBRELs first, then the messages that the client may not have; ids in use stay in use."""
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


def test_nothing_is_left_of_exchanges_that_are_over(
    db: ts.Database, sessions: Sessions, publish: Publishing, crash: Crash
) -> None:
    """Neither in the store nor after a crash."""
    session = opened(sessions, qos=2)
    publish("1", "2", qos=2)
    publish("3", qos=1)
    session.deliver()
    session.pubrec(1, 2)
    session.puback(3)
    session.deliver()
    assert 2 == session.pubcomp(1, 2)
    session.checkpoint()
    assert [] == [key for shard in range(2) for key, _ in db.state(shard).scan(OWN) if key[1:3] in PREFIXES]
    assert [] == opened(crash()).deliver()


def test_a_smaller_window_is_kept_while_sending_again(sessions: Sessions, publish: Publishing, crash: Crash) -> None:
    """What does not fit in waits, and keeps its id."""
    session = opened(sessions)
    publish("1", "2", "3")
    session.deliver()
    session = opened(crash(), receive_maximum=2)
    assert [("1", 1, True), ("2", 2, True)] == seen(session.deliver())
    assert [] == session.deliver()
    assert (3, 1) == (session.status().in_flight, session.status().to_resend)
    assert session.puback(1)
    assert [("3", 3, True)] == seen(session.deliver())


def test_an_acknowledgement_may_overtake_the_repetition(sessions: Sessions, publish: Publishing, crash: Crash) -> None:
    """Then it is not sent again."""
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
    """Their id is free at QoS 1. At QoS 2 the client may hold it: it stays in use, without a PUBREL or room."""
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
    assert session.pubrec(3)  # late, of what was sent before
    assert [PubRel(3)] == session.deliver()
    assert session.pubcomp(3)
    assert session.puback(4)
    assert [("6", 6, False)] == seen(session.deliver())


@pytest.mark.parametrize("most", [None, 1])
def test_messages_in_flight_do_not_expire(
    db: ts.Database, sessions: Sessions, clock: Clock, crash: Crash, most: int | None
) -> None:
    """[MQTT-4.3.3-7], also while they wait for bytes; what was never sent does. No PUBREL is sent without a PUBREC."""

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


def test_a_dropped_generation_is_told_and_blocks_nothing(
    db: ts.Database, sessions: Sessions, publish: Publishing
) -> None:
    """What was in flight of it has vanished, what was unread is missed, and all else goes on."""
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


@pytest.mark.parametrize("start", ["beginning", 0, "1970-01-01T00:00:00+00:00", {}])
def test_a_late_joiner_gets_the_history(db: ts.Database, sessions: Sessions, start: Start) -> None:
    """Whether or not the session was there when it was made, and live messages behind it."""
    db.store([ts.Message("a/b", b"%d" % number, "publisher", 1) for number in range(3)])
    session = sessions.open("late", expiry_interval=None)
    session.subscribe("a/#", 1, start=start)
    db.publish([ts.Message("a/b", b"3", "publisher", 1)])
    assert ["0", "1", "2", "3"] == [payload for payload, _, _ in seen(session.deliver())]


def test_a_replay_begins_at_its_time(db: ts.Database, sessions: Sessions, clock: Clock) -> None:
    """Inclusive, to the microsecond; as a time, a place or a datetime."""
    for number in range(4):
        clock.now = START + number
        db.store([ts.Message("a/b", b"%d" % number, "publisher", 1)])
    shard = db.shard_of("publisher")
    starts: list[Start] = [
        START + 2,
        str(START + 2),
        datetime.fromtimestamp(START // SECOND, UTC).replace(microsecond=2),
        {shard: first_position(START + 1)},
        f"{shard}:{first_position(START + 1)}",
    ]
    for number, start in enumerate(starts):
        session = sessions.open(f"late-{number}", expiry_interval=None)
        session.subscribe("a/#", 1, start=start)
        assert ["2", "3"] == [payload for payload, _, _ in seen(session.deliver())]


def test_a_replay_goes_on_after_a_crash(db: ts.Database, sessions: Sessions, crash: Crash) -> None:
    """Where it was."""
    db.store([ts.Message("a/b", b"%d" % number, "publisher", 1) for number in range(5)])
    sessions.open("late", expiry_interval=None).subscribe("a/#", 1, start=0)
    assert 2 == sum(len(items) for _, items in sessions.deliver(limit_each=2))
    session = crash().open("late", expiry_interval=None)
    found = [payload for _ in range(2) for payload, _, _ in seen(session.deliver())]
    assert ["0", "1", "2", "3", "4"] == found


def test_subscribing_again_with_a_start_replays(sessions: Sessions, publish: Publishing) -> None:
    """Without one it goes on where it is."""
    session = opened(sessions)
    publish("1")
    assert ["1"] == [payload for payload, _, _ in seen(session.deliver())]
    assert not session.subscribe("a/#", 1).created
    assert [] == session.deliver()
    assert not session.subscribe("a/#", 1, start="beginning").created
    assert ["1"] == [payload for payload, _, _ in seen(session.deliver())]


@pytest.mark.parametrize(
    ("start", "seconds"),
    [
        (" 2023-11-14T22:13:21Z ", 1),
        ("2023-11-14T22:13:21", 1),
        ("@1700000001.5", 1.5),
        ("-1m30s", 10),
        (timedelta(seconds=-90), 10),
        (datetime(2023, 11, 14, 22, 13, 21, tzinfo=UTC), 1),
        ("beginning", None),
        (" now ", 100),
    ],
)
def test_a_start_is_a_time_as_a_replay_has_it(
    db: ts.Database, sessions: Sessions, clock: Clock, start: Start, seconds: float | None
) -> None:
    """Also as text, as a user property has it."""
    for number in range(20):
        clock.now = START + number * SECOND // 2 + (0 if number < 10 else 5 * SECOND)
        db.store([ts.Message("a", b"%d" % number, "publisher", 1)])
    clock.now = START + 100 * SECOND
    session = sessions.open("late", expiry_interval=None)
    session.subscribe("a", 1, start=start)
    found = len(seen(session.deliver()))
    since = 0 if seconds is None else START + int(seconds * SECOND)
    assert found == sum(1 for _ in db.replay("a", since))
    assert found == {None: 20, 1: 18, 1.5: 17, 10: 10, 100: 0}[seconds]


def test_a_place_may_be_text(db: ts.Database, sessions: Sessions) -> None:
    """As a user property has it."""
    db.store([ts.Message("a", b"", f"publisher {number}") for number in range(10)])  # in both shards
    session = sessions.open("late", expiry_interval=None)
    session.subscribe("a", 1, start=" 0:5,1:7 ")
    assert (5, 7) == session.status().subscriptions[0].places[:2]


@pytest.mark.parametrize("text", ["", "yesterday", "0:5,", "-1", "1:2:3", "17", "1700000000"])
def test_a_text_that_is_no_start_is_refused(sessions: Sessions, text: str) -> None:
    """Rather than guessed at."""
    session = sessions.open("subscriber")
    with pytest.raises(ts.InvalidArgumentError, match="start: "):
        session.subscribe("a", start=text)
    assert () == session.status().subscriptions


@pytest.mark.parametrize(
    "start",
    [{9: 0}, {0: -1}, 1.5, 1_700_000_000, 1_700_000_000_000, -3600, timedelta(1), datetime(2024, 1, 1)],  # noqa: DTZ001
)
def test_a_start_that_is_none_is_refused(sessions: Sessions, start: Start) -> None:
    """Seconds and milliseconds too, which would be 1970. Nothing is subscribed."""
    session = sessions.open("subscriber")
    with pytest.raises(ts.InvalidArgumentError):
        session.subscribe("a", start=start)
    assert () == session.status().subscriptions


@pytest.mark.parametrize("text", ["a", "$share/group/a"])
def test_a_stored_place_in_what_was_lost_counts_as_the_end(tmp_path: Path, text: str) -> None:
    """As when one shard lost its last writes and the session's has not: what is stored from then on comes."""

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


# --- after a kill ---


CHILD = """
import topicstore as ts
path, first = arguments
counts(RocksdbEngine, "write")
db = ts.open(path, shards=2)
session = db.sessions.open("subscriber", expiry_interval=None)
if not session.present:
    session.subscribe("#", 2)
for number in count(first):
    messages = [ts.Message("t", b"%d" % (number * 7 + i), f"p{i}", 1 + i % 2) for i in range(7)]
    db.publish(messages)
    for message in messages:
        say("stored", message.client_id, message.payload.decode())
    for item in session.deliver(5):
        if hasattr(item, "message"):
            message = item.message
            say("sent", item.packet_id, item.qos, item.dup, message.client_id, message.payload.decode())
            if item.packet_id % 3:
                (session.puback if item.qos == 1 else session.pubrec)(item.packet_id)
        else:
            say("released", item.packet_id)
            session.pubcomp(item.packet_id)
    if number % 5 == 4:
        session.checkpoint()
"""


class Client:
    """What a client saw of processes that were killed, by the rules of MQTT."""

    def __init__(self) -> None:
        self.stored: list[tuple[str, ...]] = []
        self.held: dict[int, str] = {}
        """QoS 2: ids whose PUBREL has not come, with the payload."""
        self.got: list[tuple[str, int, str]] = []
        self.ids: dict[tuple[str, str], int] = {}

    def hear(self, what: str, *words: Any) -> None:
        if what == "stored":
            self.stored.append(words)
        elif what == "released":
            self.held.pop(*words, None)
        else:
            self.take(*words)

    def take(self, packet_id: int, qos: int, dup: bool, publisher: str, payload: str) -> None:
        before = self.ids.setdefault((publisher, payload), packet_id)
        assert before == packet_id
        if qos == 2:
            if packet_id in self.held:
                assert dup
                assert payload == self.held[packet_id]
                return
            self.held[packet_id] = payload
        self.got.append((publisher, qos, payload))


@pytest.mark.parametrize("moment", ["before", "after"])
def test_killed_again_and_again_nothing_is_lost_and_qos_2_comes_once(
    tmp_path: Path, run_until: Callable[..., list[tuple[Any, ...]]], moment: str
) -> None:
    """A process that publishes, delivers and acknowledges is killed around one of its writes, eight times."""
    client = Client()
    for run, write in enumerate((20, 41, 62, 83, 34, 15, 16, 17)):
        for words in run_until((write, moment), CHILD, tmp_path / "db", run * 10_000):
            client.hear(*words)
    with ts.open(tmp_path / "db") as db:
        session = db.sessions.open("subscriber", expiry_interval=None)
        while items := session.deliver():
            for item in items:
                if isinstance(item, PubRel):
                    client.held.pop(item.packet_id, None)
                    assert session.pubcomp(item.packet_id)
                    continue
                client.take(item.packet_id, item.qos, item.dup, item.message.client_id, item.message.payload.decode())
                assert (session.puback if item.qos == 1 else session.pubrec)(item.packet_id)
        assert 0 == session.status().in_flight
        stored = {(message.client_id, message.payload.decode()) for message in db.replay("#")}
    assert set(client.stored) <= stored
    assert stored == {(publisher, payload) for publisher, _, payload in client.got}
    exactly = [(publisher, payload) for publisher, qos, payload in client.got if qos == 2]
    assert len(exactly) == len(set(exactly))
    for publisher in {publisher for publisher, _ in stored}:
        first = list(dict.fromkeys(int(payload) for who, _, payload in client.got if who == publisher))
        assert sorted(first) == first
