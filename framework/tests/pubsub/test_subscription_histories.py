"""Subscriptions against a plain model: any history of storing, reading, removing and reopening."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

import attrs
import topicstore as ts
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from topicstore.pubsub.subscription import Subscription
from topicstore.storage.lag import Lag
from topicstore_conformance.conditions.profiles import MACHINE, tries

SHARDS = 2
TOPICS = ["a/x", "a/y", "b/x", "b/y/z", "$s/x"]
FILTERS = ["#", "a/+", "+/x", "b/#", "a/x", "$s/#"]


@attrs.define(eq=False)
class Follower:
    """A subscription and where the model has it."""

    topic_filter: ts.TopicFilter
    subscription: Subscription
    place: list[int]
    missed: set[int] = attrs.field(factory=set)
    """Generations of which it has not been told that it missed some."""
    may: set[int] = attrs.field(factory=set)
    """Those of which it may be told, whether something that matched was behind its place or not."""


class Histories(RuleBasedStateMachine):
    """What a subscription fetches is what the model holds behind its place, in order."""

    layout = "block"

    def __init__(self) -> None:
        super().__init__()
        self.path = Path(tempfile.mkdtemp())
        self.live: list[list[tuple[int, int, ts.Message]]] = [[] for _ in range(SHARDS)]
        """By shard: position, generation and message."""
        self.followers: list[Follower] = []
        self.generations = [1]
        self.stored = 0

    @initialize()
    def begin(self) -> None:
        self.db = ts.open(self.path / "db", layout=self.layout, shards=SHARDS)

    def teardown(self) -> None:
        for follower in self.followers:
            follower.subscription.close()
        self.db.close()
        shutil.rmtree(self.path)

    @rule(rows=st.lists(st.tuples(st.sampled_from(TOPICS), st.integers(0, 3)), min_size=1, max_size=12))
    def store(self, rows: list[tuple[str, int]]) -> None:
        messages = [
            ts.Message(topic, str(self.stored + number).encode(), f"c{client}")
            for number, (topic, client) in enumerate(rows)
        ]
        self.stored += len(messages)
        result = self.db.store(messages)
        for message_id, message in zip(result.ids, messages, strict=True):
            self.live[message_id.shard].append((message_id.position, self.generations[-1], message))

    @precondition(lambda self: len(self.followers) < 6)
    @rule(text=st.sampled_from(FILTERS), from_now=st.booleans(), window=st.sampled_from([None, 3, 50]))
    def subscribe(self, text: str, from_now: bool, window: int | None) -> None:
        subscription = self.db.subscribe(text, None if from_now else 0, window=window)
        ends = [rows[-1][0] if rows else 0 for rows in self.live]
        place = list(subscription.place.values())
        assert all(place[shard] >= end for shard, end in enumerate(ends)) if from_now else place == [0] * SHARDS
        self.followers.append(Follower(ts.TopicFilter(text), subscription, place))

    @precondition(lambda self: self.followers)
    @rule(number=st.integers(0, 5), limit=st.sampled_from([1, 2, 5, None]), acknowledge=st.booleans())
    def fetch(self, number: int, limit: int | None, acknowledge: bool) -> None:
        follower = self.followers[number % len(self.followers)]
        batch = follower.subscription.fetch(limit, timeout=0)
        assert follower.may >= set(batch.dropped)
        follower.may -= set(batch.dropped)
        follower.missed -= set(batch.dropped)
        if batch.shard is not None:
            expected = self.behind(follower, batch.shard)
            assert same(batch, expected)
            assert batch.messages == batch.batch.to_messages()
            follower.place = list(follower.subscription.place.values())
            skipped = [p for p, _, _ in expected[len(batch) :] if p <= follower.place[batch.shard]]
            assert not skipped
        elif not batch.stuck:
            assert not any(self.behind(follower, shard) for shard in range(SHARDS))
            assert not follower.missed
        if acknowledge:
            follower.subscription.acknowledge(batch.sequence)

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

    @rule()
    def reopen(self) -> None:
        places = []
        for follower in self.followers:
            batch = follower.subscription.fetch(timeout=0)
            follower.subscription.acknowledge(batch.sequence)
            follower.missed -= set(batch.dropped)
            follower.may = {*range(1, self.generations[-1])}  # a place does not tell since when somebody reads
            places.append(follower.subscription.acknowledged)
            follower.subscription.close()
        self.db.close()
        self.db = ts.open(self.path / "db")
        for follower, place in zip(self.followers, places, strict=True):
            follower.subscription = self.db.subscribe(follower.topic_filter.text, place, window=50)
            follower.place = list(place.values())

    @invariant()
    def nobody_is_kept_from_reading(self) -> None:
        for follower in self.followers:
            status = follower.subscription.status()
            waiting = any(self.behind(follower, shard) for shard in range(SHARDS))
            assert status.lagging or not waiting

    @invariant()
    def lag_is_what_is_left_to_fetch(self) -> None:
        for follower in self.followers:
            left = [row for shard in range(SHARDS) for row in self.behind(follower, shard)]
            newest = max((shard.watermark for shard in self.db.storage.shards), default=0)
            seconds = max([0, *(((newest >> 11) - (position >> 11)) / 1e6 for position, _, _ in left)])
            assert Lag(messages=len(left), exact=True, seconds=seconds) == follower.subscription.lag()

    def behind(self, follower: Follower, shard: int) -> list[tuple[int, int, ts.Message]]:
        matches, place = follower.topic_filter.matches, follower.place[shard]
        return [row for row in self.live[shard] if row[0] > place and matches(row[2].topic)]


def same(batch: object, expected: list[tuple[int, int, ts.Message]]) -> bool:
    """Compare all but the time, which the store fills in."""
    messages = batch.messages  # type: ignore[attr-defined]
    return [(m.topic, m.payload, m.client_id) for m in messages] == [
        (m.topic, m.payload, m.client_id) for _, _, m in expected[: len(messages)]
    ]


class SkipstreamHistories(Histories):
    layout = "skipstream"


class ReferenceHistories(Histories):
    layout = "reference"


TestBlock = Histories.TestCase
TestBlock.settings = settings(MACHINE, max_examples=tries(10, 30))
TestSkipstream = SkipstreamHistories.TestCase
TestSkipstream.settings = settings(MACHINE, max_examples=tries(5, 15))
TestReference = ReferenceHistories.TestCase
TestReference.settings = settings(MACHINE, max_examples=tries(5, 15))
