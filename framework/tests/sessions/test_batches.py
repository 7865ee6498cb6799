"""Calls for many sessions: one result for each row, one commit for each shard, and refused rows delay no other row."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import msgspec
import pytest
import topicstore as ts
from topicstore.pubsub import retained_lookup
from topicstore.sessions import (
    Connect,
    Ended,
    PublishedRows,
    PubRel,
    Session,
    SessionEndedError,
    Sessions,
    SessionTakenOverError,
    SubscribeOptions,
    SubscribeResult,
    Will,
)
from topicstore.shard.state import FrameworkWrite
from topicstore_conformance.faults.clock import START, Clock

SECOND = 1_000_000
CLIENTS = [f"client-{number}" for number in range(8)]


def message(client_id: str, payload: str, qos: int = 2, topic: str = "a/b") -> ts.Message:
    return ts.Message(topic, payload.encode(), client_id, qos)


def stored(db: ts.Database) -> set[str]:
    return {found.payload.decode() for found in db.replay("#")}


def opened(sessions: Sessions, *clients: str) -> list[Session]:
    found = sessions.open_many([Connect(client_id=client, expiry_interval=None) for client in clients or CLIENTS])
    return [session for session in found if isinstance(session, Session)]


@contextmanager
def counted_writes(db: ts.Database) -> Iterator[list[int]]:
    """Count the engine's writes within a ``with`` block."""
    engine = type(db.storage.shards[0].writer.engine)
    write, counted = engine.write, [0]

    def count(*args: object, **kwargs: object) -> None:
        counted[0] += 1
        write(*args, **kwargs)  # type: ignore[arg-type]

    with patch.object(engine, "write", count):
        yield counted


Publishing = Callable[..., PublishedRows]


def published_as_columns(
    sessions: Sessions, rows: Sequence[tuple[Session, ts.Message, int]], *, partial: bool = False
) -> PublishedRows:
    messages = [message for _, message, _ in rows]
    columns = ([getattr(message, name) for message in messages] for name in ts.Message.__struct_fields__)
    ids = [packet_id for _, _, packet_id in rows]
    return sessions.publish_batch([session for session, _, _ in rows], ts.MessageBatch(*columns), ids, partial=partial)


@pytest.fixture(params=[Sessions.publish, published_as_columns], ids=["objects", "columns"])
def publish(request: pytest.FixtureRequest) -> Publishing:
    """Return the call that publishes rows, given as objects or as columns."""
    chosen: Publishing = request.param
    return chosen


@pytest.fixture
def listener(sessions: Sessions) -> Session:
    """Open a session that stores all messages below ``a/``."""
    session = sessions.open("listener", expiry_interval=None)
    session.subscribe("a/#", 2)
    return session


# --- publishing ---


@pytest.mark.usefixtures("listener")
def test_messages_of_many_sessions_are_one_write_a_shard(
    db: ts.Database, sessions: Sessions, publish: Publishing
) -> None:
    """Publishing for many sessions takes one write for each shard, which includes the packet ids.

    The same rows count as repetitions until their packet ids are released, which also takes one write for each shard.
    """
    clients = opened(sessions)
    rows = [(client, message(client.client_id, client.client_id), 7) for client in clients]
    with counted_writes(db) as writes:
        found = publish(sessions, rows)
    assert [2] == writes
    assert (8, 8, [True] * 8) == (found.result.count, found.result.stored, found.matched)
    assert (frozenset(), {}) == (found.repeated, found.refused)
    again = publish(sessions, rows)
    assert (0, frozenset(range(8)), [True] * 8) == (again.result.count, again.repeated, again.matched)
    with counted_writes(db) as writes:
        assert [True] * 8 == sessions.pubrel([(client, 7) for client in clients]).known
    assert [2] == writes
    assert [False] * 8 == sessions.pubrel([(client, 7) for client in clients]).known
    assert 8 == publish(sessions, rows).result.count


@pytest.mark.usefixtures("listener")
def test_each_row_tells_whether_somebody_wants_it(db: ts.Database, sessions: Sessions, publish: Publishing) -> None:
    """Each row reports whether its topic matches a subscription of a stored or connected session or of the database."""
    sessions["listener"]
    away = sessions.open("away", expiry_interval=None)
    away.subscribe("b/+", 1)
    away.lost()
    sessions.open("zero").subscribe("c", 0)
    (client,) = opened(sessions, "client")
    with db.subscribe("d"):
        topics = ["a", "b/x", "c", "d", "e", "b/x/y"]
        rows = [(client, message("client", topic, qos, topic), 0) for topic in topics for qos in (0, 1)]
        found = publish(sessions, rows)
    assert [topic in ("a", "b/x", "c", "d") for topic in topics for _ in (0, 1)] == found.matched


