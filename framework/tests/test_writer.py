"""The buffered writer: order, flushes by time and by number, and reporting of every failure."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future

import pytest
import topicstore as ts
from topicstore import Message, MessageId
from topicstore_conformance.faults.clock import START
from topicstore_conformance.faults.threads import PATIENCE, together, wait_until
from topicstore_conformance.oracle.checks import replayed

NEVER = 3_600.0
"""A flush interval longer than any test, in seconds."""


@pytest.fixture
def db() -> Iterator[ts.Database]:
    """A database of one shard, with positions from the messages' own times."""
    with ts.open("memory", backend="memory", timestamps="message", clock=lambda: START) as opened:
        yield opened


def payloads(db: ts.Database) -> list[bytes]:
    return [message.payload for message in db.replay("#")]


def fail(db: ts.Database, error: BaseException | None) -> None:
    """Make every write of the only shard raise this error; with None, make writes work again."""
    writer = db.storage.shards[0].writer
    if error is None:
        del writer.prepare_locked  # type: ignore[method-assign]
        return

    def prepare(_: object) -> None:
        raise error

    writer.prepare_locked = prepare  # type: ignore[method-assign]


def test_the_order_of_puts(db: ts.Database) -> None:
    """Every message gets its id, and each thread's messages are stored in their order."""
    with db.writer(max_items=9) as writer:

        def put(number: int) -> list[Future[MessageId]]:
            return [writer.put(Message(f"t/{number}", b"%d" % n, f"c{number}")) for n in range(100)]

        for number, futures in enumerate(together(*(lambda n=n: put(n) for n in range(4)))):
            ids = [future.result(PATIENCE) for future in futures]
            assert sorted(set(ids)) == ids
            assert [(id_, b"%d" % n) for n, id_ in enumerate(ids)] == [
                (id_, message.payload) for id_, message in replayed(db, f"t/{number}")
            ]


def test_a_flush_by_time(db: ts.Database) -> None:
    """A message alone in the buffer is stored after the interval, without any further call."""
    with db.writer(max_items=1_000, flush_interval=0.02) as writer:
        for number in range(3):
            id_ = writer.put(Message("a", b"%d" % number)).result(PATIENCE)
            assert id_ == replayed(db)[-1][0]


def test_nothing_is_stored_early(db: ts.Database) -> None:
    """Before its flush interval ends, a writer stores messages only on `flush` and when its buffer is full."""
    with db.writer(max_items=3, flush_interval=NEVER) as writer:
        first = writer.put(Message("a", b"1"))
        with pytest.raises(TimeoutError):
            first.result(0.05)
        assert [] == payloads(db)
        writer.flush()
        assert first.done()
        rest = [writer.put(Message("a", b"%d" % number)) for number in (2, 3, 4)]
        assert all(future.done() for future in rest)
        assert [b"1", b"2", b"3", b"4"] == payloads(db)


@pytest.mark.parametrize("whole", [False, True], ids=["writer", "database"])
def test_closing_stores_what_is_buffered(db: ts.Database, whole: bool) -> None:
    """Closing a writer, or its database, stores the buffered messages first; later puts are refused."""
    stored: list[list[bytes]] = []
    writer = db.writer(flush_interval=NEVER)
    future = writer.put(Message("a", b"1"))
    future.add_done_callback(lambda _: stored.append(payloads(db)))
    if whole:
        db.close()
    writer.close()
    writer.close()
    assert (0, [[b"1"]]) == (future.result(0).shard, stored)
    with pytest.raises(ts.DatabaseClosedError):
        writer.put(Message("a", b"2"))


def test_cancelled_futures(db: ts.Database) -> None:
    """A put that is cancelled before it is stored isn't stored; afterwards it can't be cancelled."""
    writer = db.writer(flush_interval=NEVER)
    futures = [writer.put(Message("a", b"%d" % number)) for number in range(4)]
    assert [True, True] == [futures[1].cancel(), futures[2].cancel()]
    writer.close()
    assert not futures[0].cancel()
    assert [b"0", b"3"] == payloads(db)
    assert [False, True, True, False] == [future.cancelled() for future in futures]


@pytest.mark.parametrize(("items", "interval"), [(0, 1), (1.5, 1), (1, 0), (1, float("nan")), (1, float("inf"))])
def test_bad_arguments(db: ts.Database, items: int, interval: float) -> None:
    """Arguments with which a writer would never flush, or would flush all the time, are refused."""
    with pytest.raises(ts.InvalidArgumentError):
        db.writer(max_items=items, flush_interval=interval)


# --- callbacks ---


