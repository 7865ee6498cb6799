"""Messages that clients publish through their sessions: QoS 2 messages are stored exactly once."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from unittest.mock import patch

import pytest
import topicstore as ts
from topicstore.sessions import Sessions, SessionTakenOverError
from topicstore.shard.writer import PendingWrite, ShardWriter
from topicstore_conformance.database.intercepting_engines import Turnstile, replace_engine
from topicstore_conformance.faults.threads import PATIENCE, begin, wait_until


def message(payload: str, qos: int = 2, client_id: str = "client") -> ts.Message:
    return ts.Message("a/b", payload.encode(), client_id, qos)


def stored(db: ts.Database) -> list[str]:
    return [found.payload.decode() for found in db.replay("#")]


def test_what_nobody_wants_stored_is_known_all_the_same(db: ts.Database, sessions: Sessions) -> None:
    """A QoS 2 message that isn't stored still commits its packet id, and is routed only once."""
    zero = sessions.open("zero")
    zero.subscribe("#", 0)
    client = sessions.open("client", expiry_interval=None)
    client.publish([message("1")], [7])
    client.publish([message("1")], [7])
    assert [] == stored(db)
    assert 1 == len(zero.deliver())
    assert 1 == sessions["client"].awaiting_pubrel


@pytest.mark.parametrize(
    ("messages", "ids"),
    [([message("1", client_id="other")], [1]), ([message("1")], [1, 2]), ([message("1")], [65_536])],
)
def test_what_makes_no_sense_is_refused(
    db: ts.Database, sessions: Sessions, messages: list[ts.Message], ids: list[int]
) -> None:
    """A message of another client, or packet ids that are invalid, are refused, and nothing is stored."""
    client = sessions.open("client")
    with pytest.raises(ts.InvalidArgumentError):
        client.publish(messages, ids)
    assert [] == stored(db)
    assert 0 == sessions["client"].awaiting_pubrel


@pytest.mark.parametrize("call", ["deliver", "subscribe"])
def test_an_owner_that_another_call_finds_overtaken_during_a_commit(
    db: ts.Database, sessions: Sessions, crash: Callable[[], Sessions], call: str
) -> None:
    """If a concurrent call finds the session taken over during a commit, the committing call raises.

    The ended session isn't ready, and none of its filters remains.
    """
    client = sessions.open("client", expiry_interval=None)
    client.subscribe("a/#", 2)
    db.publish([message("1", client_id="publisher")])
    client.pubrec(*[packet.packet_id for packet in client.deliver()])
    write, found = ShardWriter.submit, list[BaseException | None]()

    def overtaken(self: ShardWriter, given: PendingWrite) -> PendingWrite:
        pending = write(self, given)
        if not found:
            found.append(None)
            crash().open("client", expiry_interval=None)
            found[0] = begin(lambda: client.publish([message("2")], [1])).exception(PATIENCE)
        return pending

    with patch.object(ShardWriter, "submit", overtaken), pytest.raises(SessionTakenOverError):
        client.deliver() if call == "deliver" else client.subscribe("b/#", 2)
    assert [SessionTakenOverError] == [type(failure) for failure in found]
    assert not sessions.wait(0)
    assert not sessions._dispatcher._listeners


@pytest.fixture(params=["memory", pytest.param("rocksdb", marks=pytest.mark.slow)])
def slow_disk(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[ts.Database, Turnstile]]:
    """Return a database whose flushes wait, and the turnstile that lets flushes through."""
    with ts.open(tmp_path / "slow", backend=request.param, durability="sync", auto_compact=False) as db:
        db.sessions.open("listener", expiry_interval=None).subscribe("#", 2)
        engine = db.storage.shards[0].writer.open_engine()
        turnstile = Turnstile(engine)
        yield db, turnstile
        turnstile.let_through(100)
        replace_engine(db, engine)


def test_publishes_and_pubrels_in_threads_share_flushes(slow_disk: tuple[ts.Database, Turnstile]) -> None:
    """Concurrent PUBLISH and PUBREL calls share flushes, for one session and for several.

    The first call is flushed alone; all other calls take at most two more flushes.
    """
    db, turnstile = slow_disk
    sessions = [db.sessions.open(f"client-{number % 8}", expiry_interval=None) for number in range(8)] * 2
    ids = range(1, 17)
    publishes = [
        partial(session.publish, [message("1", client_id=session.client_id)], [packet_id])
        for session, packet_id in zip(sessions, ids, strict=True)
    ]
    pubrels = [partial(session.pubrel, packet_id) for session, packet_id in zip(sessions, ids, strict=True)]
    log, engine = db.storage.shards[0].writer, turnstile._engine
    for calls in (publishes, pubrels):
        turnstile, written = Turnstile(engine), log.tail.writes
        replace_engine(db, turnstile)
        running = [begin(call) for call in calls]
        wait_until(lambda written=written: log.tail.writes == written + 16, "all to be written")  # type: ignore[misc]
        assert 1 == turnstile.begun
        turnstile.let_through(100)
        for call in running:
            call.result(PATIENCE)
        assert turnstile.begun <= 3
    assert len(stored(db)) == 16


def test_a_repetition_waits_for_the_message_that_it_repeats(slow_disk: tuple[ts.Database, Turnstile]) -> None:
    """A repeated QoS 2 message is acknowledged only after its first copy is committed, and isn't stored twice."""
    db, turnstile = slow_disk
    client = db.sessions.open("client", expiry_interval=None)
    replace_engine(db, turnstile)
    first = begin(partial(client.publish, [message("1")], [7]))
    wait_until(lambda: turnstile.begun, "a flush")
    again = begin(partial(client.publish, [message("1")], [7]))
    wait_until(lambda: db.sessions._locks._waiting, "the repetition to wait")
    assert not again.done()
    turnstile.let_through(100)
    assert [1, 0] == [call.result(PATIENCE).count for call in (first, again)]
    assert ["1"] == stored(db)


def test_a_slow_commit_holds_up_calls_for_the_same_session_only(slow_disk: tuple[ts.Database, Turnstile]) -> None:
    """A slow commit blocks only calls for the same session; others commit, and deliveries skip that session."""
    db, turnstile = slow_disk
    one, two = (db.sessions.open(name, expiry_interval=None) for name in ("one", "two"))
    two.subscribe("b", 1)
    db.publish([ts.Message("b", b"", "publisher", 1)])
    replace_engine(db, turnstile)
    log = db.storage.shards[0].writer
    written = log.tail.writes
    first = begin(partial(one.subscribe, "a", 1))
    wait_until(lambda: log.tail.writes == written + 1, "the first commit")
    same = begin(partial(one.subscribe, "c", 1))
    wait_until(lambda: db.sessions._locks._waiting, "a call for the same session to wait")
    other = begin(partial(two.deliver))
    wait_until(lambda: log.tail.writes == written + 2, "the other session's commit")
    turnstile.let_through(100)
    assert first.result(PATIENCE).created
    assert same.result(PATIENCE).created
    assert 1 == len(other.result(PATIENCE))