@pytest.mark.usefixtures("listener")
def test_only_the_rows_that_cannot_be_done_are_refused(
    db: ts.Database, sessions: Sessions, publish: Publishing
) -> None:
    """With ``partial``, each row that can't be published is refused with an error that has the row's index.

    The other rows are all stored, in order. Without ``partial`` the call raises and stores nothing.
    """
    one, two, gone = opened(sessions, "one", "two", "gone")
    gone.lost()
    rows = [
        (one, message("one", "0"), 1),
        (one, message("one", "bad topic", topic="a/#"), 2),
        (two, message("one", "other client"), 1),
        (gone, message("gone", "ended"), 1),
        (one, message("one", "0"), 1),
        (two, message("two", "bad id"), 65_536),
        (two, message("two", "bad qos", qos=3), 0),
        (one, message("one", "retried"), 2),
        (two, message("two", "8", qos=1), 0),
        (two, msgspec.structs.replace(message("two", ""), payload=8), 0),
    ]
    for _ in range(2):
        with pytest.raises(ts.TopicstoreError):
            publish(sessions, rows)
        assert set() == stored(db)
    found = publish(sessions, rows, partial=True)
    assert [1, 2, 3, 5, 6, 9] == sorted(found.refused)
    assert isinstance(found.refused[3], SessionEndedError)
    for row in (1, 2, 5, 6, 9):
        error = found.refused[row]
        assert isinstance(error, ts.InvalidMessageError)
        assert row == error.index
    assert {4} == found.repeated
    assert [row not in found.refused for row in range(10)] == found.matched
    assert {"0", "retried", "8"} == stored(db)
    assert ["0", "retried"] == [m.payload.decode() for m in db.replay("#") if m.client_id == "one"]
    assert [True, True, False] == sessions.pubrel([(one, 1), (one, 2), (two, 1)]).known


@pytest.mark.usefixtures("listener")
def test_without_partial_the_index_is_the_callers(db: ts.Database, sessions: Sessions) -> None:
    """Without ``partial``, the error's index is that of the caller's row, so skipped repetitions are counted, too.

    The same index is reported by a call for one session and by a call for many.
    """
    (one,) = opened(sessions, "one")
    one.publish([message("one", "1")], [1])
    batch = [message("one", "1"), message("one", "2"), message("one", "2"), message("one", "x", topic="+")]
    for publish in (
        lambda: one.publish(batch, [1, 2, 2, 3]),
        lambda: sessions.publish([(one, m, i) for m, i in zip(batch, [1, 2, 2, 3], strict=True)]),
        lambda: published_as_columns(sessions, [(one, m, i) for m, i in zip(batch, [1, 2, 2, 3], strict=True)]),
    ):
        with pytest.raises(ts.InvalidMessageError) as refused:
            publish()
        assert 3 == refused.value.index
        assert "message 3" in str(refused.value)
    assert {"1"} == stored(db)
    assert 2 == one.publish([batch[1], message("one", "3")], [2, 3]).count


@pytest.mark.parametrize("wrong", [None, "a/b", 7, b"a/b"])
def test_what_is_no_message_is_refused(sessions: Sessions, wrong: object) -> None:
    """A row that isn't a message is refused; with ``partial`` the other rows are published."""
    (one,) = opened(sessions, "one")
    rows: list[Any] = [(one, message("one", "1"), 1), (one, wrong, 2)]
    with pytest.raises(ts.InvalidMessageError, match=r"message 1 of the batch: a .* is not a Message"):
        sessions.publish(rows)
    with pytest.raises(ts.InvalidMessageError, match="is not a Message"):
        one.publish([wrong])  # type: ignore[list-item]
    assert [1] == list(sessions.publish(rows, partial=True).refused)


def test_columns_have_a_value_for_each_row(sessions: Sessions) -> None:
    """The call raises if columns aren't as long as the lists of sessions and packet ids.

    In this case nothing is published, even with ``partial``.
    """
    (one,) = opened(sessions, "one")
    columns: list[list[Any]] = [["a"], [b""], ["one"], [1], [False], [None], [None]]
    for given in ([one], [1, 1]), ([one, one], [1]), ([], []):
        with pytest.raises(ts.InvalidArgumentError, match=r"1 messages, . sessions, . packet ids"):
            sessions.publish_batch(given[0], ts.MessageBatch(*columns), given[1], partial=True)  # type: ignore[arg-type]
    with pytest.raises(ts.InvalidMessageError):
        sessions.publish_batch([one], ts.MessageBatch(*columns[:-1], []), [1], partial=True)
    assert 1 == sessions.publish_batch([one], ts.MessageBatch(*columns), [0]).result.count


