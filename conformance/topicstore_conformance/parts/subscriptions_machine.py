"""Subscriptions compared with a plain model, in random histories of storing, reading, removing and reopening."""

from __future__ import annotations

import shutil
from pathlib import Path
from unittest.mock import patch

import attrs
import topicstore as ts
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from topicstore.pubsub.feed import Feed
from topicstore.pubsub.subscription import Subscription, SubscriptionBatch
from topicstore.storage.counting.lag import Lag

from topicstore_conformance.conditions.directories import quick_directory
from topicstore_conformance.faults.striking import Fault, faults, striking
from topicstore_conformance.subjects.pairs import Pair

SHARDS = 2
TOPICS = ["a/x", "a/y", "b/x", "b/y/z", "$s/x"]
FILTERS = ["#", "a/+", "+/x", "b/#", "a/x", "$s/#"]


@attrs.define(eq=False)
class Follower:
    """A subscription and its place in the model."""

    topic_filter: ts.TopicFilter
    subscription: Subscription
    place: list[int]
    missed: set[int] = attrs.field(factory=set)
    """Dropped generations with unread matching messages that the subscription has not reported yet."""
    may: set[int] = attrs.field(factory=set)
    """Dropped generations that the subscription may report, whether or not they had unread matches."""
    live: list[ts.Message] = attrs.field(factory=list)
    """Unstored messages that were routed to the subscription and not fetched yet."""
    window: int | None = None
    delivered: int = 0
    acknowledged: int = 0
    pending: list[tuple[int, int, int]] = attrs.field(factory=list)
    """Stored batches that are not fully acknowledged: sequence, shard and first position of each."""

    def acknowledge(self, sequence: int) -> None:
        """Acknowledge messages up to a sequence number; without a window, fetching acknowledges them."""
        self.subscription.acknowledge(sequence)
        self.acknowledged = max(self.acknowledged, sequence)
        self.pending = [one for one in self.pending if one[0] > self.acknowledged]


