"""Shared subscriptions: assignment to members, returned messages, and the state after failing engine writes.

The messages of each shard are divided by a hash of their topic into 64 partitions, each assigned to one member.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import topicstore as ts
from topicstore.contract.errors import InvalidArgumentError, InvalidFilterError
from topicstore.sessions import Publish, Session, Sessions
from topicstore.sessions.model import is_shared, parse_shared, read_filter
from topicstore.sessions.shared.group import moves
from topicstore.sessions.shared.reader import PARTITIONS
from topicstore.shard.state import OWN
from topicstore.shard.writer import PendingWrite, ShardWriter
from topicstore_conformance.faults.clock import Clock
from topicstore_conformance.faults.threads import PATIENCE, begin

TEXT = "$share/g/t/#"
SECOND = 1_000_000


@pytest.fixture
def spread(db: ts.Database) -> Callable[..., list[bytes]]:
    """Return a function that publishes numbered messages to many topics."""
    numbers = iter(range(1_000_000))

    def publish(count: int, qos: int = 1, *, retain: bool = False) -> list[bytes]:
        payloads = [b"%d" % next(numbers) for _ in range(count)]
        db.publish([ts.Message(f"t/{p.decode()}", p, f"p{len(p)}", qos, retain) for p in payloads])
        return payloads

    return publish


def member(sessions: Sessions, client_id: str, qos: int = 1, **options: Any) -> Session:
    session = sessions.open(client_id, **{"expiry_interval": None, **options})
    session.subscribe(TEXT, qos)
    return session


def drain(sessions: Sessions, *, acknowledge: bool = True) -> dict[str, list[bytes]]:
    """Return the payloads that are delivered to each client until nothing remains."""
    got: dict[str, list[bytes]] = {}
    while out := sessions.deliver():
        for session, items in out:
            deliveries = [item for item in items if isinstance(item, Publish)]
            got.setdefault(session.client_id, []).extend(item.message.payload for item in deliveries)
            if acknowledge:
                session.puback(*[item.packet_id for item in deliveries if item.qos == 1])
    return got


def everything(got: dict[str, list[bytes]]) -> list[bytes]:
    return sorted(payload for payloads in got.values() for payload in payloads)


# --- filters ---


@pytest.mark.parametrize(
    "text",
    ["$share", "$share/", "$share/g", "$share/g/", "$share//t", "$share/+/t", "$share/#", "$share/g#/t", "$share/g/t+"],
)
def test_bad_filters_are_refused(sessions: Sessions, text: str) -> None:
    """A shared filter needs a name without wildcards, followed by a filter [MQTT-4.8.2-1] [MQTT-4.8.2-2]."""
    with pytest.raises(InvalidFilterError):
        sessions.open("a").subscribe(text)


def test_filters_are_taken_apart() -> None:
    """A shared filter is parsed into its name and the filter after it, empty levels included."""
    assert ("g", "/t/+") == (parse_shared("$share/g//t/+").name, parse_shared("$share/g//t/+").topic_filter.text)
    assert ["$sharex/g/t", "t"] == [read_filter("$sharex/g/t").text, read_filter("$share/g/t").text]
    assert [True, True, False] == [is_shared("$share"), is_shared("$share/g/t"), is_shared("$shared/g/t")]


def test_no_local_is_refused(sessions: Sessions) -> None:
    """No Local with a shared subscription is a protocol error [MQTT-3.8.3-4]."""
    session = sessions.open("a")
    with pytest.raises(InvalidArgumentError, match="no_local"):
        session.subscribe(TEXT, no_local=True)
    assert [] == list(sessions.groups)


# --- assignment ---


@pytest.mark.parametrize("members", [1, 2, 3, 5, 64, 65])
def test_shares_are_even_and_few_slices_move(members: int) -> None:
    """Partitions are assigned evenly: the members' numbers differ by at most one, and a new member takes few."""
    owners: list[int | None] = [None] * PARTITIONS
    for count in range(1, members + 1):
        total = dict.fromkeys(range(count), 0)
        found = moves(owners, total, total)
        held = Counter(owner for owner in owners if owner is not None)
        assert (PARTITIONS if count == 1 else PARTITIONS // count) == len(found) or sum(held.values()) < PARTITIONS
        for number, owner in found:
            owners[number] = owner
        shares = Counter(owners)
        assert {PARTITIONS // count, -(-PARTITIONS // count)} >= {shares[member] for member in range(count)}


def test_the_first_member_sets_the_start(sessions: Sessions, db: ts.Database) -> None:
    """The first member's start sets the group's position; members that join later continue from that position."""
    db.store([ts.Message("t/0", b"old")])
    sessions.open("a", expiry_interval=None).subscribe(TEXT, start="beginning")
    assert [b"old"] == everything(drain(sessions))
    sessions.open("b", expiry_interval=None).subscribe(TEXT, start="beginning")
    assert {} == drain(sessions)


def test_a_group_ends_with_its_last_member(sessions: Sessions, db: ts.Database) -> None:
    """A group ends with its last member: no record of it remains, and messages are not stored for it."""
    member(sessions, "a").unsubscribe(TEXT)
    member(sessions, "b", expiry_interval=0).disconnect()
    assert [] == list(sessions.groups)
    assert [] == [key for shard in range(2) for key, _ in db.state(shard).scan(OWN + b"g")]
    assert 0 == db.publish([ts.Message("t/1", b"")]).stored


def test_options_are_those_of_the_member(sessions: Sessions, spread: Callable[..., list[bytes]]) -> None:
    """A member receives messages with its own subscription options, at the lower QoS of subscription and message.

    A member at QoS 0 also receives messages from the store.
    """
    for client, qos in (("a", 0), ("b", 2)):
        sessions.open(client, expiry_interval=None).subscribe(TEXT, qos, subscription_identifier=qos + 5)
    spread(50, qos=2, retain=True)
    items = {session.client_id: items for session, items in sessions.deliver()}
    seen = {(item.qos, item.retain, item.subscription_identifiers) for item in items["a"]}  # type: ignore[union-attr]
    assert {(0, False, (5,))} == seen
    seen = {(item.qos, item.retain, item.subscription_identifiers) for item in items["b"]}  # type: ignore[union-attr]
    assert {(2, False, (7,))} == seen
    assert not sessions.connected("b").subscribe(TEXT, 1).created  # type: ignore[union-attr]
    spread(50, qos=2)
    assert {1} == {item.qos for s, some in sessions.deliver() if s.client_id == "b" for item in some}  # type: ignore[union-attr]


def test_no_retained_messages_are_sent(sessions: Sessions, spread: Callable[..., list[bytes]]) -> None:
    """A new shared subscription gets no retained messages (MQTT 5, section 4.8.2)."""
    spread(3, retain=True)
    member(sessions, "a")
    assert {} == drain(sessions)


def test_a_message_wakes_only_the_member_it_is_for(sessions: Sessions, spread: Callable[..., list[bytes]]) -> None:
    """A message wakes only the member that it is assigned to; the other members have nothing to commit."""
    for client in "abcd":
        member(sessions, client)
    drain(sessions)
    sessions.checkpoint()
    for _ in range(20):
        payloads = spread(1)
        out = sessions.deliver()
        assert [payloads] == [[item.message.payload for item in items] for _, items in out]  # type: ignore[union-attr]
        out[0][0].puback(1)
    assert {0} == {lag.messages for lags in sessions.lag().values() for lag in lags.values()}


# --- members that are slow, away, or gone ---


def test_a_slow_member_s_slices_go_to_others(
    sessions: Sessions, clock: Clock, spread: Callable[..., list[bytes]]
) -> None:
    """A member whose window is full for `slow_after` seconds loses its partitions until it acknowledges messages."""
    sessions.groups.slow_after = 5
    slow = member(sessions, "a", receive_maximum=10)
    member(sessions, "b")
    payloads = spread(200)
    first = {s.client_id: [item.packet_id for item in items] for s, items in sessions.deliver()}
    clock.now += 5 * SECOND - 1
    sessions.tick()
    assert {} == {c: some for c, some in drain(sessions).items() if c == "a"}
    clock.now += 1
    sessions.tick()
    assert [True, False] == [m.slow for m in next(iter(sessions.groups)).members]
    rest = drain(sessions)
    assert ["b"] == list(rest)
    assert len(payloads) == 10 + len(rest["b"]) + len(first["b"])
    slow.puback(*first["a"])
    sessions.tick()
    assert [(32, 32), (32, 32)] == [m.slices for m in next(iter(sessions.groups)).members]


@pytest.mark.parametrize("qos", [0, 1])
def test_a_returned_message_has_the_qos_of_its_new_member(
    sessions: Sessions, spread: Callable[..., list[bytes]], qos: int
) -> None:
    """A returned message is delivered with the QoS of its new member."""
    gone = member(sessions, "a", expiry_interval=0)
    spread(10, qos=2)
    gone.deliver()
    member(sessions, "b", qos)
    gone.disconnect()
    items = [item for _, some in sessions.deliver() for item in some]
    assert [qos] * 10 == [item.qos for item in items]  # type: ignore[union-attr]


def test_who_stays_away_keeps_only_qos_2(sessions: Sessions, clock: Clock, spread: Callable[..., list[bytes]]) -> None:
    """After `handover_after` seconds, QoS 1 messages of an absent member go to others, and QoS 2 messages stay."""
    sessions.groups.handover_after = 30
    lost = member(sessions, "a", 2)
    payloads = spread(10)
    exactly = spread(10, qos=2)
    lost.deliver()
    member(sessions, "b", 2)
    lost.lost()
    clock.now += 30 * SECOND - 1
    sessions.tick()
    assert {} == drain(sessions)
    clock.now += 1
    sessions.tick()
    assert {"b": sorted(payloads)} == {client: sorted(some) for client, some in drain(sessions).items()}
    back = sessions.open("a", expiry_interval=None)
    assert sorted(exactly) == sorted(item.message.payload for item in back.deliver())  # type: ignore[union-attr]


def test_what_comes_back_is_delivered_once_though_the_group_is_saved_during_a_commit(
    sessions: Sessions, crash: Callable[[], Sessions], spread: Callable[..., list[bytes]]
) -> None:
    """Returned messages are delivered once although the group is saved during a member's commit.

    After a crash, messages that were being sent to a member still belong to this member.
    """
    member(sessions, "a")
    spread(20)
    drain(sessions, acknowledge=False)
    one = member(sessions, "b")
    other = member(sessions, "c")
    sessions.expire("a")
    sent = one.deliver(3)
    one.puback(*[item.packet_id for item in sent])
    write, saved = ShardWriter.submit, list[bool]()

    def saving(self: ShardWriter, given: PendingWrite) -> PendingWrite:
        pending = write(self, given)
        if not saved:
            saved.append(True)
            begin(lambda: other.unsubscribe(TEXT)).result(PATIENCE)
        return pending

    with patch.object(ShardWriter, "submit", saving):
        sent += one.deliver(4)
    assert [True] == saved
    after = member(crash(), "b")
    while rest := after.deliver():
        sent += [item for item in rest if isinstance(item, Publish) and not item.dup]
    found = [item.message.payload for item in sent if isinstance(item, Publish)]
    assert len(found) > 7
    assert sorted(set(found)) == sorted(found)


# --- permissions of members ---


def even(messages: Sequence[ts.Message]) -> list[bool]:
    return [int(message.payload) % 2 == 0 for message in messages]


def odd(messages: Sequence[ts.Message]) -> list[bool]:
    return [int(message.payload) % 2 == 1 for message in messages]


def settle(sessions: Sessions) -> dict[str, list[bytes]]:
    """Return the payloads that are delivered to each client until no session is ready."""
    got: dict[str, list[bytes]] = {}
    while sessions.wait(0):
        for client, some in drain(sessions).items():
            got.setdefault(client, []).extend(some)
    return got


@pytest.mark.parametrize("qos", [0, 1, 2])
def test_what_one_member_may_not_have_goes_to_another(
    sessions: Sessions, spread: Callable[..., list[bytes]], qos: int
) -> None:
    """A message that one member may not receive goes to another member that may, exactly once."""
    member(sessions, "even", qos, allow=even)
    member(sessions, "all", qos)
    member(sessions, "odd", qos, allow=odd)
    for count in (20, 1, 1, 300):
        sent = spread(count, qos)
        got = settle(sessions)
        assert sorted(sent) == everything(got)
        assert even([ts.Message("t", one, "p") for one in got.get("even", ())]).count(False) == 0
        assert odd([ts.Message("t", one, "p") for one in got.get("odd", ())]).count(False) == 0
    assert [0] == [group.returned for group in sessions.groups]


@pytest.mark.parametrize("crashes", [False, True])
def test_what_no_member_may_have_stays_in_the_group(
    sessions: Sessions, spread: Callable[..., list[bytes]], crash: Callable[[], Sessions], crashes: bool
) -> None:
    """A message that no member may receive stays in the group, even after a crash.

    The message goes to a later member that may receive it, or to a member whose rights change.
    """
    one = member(sessions, "one", allow=even)
    sent = [*spread(20), *spread(1), *spread(1), *spread(20)]
    assert everything(settle(sessions)) == sorted(p for p in sent if int(p) % 2 == 0)
    assert [21] == [group.returned for group in sessions.groups]
    if crashes:
        sessions.checkpoint()
        sessions = crash()
        one = sessions.open("one", expiry_interval=None, allow=even)
        assert {} == settle(sessions)
    few = member(sessions, "few", allow=lambda messages: [int(message.payload) in (1, 3) for message in messages])
    assert [b"1", b"3"] == everything(settle(sessions))
    few.unsubscribe(TEXT)
    one.restrict(None)
    left = [p for p in sent if int(p) % 2 and p not in (b"1", b"3")]
    assert everything(settle(sessions)) == sorted(left)
    assert [0] == [group.returned for group in sessions.groups]


# --- interruptions ---


class Stopping:
    """An engine that fails after a number of writes, until the number is raised."""

    def __init__(self, engine: Any) -> None:
        self._engine = engine
        self.left = 1 << 60

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def write(self, *arguments: Any, **options: Any) -> Any:
        self.left -= 1
        if self.left < 0:
            raise ts.StorageFullError("no room")
        return self._engine.write(*arguments, **options)


def join(sessions: Sessions) -> None:
    member(sessions, "c")


def leave(sessions: Sessions) -> None:
    sessions.connected("a").unsubscribe(TEXT)  # type: ignore[union-attr]


def lose(sessions: Sessions) -> None:
    sessions.connected("a").lost()  # type: ignore[union-attr]


def expire(sessions: Sessions) -> None:
    sessions.expire("a")


def replace(sessions: Sessions) -> None:
    sessions.open("a", clean_start=True)


def deliver(sessions: Sessions) -> None:
    sessions.deliver()


def restrict(sessions: Sessions) -> None:
    for client, allow in (("a", even), ("b", odd)):
        sessions.connected(client).restrict(allow)  # type: ignore[union-attr]
    drain(sessions, acknowledge=False)
    sessions.connected("a").restrict(odd)  # type: ignore[union-attr]
    drain(sessions, acknowledge=False)


@pytest.mark.parametrize("what", [join, leave, lose, expire, replace, deliver, restrict])
def test_nothing_is_lost_whichever_write_fails(tmp_path: Path, what: Callable[[Sessions], None]) -> None:
    """Whichever write fails, the next process finds all messages, except those whose acknowledgement was committed."""
    for writes in range(60):
        path, clock = tmp_path / str(writes), Clock()
        db = ts.open(path, clock=clock, auto_compact=False)
        db.storage.shards[0].writer.engine = engine = Stopping(db.storage.shards[0].writer.engine)
        for client in "ab":
            member(db.sessions, client, receive_maximum=20)
        payloads = [b"%d" % number for number in range(100)]
        db.publish([ts.Message(f"t/{p.decode()}", p, "p", 1) for p in payloads])
        done = []
        for session, items in db.sessions.deliver():
            session.puback(*[item.packet_id for item in items[::2]])
            done += [item.message.payload for item in items[::2]]  # type: ignore[union-attr]
        db.sessions.checkpoint()
        engine.left = writes
        with contextlib.suppress(ts.StorageFullError, ts.ShardReadOnlyError):
            what(db.sessions)
        finished = engine.left > 0
        engine.left = 0
        db.close()
        with ts.open(path, clock=clock) as db:
            got = []
            for _ in range(4):  # absent members return their messages to the group
                clock.now += 100 * SECOND
                db.sessions.tick()
                if db.sessions.connected("b") is None:
                    db.sessions.open("b", expiry_interval=None)
                got += everything(drain(db.sessions))
            if db.sessions.connected("a") is None:
                db.sessions.open("a")  # a client that unsubscribed keeps its messages in flight
            got += everything(drain(db.sessions))
            assert sorted(set(payloads) - set(done)) == sorted(got)
            assert [0] == [group.returned for group in db.sessions.groups]
        if finished:
            return
    pytest.fail("there are more writes than were tried")


CHILD = """
import topicstore as ts
path, number = arguments
counts(RocksdbEngine, "write")
db = ts.open(path, shards=2)
sessions = db.sessions
for client in "abc":
    sessions.open(client, expiry_interval=None, receive_maximum=50).subscribe("$share/g/t/#", 1)
for turn in count():
    db.publish([ts.Message(f"t/{n % 50}", b"%d" % n, f"p{n % 3}", 1) for n in range(number, number + 20)])
    say("stored", *range(number, number + 20))
    number += 20
    for session, items in sessions.deliver(30):
        say("got", *(int(item.message.payload) for item in items))
        session.puback(*[item.packet_id for item in items[::2]])
    if turn % 7 == 3:
        sessions.expire("abc"[turn % 3])
        sessions.open("abc"[turn % 3], expiry_interval=None, receive_maximum=50).subscribe("$share/g/t/#", 1)
    if turn % 5 == 2:
        sessions.checkpoint()
"""


@pytest.mark.parametrize("moment", ["before", "after"])
def test_killed_processes_lose_nothing(
    tmp_path: Path, run_until: Callable[..., list[tuple[Any, ...]]], moment: str
) -> None:
    """A SIGKILL before or after any write loses no stored message."""
    numbers: dict[str, set[int]] = {"stored": set(), "got": set()}
    for write in (25, 46, 87, 18):
        for what, *found in run_until((write, moment), CHILD, tmp_path / "db", write * 1_000_000):
            numbers[what].update(found)
    clock = Clock(now=4_000_000_000_000_000)
    with ts.open(tmp_path / "db", clock=clock) as db:
        sessions = db.sessions
        for client in "abc":
            sessions.open(client, expiry_interval=None)
        numbers["got"].update(map(int, everything(drain(sessions))))
    assert len(numbers["stored"]) > 100
    assert numbers["stored"] <= numbers["got"]


def test_messages_of_qos_0_are_not_kept_for_members_that_are_away(
    sessions: Sessions, spread: Callable[..., list[bytes]], db: ts.Database
) -> None:
    """With ``store_qos0`` off, QoS 0 messages reach a shared subscription only while a member is connected."""
    sessions.store_qos0 = False
    one, two = member(sessions, "one"), member(sessions, "two")
    sent = spread(10, 0)
    assert sorted(sent) == everything(drain(sessions))
    one.lost()
    sent = spread(10, 0)
    assert sorted(sent) == everything(drain(sessions))
    two.lost()
    before = len(list(db.replay("#")))
    spread(10, 0)
    assert len(list(db.replay("#"))) == before
    sent = spread(5, 1)
    sessions.open("one", expiry_interval=None)
    sent += spread(5, 0)
    assert sorted(sent) == everything(drain(sessions))