@pytest.mark.usefixtures("listener")
def test_a_session_that_was_overtaken_is_found_and_ended(
    db: ts.Database, sessions: Sessions, crash: Callable[[], Sessions]
) -> None:
    """If some sessions were taken over, only their rows are refused, although each shard commits all rows together."""
    notified: list[tuple[str, Ended]] = []
    clients = sessions.open_many(
        [Connect(client_id=client, expiry_interval=None) for client in CLIENTS],
        on_end=lambda session, why: notified.append((session.client_id, why)),
    )
    crash().open_many([Connect(client_id=CLIENTS[row], expiry_interval=None) for row in (2, 5)])
    rows = [(c, message(c.client_id, c.client_id), 3) for c in clients if isinstance(c, Session)]
    found = sessions.publish(rows, partial=True)
    assert [2, 5] == sorted(found.refused)
    assert all(isinstance(error, SessionTakenOverError) for error in found.refused.values())
    assert set(CLIENTS) - {CLIENTS[2], CLIENTS[5]} == stored(db)
    assert {(CLIENTS[2], Ended.TAKEN_OVER), (CLIENTS[5], Ended.TAKEN_OVER)} == set(notified)
    freed = sessions.pubrel([(session, 3) for session, _, _ in rows], partial=True)
    assert [row not in (2, 5) for row in range(8)] == freed.known
    assert [2, 5] == sorted(freed.refused)


@pytest.mark.usefixtures("listener")
def test_a_shard_that_fails_takes_nothing_from_the_others(db: ts.Database, sessions: Sessions) -> None:
    """If one shard fails, the rows that other shards committed stay stored; sent again, they count as repetitions."""
    clients = sorted(opened(sessions), key=lambda session: db.shard_of(session.client_id))
    rows = [(client, message(client.client_id, client.client_id), 7) for client in clients]
    first = [row for row in rows if db.shard_of(row[0].client_id) == 0]
    assert 0 < len(first) < len(rows)
    engine = type(db.storage.shards[1].writer.engine)
    write = engine.write

    def fail(self: object, *args: object, **kwargs: object) -> None:
        if self is db.storage.shards[1].writer.engine:
            raise ts.EngineError("no more")
        write(self, *args, **kwargs)  # type: ignore[arg-type]

    with patch.object(engine, "write", fail), pytest.raises(ts.EngineError):
        sessions.publish(rows, partial=True)
    assert {client.client_id for client, _, _ in first} == stored(db)
    again = sessions.publish(first)
    assert (0, frozenset(range(len(first)))) == (again.result.count, again.repeated)
    assert len(first) == len(list(db.replay("#")))
    assert all(sessions.pubrel([(client, 7) for client, _, _ in first]).known)


def test_rows_are_of_sessions_of_this_database(sessions: Sessions, crash: Callable[[], Sessions]) -> None:
    """Rows with sessions of another database, or with other objects, are refused even with ``partial``."""
    stranger = crash().open("stranger")
    for one in (stranger, "client", None):
        for call in (
            lambda one: sessions.publish([(one, message("stranger", "1"), 1)], partial=True),
            lambda one: sessions.pubrel([(one, 1)], partial=True),
            lambda one: sessions.lost([one], partial=True),
            lambda one: sessions.subscribe([(one, "a", SubscribeOptions())], partial=True),
        ):
            with pytest.raises(ts.InvalidArgumentError, match="not a session"):
                call(one)


def test_nothing_at_all_may_be_asked(sessions: Sessions) -> None:
    """Every call for many sessions accepts an empty list, because a server may have no requests."""
    assert 0 == sessions.publish([]).result.count
    assert [] == sessions.pubrel([]).known == sessions.pubrec([]).known
    assert [] == sessions.open_many([]) == sessions.subscribe([]) == sessions.lost([]) == sessions.disconnect([])


# --- acknowledging ---