def test_a_callback_may_put_flush_and_close(db: ts.Database) -> None:
    """Callbacks of futures run without the writer's locks, so they may put, flush and close."""
    writer = db.writer(max_items=2, flush_interval=NEVER)
    first = writer.put(Message("a", b"1"))
    first.add_done_callback(lambda _: (writer.put(Message("a", b"3")), writer.flush(), writer.close()))
    writer.put(Message("a", b"2"))
    assert [b"1", b"2", b"3"] == payloads(db)


def test_a_callback_that_ends_its_thread_keeps_no_other_future_waiting(db: ts.Database) -> None:
    """An error in a callback doesn't prevent the futures of other messages from completing."""

    def end(_: object) -> None:
        raise SystemExit

    with db.writer(flush_interval=NEVER) as writer:
        futures = [writer.put(Message("a", b"%d" % number)) for number in range(3)]
        futures[0].add_done_callback(end)
        with pytest.raises(SystemExit):
            writer.flush()
        assert [0, 0, 0] == [future.result(0).shard for future in futures]


# --- failures ---


def test_a_bad_message_fails_alone(db: ts.Database) -> None:
    """An invalid message is refused by `put`, or in its future if only the store detects it; others are stored."""
    writer = db.writer(flush_interval=NEVER)
    with pytest.raises(ts.InvalidMessageError) as refused:
        writer.put(Message("a/#", b""))
    assert refused.value.index is None
    futures = [writer.put(Message("a", b"%d" % n, timestamp=START - late)) for n, late in enumerate([0, 1, 0])]
    with pytest.raises(ExceptionGroup, match="messages that were not stored: 1"):
        writer.flush()
    futures.append(writer.put(Message("a", b"3", timestamp=START)))
    writer.close()
    assert [None, ts.LateMessageError, None, None] == [
        type(error) if (error := future.exception(0)) else None for future in futures
    ]
    assert [b"0", b"2", b"3"] == payloads(db)


@pytest.mark.parametrize("how", ["block", "flush", "close", "database", "put"])
@pytest.mark.parametrize("who", ["caller", "thread"])
def test_an_unobserved_failure_is_raised(db: ts.Database, how: str, who: str) -> None:
    """A failure that the caller hasn't seen is raised once, with the number of lost messages, by any later call."""
    writer = db.writer(max_items=5, flush_interval=NEVER if who == "caller" else 0.001)
    fail(db, ts.StorageFullError("no room"))
    futures = [writer.put(Message("a", b"%d" % n)) for n in range(5 if who == "caller" else 1)]
    if who == "thread" or how == "put":
        wait_until(lambda: all(future.done() for future in futures), "the messages to fail")
    ends = {
        "block": lambda: writer.__exit__(None, None, None),
        "flush": writer.flush,
        "close": writer.close,
        "database": db.close,
        "put": lambda: writer.put(Message("a", b"")),
    }
    with pytest.raises(ExceptionGroup, match=f"not stored: {len(futures)}") as raised:
        ends[how]()
    assert raised.group_contains(ts.StorageFullError)
    writer.close()  # a second close must not raise


def test_an_observed_failure_is_not_raised_again(db: ts.Database) -> None:
    """A failure is not raised again if the caller asked a future for its result, or gave it a callback."""
    told: list[object] = []
    fail(db, ts.StorageFullError("no room"))
    with db.writer(max_items=3, flush_interval=NEVER) as writer:
        futures = [writer.put(Message("a", b"%d" % n)) for n in range(2)]
        futures[0].add_done_callback(told.append)
        futures.append(writer.put(Message("a", b"2")))
        with pytest.raises(ts.StorageFullError):
            futures[1].result()
        assert isinstance(futures[2].exception(), ts.StorageFullError)
    assert told == [futures[0]]


def test_what_ends_the_block_is_raised_as_it_is(db: ts.Database) -> None:
    """The error that ends the writer's block is raised unchanged, with a note about messages that weren't stored."""
    fail(db, ts.StorageFullError("no room"))

    def use() -> None:
        with db.writer(flush_interval=NEVER) as writer:
            writer.put(Message("a", b""))
            raise KeyError("something else")

    with pytest.raises(KeyError) as raised:
        use()
    assert "StorageFullError: no room" in raised.value.__notes__[0]


def test_an_error_in_a_writers_thread_does_not_end_it(db: ts.Database) -> None:
    """An error of any kind fails only the messages that are being stored, and the writer's thread continues."""
    writer = db.writer(flush_interval=0.001)
    fail(db, SystemExit())
    lost = writer.put(Message("a", b"1"))
    assert isinstance(lost.exception(PATIENCE), InterruptedError)
    fail(db, None)
    assert writer.put(Message("a", b"2")).result(PATIENCE).shard == 0
    writer.close()
