"""`Database.subscribe`: a subscription receives stored messages, then new messages, each exactly once."""

from __future__ import annotations

import asyncio
import collections
import itertools
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import topicstore as ts
from topicstore.pubsub.notifier import Notifier, ThreadWaiter
from topicstore.pubsub.subscription import Subscription, _Inbox
from topicstore.runtime.locks import owned
from topicstore_conformance.faults.threads import PATIENCE, begin, running, together, wait_until

LAYOUTS = ["reference", "block", "skipstream", "wildcard_optimized"]
EPOCHS = {"wildcard_optimized": {"wildcard_optimized": {"epoch_bits": 14}}}
"""Epochs of 16 milliseconds, so that tests don't wait for a second."""


@pytest.fixture(params=LAYOUTS)
def layout(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def db(layout: str, tmp_path: Path) -> Iterator[ts.Database]:
    with ts.open(tmp_path / "db", layout=layout, shards=2, options=EPOCHS.get(layout)) as database:
        yield database


@pytest.fixture
def plain(tmp_path: Path) -> Iterator[ts.Database]:
    with ts.open(tmp_path / "db") as database:
        yield database


def numbered(first: int, count: int, clients: int = 3) -> list[ts.Message]:
    return [ts.Message(f"a/{n % 7}", str(n).encode(), f"c{n % clients}") for n in range(first, first + count)]


def take(subscription: Subscription, count: int, limit: int | None = None) -> list[int]:
    """Fetch until this many messages have arrived, and acknowledge each batch."""
    taken: list[int] = []
    while len(taken) < count:
        batch = subscription.fetch(limit, timeout=PATIENCE)
        assert batch.messages, f"only {len(taken)} of {count} came"
        taken += [int(message.payload) for message in batch.messages]
        subscription.acknowledge(batch.sequence)
    return taken


def blocked(notifier: Notifier) -> int:
    """Return the number of threads that are waiting for a notification by this notifier."""
    return sum(one._notifier is notifier for one in running(ThreadWaiter.wait))


def waiting(subscription: Subscription, work: Callable[[], object]) -> Future[Any]:
    """Call a function in a thread; return its future once the thread waits for the subscription."""
    before, future = blocked(subscription._inbox.notifier), begin(work)
    wait_until(lambda: blocked(subscription._inbox.notifier) > before, "a thread to wait for the subscription")
    return future


def reads(db: ts.Database) -> int:
    return sum(shard.counters.reads for shard in db.info().shards)


# --- delivery ---------------------------------------------------------------------------


def test_catches_up_then_follows_beside_writers(db: ts.Database) -> None:
    """A subscription that reads while a writer stores receives each message once, in each publisher's order."""
    db.store(numbered(0, 3_000))
    with db.subscribe("a/+", 0, window=500) as subscription:
        writing = begin(lambda: [db.store(numbered(3_000 + 5 * n, 5)) for n in range(200)])
        taken = take(subscription, 4_000)
        writing.result(PATIENCE)
        assert sorted(taken) == list(range(4_000))
        for client in range(3):
            mine = [n for n in taken if n % 3 == client]
            assert mine == sorted(mine)
        assert not subscription.fetch(timeout=0).messages


@pytest.mark.parametrize("durability", ["commit", "sync"])
def test_from_now_on(tmp_path: Path, durability: str) -> None:
    """Without a start, a subscription receives everything that is stored after the call."""
    with ts.open(tmp_path / "db", durability=durability, shards=2) as db:
        db.store(numbered(0, 10))
        with db.subscribe("a/+") as subscription:
            db.store(numbered(10, 10))
            assert sorted(take(subscription, 10)) == list(range(10, 20))


def test_from_a_time(db: ts.Database) -> None:
    """A subscription with a start time receives all messages from this time on, inclusive, as a replay does."""
    db.store(numbered(0, 10))
    batch = db.store(numbered(10, 10)).batch
    start = min(int(position) for position in batch.positions) >> 11
    expected = sorted(int(message.payload) for message in db.replay("#", start))
    with db.subscribe("#", start) as subscription:
        assert sorted(take(subscription, len(expected))) == expected


def test_new_topics_and_generations_come(db: ts.Database) -> None:
    """A subscription also receives messages of streams, generations and layouts that are created later, in order."""
    with db.subscribe("#") as subscription:
        for number in range(40):
            if number in (10, 30):
                db.add_generation()
            if number == 20:
                db.add_generation("block")
            db.store([ts.Message(f"new/{number}/x", str(number).encode(), "one")])
        assert take(subscription, 40) == list(range(40))


# --- back-pressure -----------------------------------------------------------------------


def test_the_window_holds_back_what_is_stored_nowhere(plain: ts.Database) -> None:
    """A full window holds back unstored messages, too: `fetch` returns an empty batch until an acknowledgement."""
    with plain.subscribe("#", window=1) as subscription:
        plain.publish([ts.Message("a", b"1", "c"), ts.Message("a", b"2", "c")])
        first = subscription.fetch(timeout=PATIENCE)
        assert [b"1"] == [message.payload for message in first.messages]
        for nothing in (subscription.fetch(timeout=0), asyncio.run(subscription.fetch_async(timeout=0))):
            assert (0, True) == (len(nothing), nothing.stuck)
        subscription.acknowledge(1)
        assert [b"2"] == [message.payload for message in subscription.fetch(timeout=PATIENCE).messages]


def test_acknowledging_wakes_a_waiting_thread(plain: ts.Database) -> None:
    """An acknowledgement wakes a thread that waits for room in the window."""
    plain.store(numbered(0, 20))
    with plain.subscribe("#", 0, window=10) as subscription:
        subscription.fetch()
        fetching = waiting(subscription, subscription.fetch)
        subscription.acknowledge(10)
        assert len(fetching.result(PATIENCE)) == 10


@pytest.mark.parametrize("sequence", [-1, 11, "3", True])
def test_what_was_not_delivered_cannot_be_acknowledged(plain: ts.Database, sequence: int) -> None:
    """Acknowledging a number that wasn't delivered raises and changes nothing."""
    plain.store(numbered(0, 10))
    with plain.subscribe("#", 0, window=10) as subscription:
        subscription.fetch()
        with pytest.raises(ts.InvalidArgumentError):
            subscription.acknowledge(sequence)
        assert subscription.status().unacknowledged == 10


# --- places, and cost of reading ---------------------------------------------------------


def test_a_place_of_another_database_is_refused(tmp_path: Path) -> None:
    """Subscriptions and sessions refuse a place of another database, as an object and as text.

    A database that was deleted and created again is another database. If its messages were older than the place, none
    would ever be delivered.
    """
    stored = [[ts.Message("a", b"", "c", timestamp=day * 86_400_000_000) for _ in range(10)] for day in (30, 0)]
    places: list[ts.Place] = []
    for messages in stored:
        with ts.open(tmp_path / f"db{len(places)}", timestamps="message", allow_ancient=True) as db:
            db.store(messages)
            with db.subscribe("a", 0) as subscription:
                subscription.fetch()
                places.append(subscription.place)
    with ts.open(tmp_path / "db1", allow_ancient=True) as db:
        session = db.sessions.open("client")
        for begin_at in (db.subscribe, lambda text, start: session.subscribe(text, start=start)):
            for start in (places[0], dict(places[0]), ts.Place.parse(str(places[0]))):
                with pytest.raises(ts.WrongDatabaseError):
                    begin_at("a", start)
        for start in (str(places[0]), f"0:{places[0][0]}"):
            with pytest.raises(ts.WrongDatabaseError):
                session.subscribe("a", start=start)
        session.subscribe("a", 1, start=str(places[1]))
        db.store([ts.Message("a", b"new", "c", timestamp=86_400_000_000)])
        assert [b"new"] == [item.message.payload for item in session.deliver()]  # type: ignore[union-attr]
        with db.subscribe("a", dict(places[1])) as subscription:
            assert [b"new"] == [message.payload for message in subscription.fetch().messages]


def test_a_place_or_cursor_in_what_was_lost_is_refused(layout: str, tmp_path: Path) -> None:
    """A place or cursor after the end of a database that was restored from a copy is refused.

    The copy has the same id, so only its end shows the loss. Subscriptions, sessions and cursors that begin there would
    silently skip later messages. A place at the end of the copy is accepted.
    """
    with ts.open(tmp_path / "db", layout=layout, timestamps="message", allow_ancient=True) as db:
        db.store([ts.Message("a", b"1", "c", timestamp=1_000_000)])
        db.checkpoint(tmp_path / "copy")
        with db.subscribe("a", 0) as subscription:
            subscription.fetch()
            end = subscription.place
        db.store([ts.Message("a", b"lost", "c", timestamp=9_000_000_000)])
        with db.subscribe("a", end) as subscription:
            assert [b"lost"] == [message.payload for message in subscription.fetch().messages]
            place = subscription.place
        read = db.read(db.cursor(db.streams("a")[0], "a"))
        assert [b"1", b"lost"] == [message.payload for message in read.batch.to_messages()]
    with ts.open(tmp_path / "copy", allow_ancient=True) as db:
        session = db.sessions.open("client")
        refused: list[Callable[[], object]] = [
            lambda: db.subscribe("a", place),
            lambda: session.subscribe("a", start=place),
            lambda: session.subscribe("a", start=str(place)),
            lambda: db.read(read.cursor),
        ]
        for _ in range(2):
            for call in refused:
                with pytest.raises(ts.PlaceAheadError, match="older copy"):
                    call()
            db.store([ts.Message("a", b"new", "c", timestamp=5_000_000)])
        with db.subscribe("a", end) as subscription:
            assert [b"new", b"new"] == [message.payload for message in subscription.fetch().messages]


def test_a_start_in_the_future_is_from_now_on(tmp_path: Path) -> None:
    """A start in the future acts as no start, and the resulting place can be used as a start again.

    With ``timestamps="message"`` the next message may be older than the start.
    """
    with ts.open(tmp_path / "db", timestamps="message", allow_ancient=True) as db:
        db.store([ts.Message("a", b"old", "c", timestamp=1_000_000)])
        with db.subscribe("a", 9_000_000) as subscription:
            place = subscription.place
            db.store([ts.Message("a", b"new", "c", timestamp=5_000_000)])
            assert [b"new"] == [message.payload for message in subscription.fetch(timeout=60).messages]
        with db.subscribe("a", place) as subscription:
            assert [b"new"] == [message.payload for message in subscription.fetch(timeout=60).messages]


def test_subscribers_at_one_place_share_a_scan(plain: ts.Database) -> None:
    """A thousand subscribers to one filter at the same position cost as many engine reads as one subscriber."""
    for first in range(0, 2_000, 200):
        plain.store(numbered(first, 200))
    before = reads(plain)
    with plain.subscribe("a/+", 0) as one:
        take(one, 2_000)
        alone = reads(plain) - before
        before = reads(plain)
        crowd = [plain.subscribe("a/+", 0) for _ in range(1_000)]
        for subscription in crowd:
            take(subscription, 2_000)
        assert reads(plain) - before <= 2 * alone
        before = reads(plain)
        plain.store(numbered(2_000, 10))
        for subscription in crowd:
            assert take(subscription, 10) == list(range(2_000, 2_010))
            subscription.close()
        assert reads(plain) - before <= 4


def test_idle_subscribers_read_nothing(plain: ts.Database) -> None:
    """Messages that don't match wake no subscriber and cause no read.

    A later match is read without visiting the messages that don't match.
    """
    crowd = [plain.subscribe(f"device/{n}/#") for n in range(1_000)]
    for subscription in crowd:
        assert not subscription.fetch(timeout=0).messages
    before = reads(plain)
    for first in range(0, 5_000, 100):
        plain.store(numbered(first, 100))
    assert not any(subscription.status().lagging for subscription in crowd)
    assert reads(plain) == before
    visited = sum(c.visited + c.skipped for s in plain.info().shards for c in s.reads.values())
    plain.store([ts.Message("device/7/x", b"1")])
    assert [m.payload for m in crowd[7].fetch(timeout=PATIENCE).messages] == [b"1"]
    after = sum(c.visited + c.skipped for s in plain.info().shards for c in s.reads.values())
    assert after - visited <= 2
    for subscription in crowd:
        subscription.close()


def test_a_program_that_follows_nothing_pays_nothing(plain: ts.Database) -> None:
    """A database without subscribers creates no hub."""
    plain.store(numbered(0, 10))
    assert plain.storage.listener is None


# --- dropped generations -----------------------------------------------------------------


@pytest.mark.parametrize("wanted", ["warn", "raise", "call"])
def test_dropped_generations_are_reported_while_iterating(plain: ts.Database, wanted: str) -> None:
    """A dropped generation with unread messages is reported once, by a warning, an error or a callback.

    The status reports it, too, and no remaining message is lost.
    """
    called: list[tuple[int, ...]] = []
    on_dropped: Any = called.append if wanted == "call" else wanted
    with plain.subscribe("a/+", 0, on_dropped=on_dropped) as subscription:
        plain.store(numbered(0, 3))
        plain.add_generation()
        plain.store(numbered(3, 3))
        plain.drop_generation(1)
        taken: list[int] = []
        if wanted == "warn":
            with pytest.warns(RuntimeWarning, match=r"generations 1 .*'a/\+'.*lost"):
                taken.append(int(next(iter(subscription)).payload))
        elif wanted == "raise":
            with pytest.raises(ts.GenerationDroppedError, match="generations 1 "):
                next(iter(subscription))
        taken += [int(message.payload) for message in itertools.islice(subscription, 3 - len(taken))]
        assert ([3, 4, 5], 1) == (taken, subscription.status().dropped)
        assert ([(1,)] if wanted == "call" else []) == called


def test_a_dropped_generation_is_reported_after_a_message_that_is_not_stored(plain: ts.Database) -> None:
    """A fetch after one that returned an unstored message reports the generation that was dropped unread."""
    with plain.subscribe("#", 0) as follower:
        plain.store([ts.Message("a", b"lost")])
        plain.add_generation()
        plain.drop_generation(1)
        plain.publish([ts.Message("a", b"not stored")])
        batches = [follower.fetch(timeout=0) for _ in range(3)]
    assert [([b"not stored"], ()), ([], (1,)), ([], ())] == [
        ([message.payload for message in batch.messages], batch.dropped) for batch in batches
    ]


def test_an_invalid_reaction_to_dropped_generations_is_refused(plain: ts.Database) -> None:
    """An unknown `on_dropped` action raises `InvalidArgumentError`."""
    with pytest.raises(ts.InvalidArgumentError, match="on_dropped"):
        plain.subscribe("#", on_dropped="ignore")  # type: ignore[arg-type]


def test_a_generation_that_was_read_is_not_missed(plain: ts.Database) -> None:
    """If all matching messages of a generation were read before it is dropped, the drop is not reported."""
    plain.store([*numbered(0, 20), ts.Message("other", b"x")])
    with plain.subscribe("a/+", 0) as subscription:
        take(subscription, 20)
        assert not subscription.fetch(timeout=0).messages
        plain.store([ts.Message("other", b"y")])
        plain.add_generation()
        plain.drop_generation(1)
        plain.store(numbered(20, 1))
        batch = subscription.fetch(timeout=PATIENCE)
        assert [int(message.payload) for message in batch.messages] == [20]
        assert not batch.dropped


# --- closing -----------------------------------------------------------------------------


def test_closing_ends_waiting_fetches(plain: ts.Database) -> None:
    """Closing a subscription ends its iteration, and makes a waiting `fetch` raise."""
    subscription = plain.subscribe("#")
    iterating = waiting(subscription, lambda: list(subscription))
    fetching = waiting(subscription, subscription.fetch)
    subscription.close()
    assert iterating.result(PATIENCE) == []
    with pytest.raises(ts.SubscriptionClosedError):
        fetching.result(PATIENCE)
    with pytest.raises(ts.SubscriptionClosedError):
        subscription.lag()
    subscription.close()


def test_closing_the_database_ends_a_waiting_fetch(tmp_path: Path) -> None:
    """Closing the database makes a waiting `fetch` raise."""
    db = ts.open(tmp_path / "db")
    subscription = db.subscribe("#")
    fetching = waiting(subscription, subscription.fetch)
    db.close()
    with pytest.raises(ts.DatabaseClosedError):
        fetching.result(PATIENCE)
    with pytest.raises(ts.DatabaseClosedError):
        db.subscribe("#")


def test_one_that_was_forgotten_warns_and_is_not_notified(plain: ts.Database) -> None:
    """A subscription that is garbage-collected unclosed emits a `ResourceWarning`, and the database drops it."""
    held = [plain.subscribe("#")]
    with pytest.warns(ResourceWarning, match="was not closed"):
        held.clear()
    assert plain._publisher.hub.matching("a") == ()


@pytest.mark.parametrize(
    "arguments",
    [{"window": 0}, {"batch_size": 0}, {"start": {5: 1}}, {"start": {0: -1}}, {"start": "yesterday"}],
)
def test_bad_arguments(plain: ts.Database, arguments: dict[str, object]) -> None:
    """Invalid arguments raise, and leave no listener behind."""
    with pytest.raises(ts.InvalidArgumentError):
        plain.subscribe("#", **arguments)  # type: ignore[arg-type]
    with pytest.raises(ts.InvalidFilterError):
        plain.subscribe("a/#/b")
    assert plain.storage.listener is None or plain._publisher.hub.matching("a") == ()


# --- asyncio -----------------------------------------------------------------------------


def test_in_asyncio(db: ts.Database) -> None:
    """An asyncio task receives messages while other tasks run; stored messages are read in a thread."""

    async def follow() -> list[int]:
        with db.subscribe("a/+", 0, window=50) as subscription:
            return [int(m.payload) async for m in _some(subscription, 300)]

    async def both() -> list[int]:
        task = asyncio.create_task(follow())
        for first in range(100, 300, 20):
            await asyncio.to_thread(db.store, numbered(first, 20))
        return await asyncio.wait_for(task, PATIENCE)

    db.store(numbered(0, 100))
    assert sorted(asyncio.run(both())) == list(range(300))


async def _some(subscription: Subscription, count: int):  # type: ignore[no-untyped-def]
    seen = 0
    async for message in subscription:
        yield message
        seen += 1
        if seen == count:
            return


def test_async_fetch_times_out_and_ends(plain: ts.Database) -> None:
    """`fetch_async` returns an empty batch at its timeout; closing the subscription makes a waiting call raise."""

    async def run() -> None:
        subscription = plain.subscribe("#")
        assert not (await subscription.fetch_async(timeout=0.01)).messages
        waiting = asyncio.create_task(subscription.fetch_async())
        await asyncio.sleep(0)
        subscription.close()
        with pytest.raises(ts.SubscriptionClosedError):
            await asyncio.wait_for(waiting, PATIENCE)

    asyncio.run(run())


def test_threads_share_one_subscription(plain: ts.Database) -> None:
    """Several threads that fetch from one subscription get different batches, which together have every message."""
    plain.store(numbered(0, 5_000))
    with plain.subscribe("#", 0, batch_size=50) as subscription:
        taken: list[int] = []
        lock = threading.Lock()

        def work() -> None:
            with suppress(ts.SubscriptionClosedError):
                while True:
                    batch = subscription.fetch()
                    with lock:
                        taken.extend(int(message.payload) for message in batch.messages)
                        if len(taken) >= 5_000:
                            subscription.close()

        together(*[work] * 4)
        assert sorted(taken) == list(range(5_000))


def test_unstored_messages_are_delivered_to_subscriptions(plain: ts.Database) -> None:
    """Unstored messages are delivered to subscriptions; while one doesn't fetch, its oldest messages are dropped."""
    with plain.subscribe("a/+") as subscription:
        plain._publisher.hub.route(numbered(0, 3))
        assert take(subscription, 3) == [0, 1, 2]
        plain._publisher.hub.route(numbered(0, 10_005))
        assert subscription.status().missed == 5
        assert next(itertools.islice(take(subscription, 10_000), 1)) == 5


def test_iterating_again_continues(plain: ts.Database) -> None:
    """Iterating again after a break in the middle of a batch returns the rest of the batch."""
    plain.store(numbered(0, 30))
    with plain.subscribe("#", 0, window=10) as subscription:
        first = [int(message.payload) for message in itertools.islice(subscription, 3)]
        assert first + [int(message.payload) for message in itertools.islice(subscription, 27)] == list(range(30))


def test_large_messages_are_not_all_kept(plain: ts.Database) -> None:
    """The shared cache of recent reads is limited in bytes."""
    for _ in range(20):
        plain.store([ts.Message("big", bytes(5_000_000))])
    with plain.subscribe("big", 0) as subscription:
        count = 0
        while count < 20:
            count += len(subscription.fetch(timeout=PATIENCE))
    assert plain._publisher.hub.reads._bytes <= 32 << 20


def test_its_status_is_consistent(plain: ts.Database, monkeypatch: pytest.MonkeyPatch) -> None:
    """The status of a subscription is consistent even if an acknowledgement arrives while `fetch` fills the window.

    Afterwards nothing is unacknowledged, and the subscription isn't stuck.
    """
    plain.store([ts.Message("a", b"1"), ts.Message("a", b"2")])
    with plain.subscribe("a", start=0, window=1) as subscription:
        lock, acknowledging = subscription._inbox.lock, []

        def monotonic() -> float:
            """Acknowledge while `fetch` records that the window is full."""
            if not acknowledging:
                acknowledging.append(begin(lambda: subscription.acknowledge(1)))
                if not owned(lock):  # the acknowledgement doesn't wait for the lock
                    acknowledging[0].result(PATIENCE)
            return time.monotonic()

        monkeypatch.setattr("topicstore.pubsub.subscription.time", SimpleNamespace(monotonic=monotonic))
        assert [b"1"] == [message.payload for message in subscription.fetch().messages]
        acknowledging[0].result(PATIENCE)
        status = subscription.status()
        assert (0, False, 0.0) == (status.unacknowledged, status.stuck, status.stuck_for)


def test_several_threads_may_leave_what_was_abandoned(plain: ts.Database) -> None:
    """If two threads remove an abandoned listener, the second thread finds nothing, and its store succeeds."""
    hub = plain._publisher.hub
    feed, inbox = hub.feed(ts.TopicFilter("a")), _Inbox(1)
    hub.listen(feed, inbox)
    leave = hub.leave

    class Emptied(collections.deque[Any]):
        """A queue that another thread empties right after a check."""

        def __bool__(self) -> bool:
            found = len(self) > 0
            self.clear()
            return found

    hub._abandoned = Emptied([(feed, inbox)])
    plain.store([ts.Message("a", b"1")])
    leave(feed, inbox)


def test_a_wait_takes_a_timedelta(plain: ts.Database) -> None:
    """`fetch` and `fetch_async` accept a timedelta as their timeout."""
    with plain.subscribe("a") as subscription:
        assert not len(subscription.fetch(timeout=timedelta(0)))
        assert not len(asyncio.run(subscription.fetch_async(timeout=timedelta(milliseconds=1))))


@pytest.mark.parametrize("window", [None, 100])
def test_what_a_cancelled_fetch_took_was_not_fetched(plain: ts.Database, window: int | None) -> None:
    """A cancelled fetch takes nothing: the read position and the lag stay, and the next fetch returns the batch."""
    db = plain
    db.store([ts.Message("a", b"%d" % number) for number in range(10)])
    gate = threading.Event()

    async def main() -> None:
        with ThreadPoolExecutor(1) as pool, db.subscribe("a", 0, window=window) as subscription:
            try:
                pool.submit(gate.wait)
                fetching = asyncio.create_task(subscription.fetch_async(executor=pool))
                await asyncio.sleep(0)  # the fetch has begun, and waits for a pool thread
                fetching.cancel()
            finally:
                gate.set()
            with pytest.raises(asyncio.CancelledError):
                await fetching
            assert 10 == subscription.lag().messages
            for start in (subscription.place, subscription.acknowledged):
                with db.subscribe("a", start) as other:
                    assert 10 == len(other.fetch(timeout=0))
            assert 10 == len(await subscription.fetch_async(timeout=0, executor=pool))
            assert 0 == subscription.lag().messages
            with db.subscribe("a", subscription.place) as other:
                assert 0 == len(other.fetch(timeout=0))

    asyncio.run(main())