def test_pubrecs_of_many_sessions_tell_which_ids_are_known(db: ts.Database, sessions: Sessions) -> None:
    """`pubrec` for many sessions reports which packet ids are known.

    The next delivery commits them and sends the PUBRELs.
    """
    clients = opened(sessions)
    sessions.subscribe([(client, "a/#", SubscribeOptions(2)) for client in clients])
    db.publish([message("publisher", "1")])
    assert 8 == len(sessions.deliver())
    clients[3].lost()
    found = sessions.pubrec([(client, packet_id) for client in clients for packet_id in (1, 9)], partial=True)
    assert [packet_id == 1 and row != 3 for row in range(8) for packet_id in (1, 9)] == found.known
    assert [6, 7] == sorted(found.refused)
    assert [[PubRel(1)]] * 7 == [items for _, items in sessions.deliver()]
    with pytest.raises(SessionEndedError):
        sessions.pubrec([(clients[0], 1), (clients[3], 1)])
    with pytest.raises(ts.InvalidArgumentError, match="row 1"):
        sessions.pubrec([(clients[0], 1), (clients[1], "1")])  # type: ignore[list-item]


@pytest.mark.usefixtures("listener")
@pytest.mark.parametrize("wrong", [True, 1.0, "1", None, [1]])
def test_a_pubrel_of_what_is_no_packet_id_frees_nothing(sessions: Sessions, wrong: Any) -> None:
    """A PUBREL whose packet id isn't an integer releases nothing, even if the value equals an id in use.

    With ``partial``, the packet ids of the other rows are released.
    """
    one, two = opened(sessions, "one", "two")
    rows = [(one, message("one", "1"), 1), (two, message("two", "1"), 1)]
    sessions.publish(rows)
    found = sessions.pubrel([(one, wrong), (two, 1)], partial=True)
    assert [False, True] == found.known
    assert isinstance(found.refused[0], ts.InvalidArgumentError)
    assert [0] == list(found.refused)
    assert {0} == sessions.publish(rows).repeated
    with pytest.raises(ts.InvalidArgumentError, match="row 0"):
        sessions.pubrel([(one, wrong)])


# --- subscribing ---


def test_many_filters_are_one_write_a_shard(db: ts.Database, sessions: Sessions) -> None:
    """Subscriptions of one or many sessions take one write for each shard.

    One bad filter makes the whole call raise; with ``partial`` only the bad row is refused.
    """
    one, two = opened(sessions, "one", "two")
    rows = [(session, f"f/{number}", SubscribeOptions(1)) for session in (one, two) for number in range(50)]
    for bad in ((one, "a/#/b", SubscribeOptions()), (two, "a", SubscribeOptions(3))):
        with pytest.raises(ts.InvalidArgumentError):
            sessions.subscribe([*rows, bad])
    shared = (two, "$share/g/a", SubscribeOptions(1, no_local=True))
    with pytest.raises(ts.InvalidArgumentError, match="no_local"):
        sessions.subscribe([*rows, shared])
    assert [(), ()] == [sessions[client].subscriptions for client in ("one", "two")]
    assert not sessions.wants("f/1")
    with counted_writes(db) as writes:
        found = sessions.subscribe([rows[0], (one, "", SubscribeOptions()), *rows[1:], shared], partial=True)
    assert writes[0] <= 2
    assert [SubscribeResult(created=True)] * 100 == [found[0], *found[2:-1]]
    assert isinstance(found[1], ts.InvalidFilterError)
    assert isinstance(found[-1], ts.InvalidArgumentError)
    assert [50, 50] == [len(sessions[client].subscriptions) for client in ("one", "two")]
    db.publish([message("publisher", "1", 1, f"f/{number}") for number in range(50)])
    assert [50, 50] == [len(items) for _, items in sessions.deliver()]


@pytest.mark.parametrize("retained", ["", "a/3", "b"])
def test_retained_messages_are_looked_for_by_filter_only_if_there_are_some(
    db: ts.Database, sessions: Sessions, retained: str
) -> None:
    """A call with many filters looks up retained messages for each filter only if the database has some.

    The retained messages then arrive at the sessions whose filters match.
    """
    clients = opened(sessions)
    if retained:
        db.publish([msgspec.structs.replace(message("publisher", "kept", 1, retained), retain=True)])
    rows = [(client, f"a/{number}", SubscribeOptions(1)) for number, client in enumerate(clients)]
    with patch.object(retained_lookup, "retained_page", wraps=retained_lookup.retained_page) as looked:
        sessions.subscribe(rows)
    assert looked.call_count == (len(rows) if retained else 0)
    found = {session.client_id: [item.message.topic for item in items] for session, items in sessions.deliver()}  # type: ignore[union-attr]
    assert found == ({"client-3": ["a/3"]} if retained == "a/3" else {})


