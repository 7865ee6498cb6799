"""Sessions that are kept in memory: `Sessions.open` with ``in_memory``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import topicstore as ts
from topicstore.sessions import Connect, Publish, PubRel, Session, SessionEndedError, Sessions, SubscribeOptions, Will
from topicstore.shard.writer import ShardWriter

Publishing = Callable[..., None]

KINDS = (b"\1s", b"\1i", b"\1t", b"\1g")
"""The first bytes of the keys of sessions and shared subscriptions."""


def opened(sessions: Sessions, client_id: str = "client", **how: Any) -> Session:
    return sessions.open(client_id, clean_start=True, in_memory=True, **how)


def stored(db: ts.Database) -> list[bytes]:
    """Return the keys of all stored records of sessions and shared subscriptions."""
    states = [db.state(shard) for shard in range(len(db.storage.shards))]
    return [key for state in states for kind in KINDS for key, _ in state.scan(kind)]


def _fails(*_: object) -> None:
    raise ts.StorageFullError("no space is left")


def received(packets: list[Publish | PubRel]) -> list[tuple[str, int, int]]:
    return [(one.message.payload.decode(), one.qos, one.packet_id) for one in packets if isinstance(one, Publish)]


def test_nothing_is_ever_written_for_them(db: ts.Database, sessions: Sessions, publish: Publishing) -> None:
    """A session in memory writes no session records, in either direction and at any QoS."""
    db.publish([ts.Message("a/kept", b"kept", "publisher", 1, retain=True)])
    session = opened(sessions, receive_maximum=3)
    session.subscribe("a/#", 2)
    sessions.subscribe([(session, "b", SubscribeOptions(1)), (session, "c", SubscribeOptions(0))])
    assert [("kept", 1, 1)] == received(session.deliver())
    session.puback(1)
    publish("1", "2", qos=2)
    publish("3", qos=1)
    assert [("1", 2, 2), ("2", 2, 3), ("3", 1, 4)] == received(session.deliver())
    session.puback(4)
    session.pubrec(2, 3)
    assert [PubRel(2), PubRel(3)] == session.deliver()
    session.pubcomp(2)
    session.publish([ts.Message("x", b"in", "client", 2)], packet_ids=[7])
    sessions.checkpoint()
    sessions.tick()
    session.unsubscribe("b")
    assert [] == stored(db)
    session.pubrel(7)
    session.disconnect()
    sessions.tick()
    assert [] == stored(db)


def test_their_messages_are_stored(db: ts.Database, sessions: Sessions, publish: Publishing) -> None:
    """Messages for a session in memory are stored until it ends, so that a slow client doesn't fill memory."""
    session = opened(sessions, receive_maximum=1)
    session.subscribe("a/#", 1)
    publish(*map(str, range(5)))
    assert 5 == db.info().messages
    for number in range(5):
        assert [(str(number), 1, number + 1)] == received(session.deliver())
        session.puback(number + 1)
    session.lost()
    publish("nobody wants this")
    assert 5 == db.info().messages


@pytest.mark.parametrize("first", ["subscribe", "publish"])
def test_their_filters_count_whenever_filters_are_loaded(sessions: Sessions, publish: Publishing, first: str) -> None:
    """Filters of a session in memory apply until its end, whenever the filters of stored sessions are first loaded."""
    if first == "publish":
        publish("nobody wants this")
    session = opened(sessions)
    session.subscribe("a/#", 1)
    session.subscribe("b", 0)
    assert sessions.wants("a/b")
    assert not sessions.wants("b")
    session.subscribe("b", 1)
    assert sessions.wants("b")
    session.unsubscribe("b")
    assert not sessions.wants("b")
    opened(sessions).subscribe("c", 1)
    assert not sessions.wants("a/b")
    assert sessions.wants("c")


def test_what_is_refused_to_them(sessions: Sessions) -> None:
    """A session in memory is refused options that would let it outlive its connection."""
    will = Will(ts.Message("a", b"", "client", 1))
    for how in ({"clean_start": False}, {"expiry_interval": 10}, {"expiry_interval": None}, {"will": will}):
        asked: dict[str, Any] = {"clean_start": True, "in_memory": True, **how}
        with pytest.raises(ts.InvalidArgumentError, match="ends with its connection"):
            sessions.open("client", **asked)
    session = opened(sessions)
    with pytest.raises(ts.InvalidArgumentError, match="expiry interval of 0"):
        session.disconnect(expiry_interval=10)
    session.disconnect(expiry_interval=0)
    assert "client" not in sessions


def test_one_is_described_like_others(sessions: Sessions, publish: Publishing) -> None:
    """A session in memory is listed, counted and described like a stored session, with its current state and lag."""
    sessions.open("a stored one", expiry_interval=None)
    session = opened(sessions)
    session.subscribe("a/#", 1)
    publish("1", "2", "3")
    session.deliver(2)
    session.publish([ts.Message("x", b"in", "client", 2)], packet_ids=[7])
    assert ["a stored one", "client"] == [info.client_id for info in sessions]
    assert 2 == len(sessions)
    info = sessions["client"]
    assert info.in_memory
    assert not sessions["a stored one"].in_memory
    assert (("a/#", SubscribeOptions(1)),) == info.subscriptions
    assert (True, 0.0, None, 2, 1) == (
        info.connected,
        info.expiry_interval,
        info.expires,
        info.in_flight,
        info.awaiting_pubrel,
    )
    assert 1 == session.lag()["a/#"].messages == sessions.lag()["client"]["a/#"].messages