class SubscriptionHistories(RuleBasedStateMachine):
    """A state machine: each subscription fetches the model's matching messages after its place, in order."""

    pair: Pair

    def __init__(self) -> None:
        super().__init__()
        self.persistent = "persistent" in self.pair.capabilities
        self.temporary = quick_directory()
        self.path = Path(self.temporary.name)
        self.live: list[list[tuple[int, int, ts.Message]]] = [[] for _ in range(SHARDS)]
        """Position, generation and message of each stored row, by shard."""
        self.followers: list[Follower] = []
        self.generations = [1]
        self.stored = 0

    @initialize(
        text=st.sampled_from(FILTERS),
        window=st.sampled_from([None, 3, 50]),
    )
    def begin(self, text: str, window: int | None) -> None:
        self.db = self.pair.open(self.path / "db", shards=SHARDS)
        self.subscribe(text, False, window)

    def teardown(self) -> None:
        for follower in self.followers:
            follower.subscription.close()
        self.db.close()
        self.temporary.cleanup()

    _rows = st.lists(st.tuples(st.sampled_from(TOPICS), st.integers(0, 3)), min_size=1, max_size=12)

    def _messages(self, rows: list[tuple[str, int]]) -> list[ts.Message]:
        first = self.stored
        self.stored += len(rows)
        return [
            ts.Message(topic, str(first + number).encode(), f"c{client}") for number, (topic, client) in enumerate(rows)
        ]

    @rule(rows=_rows)
    def store(self, rows: list[tuple[str, int]]) -> None:
        messages = self._messages(rows)
        for message_id, message in zip(self.db.store(messages).ids, messages, strict=True):
            self.live[message_id.shard].append((message_id.position, self.generations[-1], message))

    @rule(rows=_rows)
    def route(self, rows: list[tuple[str, int]]) -> None:
        """Publish messages that aren't stored: each follower that exists receives them once."""
        messages = self._messages(rows)
        assert 0 == self.db.publish(messages).stored
        for follower in self.followers:
            follower.live += [message for message in messages if follower.topic_filter.matches(message.topic)]

    @precondition(lambda self: self.persistent)
    @rule(rows=_rows, fault=faults())
    def store_and_be_killed(self, rows: list[tuple[str, int]], fault: Fault | None) -> None:
        """Kill the process while it stores a batch; the next one resumes subscriptions at their acknowledged places.

        Any part of the batch may be stored.
        """
        messages, path = self._messages(rows), self.path / "killed"
        if fault is None:
            return
        engines = [shard.writer.engine for shard in self.db.storage.shards]
        with striking(fault, engines, self.path / "db", path):
            self.db.store(messages)
        places = [follower.subscription.acknowledged for follower in self.followers]
        self._go_on(places, path if fault.kills else None)
        known = {(shard, row[0]) for shard, there in enumerate(self.live) for row in there}
        by_payload = {message.payload: message for message in messages}
        for batch in self.db.replay_arrow("#", ids=True), self.db.replay_arrow("$s/#", ids=True):
            for row in (row for part in batch for row in part.to_pylist()):
                if (row["shard"], row["position"]) not in known:
                    message = by_payload[row["payload"]]
                    self.live[row["shard"]].append((row["position"], self.generations[-1], message))
        for there in self.live:
            there.sort(key=lambda row: row[0])

    @precondition(lambda self: len(self.followers) < 6)
    @rule(text=st.sampled_from(FILTERS), from_now=st.booleans(), window=st.sampled_from([None, 3, 50]))
    def subscribe(self, text: str, from_now: bool, window: int | None) -> None:
        subscription = self.db.subscribe(text, None if from_now else 0, window=window)
        ends = [rows[-1][0] if rows else 0 for rows in self.live]
        place = list(subscription.place.values())
        assert all(place[shard] >= end for shard, end in enumerate(ends)) if from_now else place == [0] * SHARDS
        self.followers.append(Follower(ts.TopicFilter(text), subscription, place, window=window))

    @precondition(lambda self: self.followers)
    @rule(
        number=st.integers(0, 5),
        limits=st.lists(st.sampled_from([1, 2, 5, None]), min_size=1, max_size=4),
        share=st.sampled_from([0, 0.5, 1, 1]),
        rows=_rows,
        how=st.sampled_from(["store", "store", "route", "nothing"]),
    )
    def fetch(self, number: int, limits: list[int | None], share: float, rows: list[tuple[str, int]], how: str) -> None:
        """Fetch some batches, usually right after a publish, and acknowledge a part of each."""
        if how != "nothing":
            getattr(self, how)(rows)
        follower = self.followers[number % len(self.followers)]
        for limit in limits:
            batch = follower.subscription.fetch(limit, timeout=0)
            self._check(follower, batch)
            follower.acknowledge(batch.sequence - int(len(batch) * (1 - share)))

    def _check(self, follower: Follower, batch: SubscriptionBatch) -> None:
        """Compare a batch with the messages after the follower's place, and advance the place."""
        assert follower.may >= set(batch.dropped)
        follower.may -= set(batch.dropped)
        follower.missed -= set(batch.dropped)
        follower.delivered += len(batch)
        assert follower.delivered == batch.sequence
        full = follower.delivered - follower.acknowledged == follower.window
        assert batch.messages or batch.dropped or batch.stuck == full
        if follower.window is None:
            follower.acknowledged = batch.sequence
        elif batch.shard is not None and batch.messages:
            follower.pending.append((batch.sequence, batch.shard, self.behind(follower, batch.shard)[0][0]))
        if batch.shard is None and batch.messages:
            assert same(batch, [(0, 0, message) for message in follower.live])
            del follower.live[: len(batch)]
        elif batch.shard is not None:
            expected = self.behind(follower, batch.shard)
            assert same(batch, expected)
            assert batch.messages == batch.batch.to_messages()
            follower.place = list(follower.subscription.place.values())
            skipped = [p for p, _, _ in expected[len(batch) :] if p <= follower.place[batch.shard]]
            assert not skipped
        elif not batch.stuck:
            assert not any(self.behind(follower, shard) for shard in range(SHARDS))
            assert not follower.missed
            assert not follower.live

    @precondition(lambda self: self.followers)
    @rule(number=st.integers(0, 5))
    def fail_to_fetch(self, number: int) -> None:
        """Let a read fail: the error is raised, and the next fetch continues at the same position."""
        subscription = self.followers[number % len(self.followers)].subscription
        before = subscription.status()

        def failing(*_: object) -> None:
            raise ts.StorageFullError("for a moment")

        with patch.object(Feed, "read", failing):
            try:
                batch = subscription.fetch(timeout=0)
            except ts.StorageFullError:
                assert before == attrs.evolve(subscription.status(), stuck_for=before.stuck_for)
            else:
                self._check(self.followers[number % len(self.followers)], batch)

    @precondition(lambda self: self.followers)
    @rule(number=st.integers(0, 5))
    def unsubscribe(self, number: int) -> None:
        self.followers.pop(number % len(self.followers)).subscription.close()

    @rule()
    def add_generation(self) -> None:
        self.generations.append(self.db.add_generation())

    @precondition(lambda self: len(self.generations) > 1)
    @rule(which=st.integers(0, 5))
    def drop_generation(self, which: int) -> None:
        number = self.generations.pop(which % (len(self.generations) - 1))
        for shard in range(SHARDS):
            for follower in self.followers:
                follower.may.add(number)
                if any(g == number for _, g, _ in self.behind(follower, shard)):
                    follower.missed.add(number)
        self.db.drop_generation(number)
        self.live = [[row for row in rows if row[1] != number] for rows in self.live]

    @rule(text=st.sampled_from(["a/x", "b/#", "+/x"]))
    def delete(self, text: str) -> None:
        self.db.delete(text)
        gone = ts.TopicFilter(text)
        self.live = [[row for row in rows if not gone.matches(row[2].topic)] for rows in self.live]

    @rule()
    def compact(self) -> None:
        self.db.compact()

    @precondition(lambda self: self.persistent)
    @rule()
    def reopen(self) -> None:
        places = []
        for follower in self.followers:
            batch = follower.subscription.fetch(timeout=0)
            self._check(follower, batch)
            follower.acknowledge(batch.sequence)
            places.append(follower.subscription.acknowledged)
        self._go_on(places, None)

    def _go_on(self, places: list[ts.Place], killed: Path | None) -> None:
        """Reopen the database, or its copy made at the kill, and subscribe all followers again from these places."""
        for follower in self.followers:
            follower.subscription.close()
            follower.live.clear()
            # A serialized place doesn't hold the time at which its subscription was created.
            follower.may = {*range(1, self.generations[-1])}
        self.db.close()
        if killed is not None:
            shutil.rmtree(self.path / "db")
            killed.rename(self.path / "db")
        self.db = self.pair.open(self.path / "db")
        for follower, place in zip(self.followers, places, strict=True):
            follower.subscription = self.db.subscribe(follower.topic_filter.text, place, window=follower.window)
            follower.delivered, follower.acknowledged, follower.pending = 0, 0, []
            follower.place = list(place.values())

    @invariant()
    def nobody_is_kept_from_reading(self) -> None:
        for follower in self.followers:
            status = follower.subscription.status()
            waiting = any(self.behind(follower, shard) for shard in range(SHARDS))
            assert status.lagging or not waiting

    @invariant()
    def no_more_than_the_window_is_unacknowledged(self) -> None:
        """Check that at most a window of messages is unacknowledged, and that all follow the acknowledged place."""
        for follower in self.followers:
            waiting = follower.delivered - follower.acknowledged
            status = follower.subscription.status()
            assert (waiting, waiting == follower.window) == (status.unacknowledged, status.stuck)
            assert waiting <= (follower.window or 0)
            acknowledged = follower.subscription.acknowledged
            assert all(acknowledged[shard] < first for _, shard, first in follower.pending)

    @invariant()
    def lag_is_what_is_left_to_fetch(self) -> None:
        for follower in self.followers:
            left = [row for shard in range(SHARDS) for row in self.behind(follower, shard)]
            newest = max((shard.writer.watermark for shard in self.db.storage.shards), default=0)
            seconds = max([0, *(((newest >> 11) - (position >> 11)) / 1e6 for position, _, _ in left)])
            assert Lag(messages=len(left), exact=True, seconds=seconds) == follower.subscription.lag()

    def behind(self, follower: Follower, shard: int) -> list[tuple[int, int, ts.Message]]:
        matches, place = follower.topic_filter.matches, follower.place[shard]
        return [row for row in self.live[shard] if row[0] > place and matches(row[2].topic)]


def same(batch: object, expected: list[tuple[int, int, ts.Message]]) -> bool:
    """Return whether messages have the same topics, payloads and client ids; the store sets their times."""
    messages = batch.messages  # type: ignore[attr-defined]
    return [(m.topic, m.payload, m.client_id) for m in messages] == [
        (m.topic, m.payload, m.client_id) for _, _, m in expected[: len(messages)]
    ]