def test_shared_retained_and_replayed_subscriptions_come_together(db: ts.Database, sessions: Sessions) -> None:
    """One call can create shared subscriptions, subscriptions with retained messages, and replays.

    Each subscription delivers its own messages.
    """
    db.publish([ts.Message("r/1", b"kept", "publisher", 1, True), message("publisher", "old", 1, "r/1")])
    db.store([message("publisher", "stored", 1, "s")])
    one, two = opened(sessions, "one", "two")
    rows = [(s, text, SubscribeOptions(1)) for s in (one, two) for text in ("$share/g/x", "r/#", "s")]
    assert all(isinstance(result, SubscribeResult) for result in sessions.subscribe(rows, start=0))
    found = {s.client_id: sorted(item.message.payload for item in items) for s, items in sessions.deliver()}  # type: ignore[union-attr]
    assert {"one": [b"kept", b"stored"], "two": [b"kept", b"stored"]} == found
    db.publish([message("publisher", str(number), 1, "x") for number in range(20)])
    assert 20 == sum(len(items) for _, items in sessions.deliver())
    assert {"one", "two"} == {member.client_id for group in sessions.groups for member in group.members}


def test_a_subscription_that_cannot_be_committed_is_none(sessions: Sessions, crash: Callable[[], Sessions]) -> None:
    """With ``partial``, only the subscriptions of a session that was taken over are refused."""
    one, two = opened(sessions, "one", "two")
    one.subscribe("known", 1)
    crash().open("one", expiry_interval=None)
    rows = [(s, text, SubscribeOptions(2)) for s in (one, two) for text in ("known", "new", "$share/g/f")]
    found = sessions.subscribe(rows, partial=True)
    assert [SessionTakenOverError] * 3 + [SubscribeResult] * 3 == list(map(type, found))
    assert 1 == len(sessions["one"].subscriptions)
    assert ["two"] == [member.client_id for group in sessions.groups for member in group.members]


# --- opening and ending ---


def test_many_open_and_are_lost_in_one_write_a_shard(db: ts.Database, sessions: Sessions, clock: Clock) -> None:
    """Opening many sessions takes one write for each shard, and so does ending their connections without a DISCONNECT.

    Sessions opened again are present, with their subscriptions. The wills of lost clients become pending.
    """
    will = Will(ts.Message("a/will", b"gone"), delay=5)
    connects = [
        Connect(client_id=client, expiry_interval=60, will=will if row % 2 else None)
        for row, client in enumerate(CLIENTS)
    ]
    for present in (False, True):
        with counted_writes(db) as writes:
            found = sessions.open_many(connects)
        assert [2] == writes
        clients = [session for session in found if isinstance(session, Session)]
        assert [(client, present) for client in CLIENTS] == [(one.client_id, one.present) for one in clients]
        if not present:
            sessions.subscribe([(one, "a/b", SubscribeOptions(1)) for one in clients])
        with counted_writes(db) as writes:
            assert [None] * 8 == sessions.lost(clients)
        assert [2] == writes
        assert [False] * 8 == [sessions[client].connected for client in CLIENTS]
        assert [row % 2 == 1 for row in range(8)] == [sessions[one].will_due is not None for one in CLIENTS]
    db.publish([message("publisher", "1", 1)])
    clock.now += 5 * SECOND
    sessions.tick()
    assert [True] * 8 == [one.present for one in sessions.open_many(connects) if isinstance(one, Session)]
    assert 8 == len(sessions.deliver())


def test_those_that_are_present_are_taken_over_together(db: ts.Database, sessions: Sessions) -> None:
    """Opening many present sessions takes all of them over, after their acknowledgements are committed.

    If a client id occurs twice in the call, the later row takes over the session of the earlier row.
    """
    notified: list[tuple[str, Ended]] = []
    connects = [Connect(client_id=client, expiry_interval=None) for client in CLIENTS]
    first = sessions.open_many(connects, on_end=lambda session, why: notified.append((session.client_id, why)))
    older = [session for session in first if isinstance(session, Session)]
    sessions.subscribe([(session, "a/b", SubscribeOptions(1)) for session in older])
    db.publish([message("publisher", "1", 1)])
    assert 8 == len(sessions.deliver())
    for session in older[:4]:
        session.puback(1)
    newer = sessions.open_many([*connects, connects[0]])
    assert [(client, Ended.TAKEN_OVER) for client in CLIENTS] == notified
    assert all(session.ended is Ended.TAKEN_OVER for session in older)
    for act in (older[0].deliver, older[0].checkpoint, older[0].lost, lambda: older[0].puback(1)):
        with pytest.raises(SessionTakenOverError):
            act()
    assert isinstance(newer[0], Session)
    assert newer[0].ended is Ended.TAKEN_OVER
    assert sessions.connected(CLIENTS[0]) is newer[8]
    assert set(CLIENTS[4:]) == {session.client_id for session, _ in sessions.deliver()}


