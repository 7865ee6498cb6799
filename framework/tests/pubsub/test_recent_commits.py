"""`topicstore.pubsub.recent_commits`: reads from memory return the same as a scan of the engine."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path
from unittest.mock import patch

import attrs
import pytest
import topicstore as ts
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from topicstore.pubsub import feed as feeds
from topicstore.pubsub import recent_commits
from topicstore.pubsub.feed import Feed
from topicstore.pubsub.hub import Hub
from topicstore.pubsub.notifier import Notifier
from topicstore_conformance.conditions.profiles import MACHINE
from topicstore_conformance.conditions.tries import tries
from topicstore_conformance.faults.threads import PATIENCE

SHARDS = 2
TOPICS = ["a/x", "a/y", "b/x", "b/y/z", "$s/x"]
FILTERS = ["#", "a/+", "+/x", "b/#", "a/x", "b/y/z", "$s/#"]
PROPERTIES = [None, ts.Properties(message_expiry_interval=7, user_properties=(("a", "b"), ("a", "c")))]
Row = tuple[str, str, int, bool, int | None, ts.Properties | None]
ROWS = st.tuples(
    st.sampled_from(TOPICS),
    st.sampled_from("cdef"),
    st.integers(0, 2),
    st.booleans(),
    st.sampled_from([None, 1_700_000_000_000_000]),
    st.sampled_from(PROPERTIES),
)


class Listener:
    """A listener that makes its feed active and ignores notifications; the test reads the feed itself."""

    def __init__(self) -> None:
        self.notifier = Notifier()

    def on_stored(self, feed: Feed, shard: int) -> None: ...

    def routed(self, feed: Feed, messages: list[ts.Message]) -> None: ...

    def closed(self) -> None: ...


class Histories(RuleBasedStateMachine):
    """A state machine that stores, fails and deletes in any order, and reads feeds from earlier positions."""

    def __init__(self) -> None:
        super().__init__()
        self.path = Path(tempfile.mkdtemp())
        self.generations = [1]
        self.stored = 0
        self.places = [[0], [0]]
        """Positions at which followers may be, by shard."""

    @initialize(
        backend=st.sampled_from(["rocksdb", "memory"]),
        layout=st.sampled_from(["block", "skipstream", "wildcard_optimized", "wildcard_optimized"]),
        few=st.booleans(),
        rows=st.sampled_from([3, 4_096]),
    )
    def begin(self, backend: str, layout: str, few: bool, rows: int) -> None:
        limits = {"_COMMITS": 3, "_ROWS": 20, "_WHOLE": 3} if few else {}
        self.patches = [patch.object(recent_commits, name, limit) for name, limit in limits.items()]
        self.patches.append(patch.object(feeds, "ROWS", rows))
        for each in self.patches:
            each.start()
        options = {layout: {"epoch_bits": 12}} if layout == "wildcard_optimized" else None
        self.db = ts.open(self.path / "db", backend=backend, layout=layout, options=options, shards=SHARDS)
        self.hub: Hub = self.db._publisher.hub
        self.listeners: dict[Feed, Listener] = {}

    def teardown(self) -> None:
        self.db.close()
        for each in self.patches:
            each.stop()
        shutil.rmtree(self.path)

    def _messages(self, rows: list[Row]) -> list[ts.Message]:
        found = []
        for topic, client, qos, retain, timestamp, properties in rows:
            self.stored += 1
            payload = str(self.stored).encode()
            found.append(ts.Message(topic, payload, client, qos, retain, timestamp, properties))
        return found

    @rule(text=st.sampled_from(FILTERS))
    def listen(self, text: str) -> None:
        feed = self.hub.feed(ts.TopicFilter(text))
        if feed not in self.listeners:
            self.listeners[feed] = Listener()
            self.hub.listen(feed, self.listeners[feed])

    @precondition(lambda self: self.listeners)
    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        feed = data.draw(st.sampled_from(sorted(self.listeners, key=lambda feed: feed.topic_filter.text)))
        self.hub.leave(feed, self.listeners.pop(feed))

    @rule(rows=st.lists(ROWS, min_size=1, max_size=12), arrow=st.booleans())
    def store(self, rows: list[Row], arrow: bool) -> None:
        messages = self._messages(rows)
        result = self.db.store(ts.MessageBatch.of(messages).to_arrow() if arrow else messages)
        for found in result.ids:
            self.places[found.shard].append(found.position)

    @rule(rows=st.lists(ROWS, min_size=1, max_size=3), after=st.integers(0, 2))
    def fail_to_store(self, rows: list[Row], after: int) -> None:
        """Interrupt a call while it announces a batch: some feeds know of the batch, which is never committed."""
        announce, calls = Feed.announce, 0

        def interrupted(feed: Feed, *arguments: object) -> None:
            nonlocal calls
            if calls == after:
                raise KeyboardInterrupt
            calls += 1
            announce(feed, *arguments)  # type: ignore[arg-type]

        with patch.object(Feed, "announce", interrupted):
            try:
                result = self.db.store(self._messages(rows))
            except KeyboardInterrupt:
                return
        for found in result.ids:
            self.places[found.shard].append(found.position)

    @rule(text=st.sampled_from(FILTERS))
    def delete(self, text: str) -> None:
        self.db.delete(text)

    @rule(layout=st.sampled_from(["block", "skipstream", "wildcard_optimized", "wildcard_optimized"]))
    def add_generation(self, layout: str) -> None:
        options = {"epoch_bits": 12} if layout == "wildcard_optimized" else {}
        self.generations.append(self.db.add_generation(layout, options))

    @precondition(lambda self: len(self.generations) > 1)
    @rule()
    def drop_generation(self) -> None:
        self.db.drop_generation(self.generations.pop(0))

    @rule(data=st.data(), limit=st.sampled_from([1, 3, 100]))
    def read(self, data: st.DataObject, limit: int) -> None:
        for feed in self.listeners:
            shard = data.draw(st.integers(0, SHARDS - 1))
            places = self.places[shard]
            self._compare(feed, shard, data.draw(st.sampled_from(places[-1:-40:-1])), limit)

    @invariant()
    def followers_read_what_a_scan_returns(self) -> None:
        for feed in getattr(self, "listeners", ()):
            for shard in range(SHARDS):
                self._compare(feed, shard, self.places[shard][-1 if self.stored % 2 else -len(self.places[shard])], 7)

    def _compare(self, feed: Feed, shard: int, after: int, limit: int) -> None:
        read: list[tuple[int, ts.Message]] = []
        columns: list[ts.Message] = []
        place = after
        while True:
            run = feed.read(shard, place, limit)
            assert len(run) <= limit
            assert place <= run.position
            read += zip(run.positions, run.messages, strict=True)
            columns += run.batch.to_messages()
            assert run.batch.positions.tolist() == run.positions
            place = run.position
            if run.caught_up:
                break
        storage = self.db.storage
        plan = storage.plan_shard(shard, feed.topic_filter, after + 1, None)
        scanned = [
            pair
            for batch in storage.run_shards([plan], 100)
            for pair in zip(batch.positions.tolist(), batch.to_messages(), strict=True)
        ]
        # An epoch may have ended between the two reads; then the scan returns more messages.
        assert read == scanned[: len(read)]
        assert columns == [message for _, message in read]
        hides = any(slab.epoch > 1 for _, slab in storage.shards[shard].generations.with_slabs())
        assert hides or len(read) == len(scanned)


TestHistories = Histories.TestCase
TestHistories.settings = settings(MACHINE, max_examples=tries(12, 150))


def _reads(db: ts.Database) -> int:
    return sum(shard.writer.counters.reads for shard in db.storage.shards)


def test_followers_that_have_caught_up_scan_nothing(tmp_path: Path) -> None:
    """New commits are delivered to sessions that have caught up without any engine read, even for many sessions."""
    with ts.open(tmp_path / "db", backend="memory", layout="block") as db:
        sessions = [db.sessions.open(f"c{number}") for number in range(20)]
        for number, session in enumerate(sessions):
            session.subscribe(f"c/{number}")
        db.sessions.deliver()
        before = _reads(db)
        for payload in (b"1", b"2"):  # a commit for each message, then a single commit for all
            messages = [ts.Message(f"c/{number}", payload, "p", 1) for number in range(20)]
            for message in messages:
                db.publish([message])
            db.publish(messages)
            delivered = dict(db.sessions.deliver())
            for number, session in enumerate(sessions):
                assert [item.message.topic for item in delivered[session]] == [f"c/{number}"] * 2  # type: ignore[union-attr]
        assert _reads(db) == before


def test_what_a_layout_hides_is_not_read_from_memory(tmp_path: Path) -> None:
    """Messages of a layout with epochs are not read from memory, because the layout hides those of a running epoch."""
    options = {"wildcard_optimized": {"epoch_bits": 40}}
    with ts.open(tmp_path / "db", backend="memory", layout="wildcard_optimized", options=options) as db:
        feed, listener = db._publisher.hub.feed(ts.TopicFilter("#")), Listener()
        db._publisher.hub.listen(feed, listener)
        db.store([ts.Message("a", b"x")])
        assert not db._publisher.hub._recent._commits
        db.add_generation("block")
        db.store([ts.Message("a", b"y")])
        assert len(db._publisher.hub._recent._commits) == 1
        first = feed.read(0, 0, 10)  # scans the first generation
        following = feed.read(0, first.position, 10)
        assert [message.payload for message in first.messages + following.messages] == [b"x", b"y"]


def test_what_is_not_flushed_is_not_read_from_memory(tmp_path: Path) -> None:
    """With ``durability="sync"``, followers see a message after its fsync, not after the engine's write."""
    with ts.open(tmp_path / "db", backend="memory", durability="sync") as db:
        feed, listener = db._publisher.hub.feed(ts.TopicFilter("#")), Listener()
        db._publisher.hub.listen(feed, listener)
        log, seen = db.storage.shards[0].writer, []
        flush = log.engine.flush_log

        def look() -> None:
            seen.append(len(feed.read(0, 0, 10)))
            flush()

        with patch.object(log.engine, "flush_log", look):
            db.store([ts.Message("a", b"x")])
        assert seen == [0]
        assert len(feed.read(0, 0, 10)) == 1