@pytest.mark.parametrize("how", ["disconnect", "lost", "kick", "expire", "keep-alive", "taken over", "many"])
def test_nothing_is_left_of_one_that_ends(db: ts.Database, sessions: Sessions, how: str, request: Any) -> None:
    """A session in memory leaves no record and no filter behind, whichever way it ends."""
    session = opened(sessions, keep_alive=10)
    session.subscribe("a/#", 1)
    if how == "kick":
        assert sessions.kick("client")
    elif how == "expire":
        sessions.expire("client")
    elif how == "keep-alive":
        request.getfixturevalue("clock").now += 16_000_000
        sessions.tick()
    elif how == "taken over":
        assert not sessions.open("client", expiry_interval=None).present
    elif how == "many":
        sessions.lost([session])
    else:
        getattr(session, how)()
    assert session.ended is not None
    assert not sessions.wants("a/b")
    assert ("client" in sessions) is (how == "taken over")
    with pytest.raises(SessionEndedError):
        session.deliver()
    if how != "taken over":
        assert [] == stored(db)


def test_many_are_opened_among_stored_ones(db: ts.Database, sessions: Sessions, publish: Publishing) -> None:
    """One call can open both sessions in memory and stored sessions, and returns them in the order of the rows."""
    kinds = [bool(number % 2) for number in range(10)]
    connects = [
        Connect(client_id=f"client-{number}", clean_start=True, in_memory=kind) for number, kind in enumerate(kinds)
    ]
    found = [session for session in sessions.open_many(connects) if isinstance(session, Session)]
    assert [connect.client_id for connect in connects] == [session.client_id for session in found]
    assert kinds == [sessions[session.client_id].in_memory for session in found]
    sessions.subscribe([(session, "a/b", SubscribeOptions(1)) for session in found])
    publish("1")
    assert 10 == sum(len(packets) for _, packets in sessions.deliver())
    assert all(session.puback(1) for session in found)
    sessions.disconnect(found)
    sessions.tick()
    assert [] == stored(db)


def test_a_shared_subscription_makes_it_a_stored_one(
    sessions: Sessions, publish: Publishing, crash: Callable[[], Sessions]
) -> None:
    """A shared subscription turns a session in memory into a stored session, with all of its state.

    So another member can receive its unacknowledged messages, even after a crash.
    """
    session = opened(sessions)
    session.subscribe("b", 2)
    publish("1", topic="b", qos=2)
    publish("2", topic="b", qos=1)
    assert [("1", 2, 1), ("2", 1, 2)] == received(session.deliver())
    session.pubrec(1)
    session.publish([ts.Message("x", b"in", "client", 2)], packet_ids=[7])
    results = sessions.subscribe(
        [(session, "late", SubscribeOptions(1)), (session, "$share/g/a/#", SubscribeOptions(1))]
    )
    assert [True, True] == [result.created for result in results if not isinstance(result, ts.TopicstoreError)]
    info = sessions["client"]
    assert (False, 2, 1) == (info.in_memory, info.in_flight, info.awaiting_pubrel)
    assert ["b", "late", "$share/g/a/#"] == [text for text, _ in info.subscriptions]
    publish("3")
    assert [("3", 1, 3)] == received(session.deliver())
    after = crash()
    after.tick()
    assert "client" not in after
    other = after.open("other", expiry_interval=None)
    other.subscribe("$share/g/a/#", 1)
    after.tick()
    assert [["client"], ["other"]] != [[member.client_id for member in group.members] for group in after.groups]


def test_it_ends_with_its_connection_once_it_is_stored(
    db: ts.Database, sessions: Sessions, publish: Publishing
) -> None:
    """A session that became stored by a shared subscription still ends with its connection.

    Its messages in flight go to another member.
    """
    session = opened(sessions)
    session.subscribe("$share/g/a/#", 1)
    other = sessions.open("other", expiry_interval=None)
    publish("1")
    assert [("1", 1, 1)] == received(session.deliver())
    other.subscribe("$share/g/a/#", 1)
    session.disconnect()
    sessions.tick()
    assert [("1", 1, 1)] == received(other.deliver())
    assert not [key for key in stored(db) if b"client" in key]


@pytest.mark.parametrize("partial", [False, True])
def test_it_stays_in_memory_if_it_can_not_be_stored(
    sessions: Sessions, publish: Publishing, monkeypatch: pytest.MonkeyPatch, partial: bool
) -> None:
    """If storing fails, the shared subscription is refused and the session stays in memory; a later attempt works."""
    session = opened(sessions)
    with monkeypatch.context() as full:
        full.setattr(ShardWriter, "submit", _fails)
        rows = [(session, "b", SubscribeOptions(1)), (session, "$share/g/a/#", SubscribeOptions(1))]
        if partial:
            made, refused = sessions.subscribe(rows, partial=True)
            assert isinstance(refused, ts.StorageFullError)
            assert not isinstance(made, ts.TopicstoreError)
        else:
            with pytest.raises(ts.StorageFullError):
                sessions.subscribe(rows)
    assert sessions["client"].in_memory
    assert partial is sessions.wants("b")
    session.subscribe("$share/g/a/#", 1)
    assert not sessions["client"].in_memory
    publish("1")
    assert [("1", 1, 1)] == received(session.deliver())


def test_a_commit_that_fails_concerns_stored_sessions_only(
    sessions: Sessions, publish: Publishing, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A failing commit delays only stored sessions; sessions in memory are delivered their messages without delay."""
    session, other = opened(sessions), sessions.open("other", expiry_interval=None)
    for one in (session, other):
        one.subscribe("a/#", 1)
    publish("1")
    with monkeypatch.context() as full:
        full.setattr(ShardWriter, "submit", _fails)
        assert [("client", [("1", 1, 1)])] == [
            (one.client_id, received(packets)) for one, packets in sessions.deliver()
        ]
    sessions.tick()
    assert [("other", [("1", 1, 1)])] == [(one.client_id, received(packets)) for one, packets in sessions.deliver()]