def test_one_that_cannot_be_opened_holds_up_no_others(sessions: Sessions) -> None:
    """With ``partial``, all sessions are opened except those that fail; without ``partial`` none is opened."""
    will = Will(ts.Message("+", b""))
    bad = [
        Connect(client_id=""),
        Connect(client_id="x", receive_maximum=0),
        Connect(client_id="y", will=will),
        Connect(client_id="z", expiry_interval=-1),
    ]
    connects = [Connect(client_id="one"), *bad, Connect(client_id="two")]
    with pytest.raises(ts.InvalidArgumentError):
        sessions.open_many(connects)
    assert 0 == len(sessions)
    found = sessions.open_many(connects, partial=True)
    assert [False] + [True] * 4 + [False] == [isinstance(result, ts.InvalidArgumentError) for result in found]
    assert ["one", "two"] == [info.client_id for info in sessions]
    assert isinstance(sessions.open_many([None], partial=True)[0], ts.InvalidArgumentError)  # type: ignore[list-item]


def test_a_damaged_one_holds_up_no_others(db: ts.Database, sessions: Sessions) -> None:
    """With ``partial``, a damaged session raises its own error and the other sessions are opened."""
    sessions.lost(opened(sessions))
    shard = db.shard_of(CLIENTS[2])
    db.state(shard).write([FrameworkWrite(b"\1sr" + CLIENTS[2].encode(), b"damaged")])
    found = sessions.open_many([Connect(client_id=client, expiry_interval=None) for client in CLIENTS], partial=True)
    assert [row == 2 for row in range(8)] == [isinstance(result, ts.CorruptionError) for result in found]
    assert [row != 2 for row in range(8)] == [isinstance(result, Session) and result.present for result in found]
    with pytest.raises(ts.CorruptionError):
        sessions.open_many([Connect(client_id=client, expiry_interval=None) for client in CLIENTS])
    assert all(isinstance(one, Session) and one.ended is Ended.TAKEN_OVER for one in found[:2])
    assert sessions.connected(CLIENTS[0]) is None


def test_many_disconnect_by_the_same_rules(db: ts.Database, sessions: Sessions) -> None:
    """With ``partial``, only a DISCONNECT that raises the expiry interval from 0 is refused (MQTT 5, 3.14.2.2.2).

    The row of a session that had already ended reports `SessionEndedError`.
    """
    will = Will(ts.Message("a/will", b"gone", properties=ts.Properties(user_properties=(("topicstore-persist", "1"),))))
    found = sessions.open_many(
        [Connect(client_id=client, expiry_interval=row and 60, will=will) for row, client in enumerate(CLIENTS)]
    )
    clients = [session for session in found if isinstance(session, Session)]
    clients[7].lost()
    assert {"gone"} == stored(db)
    results = sessions.disconnect(clients, expiry_interval=30, partial=True)
    assert [ts.InvalidArgumentError, *[type(None)] * 6, SessionEndedError] == list(map(type, results))
    assert clients[0].ended is None
    assert [START + 30 * SECOND] * 6 == [sessions[client].expires for client in CLIENTS[1:7]]
    assert 1 == len(list(db.replay("#")))
    with pytest.raises(SessionEndedError):
        sessions.lost([clients[0], clients[1]])
    assert clients[0].ended is Ended.LOST
    assert CLIENTS[0] not in sessions


def test_an_overtaken_one_ends_without_a_commit(sessions: Sessions, crash: Callable[[], Sessions]) -> None:
    """A session that was taken over elsewhere ends without a commit, and the ends of other sessions are committed."""
    clients = opened(sessions)
    newer = crash().open(CLIENTS[1], expiry_interval=None)
    results = sessions.lost(clients, partial=True)
    assert [row == 1 for row in range(8)] == [isinstance(result, SessionTakenOverError) for result in results]
    assert newer.ended is None
    assert [client == CLIENTS[1] for client in CLIENTS] == [sessions[client].connected for client in CLIENTS]