class _Shouting:
    """A plugin that changes messages when they are read."""

    @ts.hookimpl(wrapper=True)
    def topicstore_read(self, request: object):  # type: ignore[no-untyped-def]
        result = yield
        payloads = [payload.upper() for payload in result.batch.payloads]
        return attrs.evolve(result, batch=result.batch.replace(payloads=payloads))


def test_a_plugin_that_wraps_reading_sees_what_followers_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a plugin that wraps reading, nothing is read from memory, because the plugin may change messages."""
    monkeypatch.setattr(type(ts.plugins.registry()), "wrapper", lambda _registry, _name: _Shouting())
    with ts.open(tmp_path / "db", backend="memory", plugins=["shouting"]) as db, db.subscribe("#") as subscription:
        db.store([ts.Message("a", b"x")])
        assert [message.payload for message in subscription.fetch(timeout=PATIENCE).messages] == [b"X"]


def test_memory_is_bounded(tmp_path: Path) -> None:
    """Recent commits in memory are limited in bytes: the oldest are dropped, and slower followers scan the engine."""
    with ts.open(tmp_path / "db", backend="memory") as db, patch.object(recent_commits, "_BYTES", 1_000):
        feed, listener = db._publisher.hub.feed(ts.TopicFilter("#")), Listener()
        db._publisher.hub.listen(feed, listener)
        for number in range(50):
            db.store([ts.Message("a", b"%100d" % number)])
        assert len(db._publisher.hub._recent._commits) == 10
        assert len(feed._shards[0].matches._commits) == 10
        assert [int(message.payload) for message in feed.read(0, 0, 100).messages] == list(range(50))


def test_memory_is_bounded_however_many_filters_match(tmp_path: Path) -> None:
    """The lists of matching messages that are kept for each filter count towards the memory limit, too."""
    with ts.open(tmp_path / "db", backend="memory") as db, patch.object(recent_commits, "_LISTED", 20_000):
        followed = [db._publisher.hub.feed(ts.TopicFilter(f"{number}/#")) for number in range(20)]
        for feed in (wide := db._publisher.hub.feed(ts.TopicFilter("#")), *followed):
            db._publisher.hub.listen(feed, Listener())
        topics = [f"{number}/{below}" for number in range(20) for below in range(10)]
        for number in range(50):
            db.store([ts.Message(topic, b"%d" % number) for topic in topics])
            listed = [len(feed._shards[0].matches._commits) for feed in (wide, *followed)]
            assert {min(number + 1, 2)} == set(listed)  # 21 filters and 200 topics, twice, take about 7,000 bytes
        for feed, count in ((wide, 200), (followed[7], 10)):
            run = feed.read(0, 0, 1_000)
            found = list(run.messages)
            while not run.caught_up:
                run = feed.read(0, run.position, 1_000)
                found += run.messages
            assert [str(number).encode() for number in range(50) for _ in range(count)] == [m.payload for m in found]


@pytest.mark.parametrize("heard", [1, 2])
def test_what_was_announced_and_never_committed_is_not_there(tmp_path: Path, heard: int) -> None:
    """A batch that was announced and never committed is not read; the notified feeds continue with the next batch."""
    with ts.open(tmp_path / "db", backend="memory") as db:
        followed = [db._publisher.hub.feed(ts.TopicFilter(text)) for text in ("#", "a/#", "+/b")]
        for feed in followed:
            db._publisher.hub.listen(feed, Listener())
        db.store([ts.Message("a/b", b"x")])
        announce, announced = Feed.announce, []

        def interrupted(feed: Feed, *arguments: object) -> None:
            if len(announced) == heard:
                raise KeyboardInterrupt
            announced.append(feed)
            announce(feed, *arguments)  # type: ignore[arg-type]

        with patch.object(Feed, "announce", interrupted), pytest.raises(KeyboardInterrupt):
            db.store([ts.Message("a/b", b"lost")] * 3)
        assert [len(feed.read(0, 0, 10)) for feed in followed] == [1, 1, 1]
        db.store([ts.Message("a/b", b"y")])
        for feed in followed:
            first = feed.read(0, 0, 10)
            following = [] if first.caught_up else feed.read(0, first.position, 10).messages
            assert [message.payload for message in [*first.messages, *following]] == [b"x", b"y"]
