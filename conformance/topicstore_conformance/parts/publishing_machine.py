"""Publishing compared with a plain model: stored, retained and unstored messages, with faults and clock jumps."""

from __future__ import annotations

import copy
import shutil
import warnings
from pathlib import Path
from typing import Any
from unittest.mock import patch

import attrs
import msgspec
import pytest
import topicstore as ts
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from topicstore.pubsub.feed import Feed
from topicstore.pubsub.persistence_rules import PersistenceRule
from topicstore.pubsub.publish import PERSIST
from topicstore.pubsub.retained_expiry import RetainedExpiry
from topicstore.storage.keyed_messages import state_key

from topicstore_conformance.conditions.directories import quick_directory
from topicstore_conformance.faults.clock import Clock
from topicstore_conformance.faults.striking import Fault, faults, striking
from topicstore_conformance.oracle.checks import replayed
from topicstore_conformance.oracle.model import match
from topicstore_conformance.subjects.pairs import Pair

SECOND = 1_000_000
DAY = 86_400 * SECOND
TOPICS = ["ruled", "wanted", "a", "a/b", "a/c", "b", "$s"]
FILTERS = ["#", "a/#", "a/+", "+", "+/b", "b", "$s", "$s/#", "none"]
EXPIRING = [ts.Properties(message_expiry_interval=seconds) for seconds in (1, 3, 3_600)]


def asking(value: str) -> ts.Properties:
    return ts.Properties(user_properties=(("other", "1"), (PERSIST, value)))


ASKING = [asking(value) for value in ("1", "true", "0", "", "TRUE")]
ROWS = st.builds(
    ts.Message,
    st.sampled_from(TOPICS),
    st.sampled_from([b"", b"1", b"2", b"3"]),
    st.sampled_from(["", "me", "you", "c1", "c2"]),
    st.integers(0, 2),
    st.booleans(),
    st.sampled_from([None, None, 5]),
    st.sampled_from(
        [
            None,
            ts.Properties(content_type="text/plain"),
            *EXPIRING,
            *EXPIRING,
            *map(asking, ("1", "true", "0", "", "TRUE")),
        ]
    ),
)
RULES = st.builds(
    PersistenceRule,
    st.sampled_from(["#", "ruled", "a/+", "$s"]),
    client_id=st.sampled_from([None, "you"]),
    least_qos=st.integers(0, 2),
)


class Ear:
    """A listener that collects unstored messages."""

    def __init__(self) -> None:
        self.heard: list[ts.Message] = []

    def on_stored(self, feed: Feed, shard: int) -> None: ...

    def routed(self, feed: Feed, messages: list[ts.Message]) -> None:
        self.heard += messages

    def closed(self) -> None: ...


@attrs.define
class Shard:
    """A shard in the model: stored messages, retained messages by topic with their expiry, the newest time, and state.

    The expiry of a stored message counts from its position's time, which never decreases within a shard. The expiry of
    other messages counts from the wall clock.
    """

    stored: list[ts.Message] = attrs.field(factory=list)
    retained: dict[str, tuple[ts.Message, int | None]] = attrs.field(factory=dict)
    newest: int = 0
    value: bytes | None = None

    def found(self, now: int) -> list[ts.Message]:
        """Return the retained messages that haven't expired, with the seconds that remain.

        These are whole seconds, rounded up, and at most the published interval.
        """
        found = []
        for message, end in self.retained.values():
            if end is None:
                found.append(message)
            elif end > now:
                assert message.properties is not None
                left = min(-((now - end) // SECOND), message.properties.message_expiry_interval or 0)
                properties = msgspec.structs.replace(message.properties, message_expiry_interval=left)
                found.append(msgspec.structs.replace(message, properties=properties))
        return sorted(found, key=lambda message: message.topic)

    def expired(self, now: int) -> list[str]:
        return [topic for topic, (_, end) in self.retained.items() if end is not None and end <= now]


class PublishingHistories(RuleBasedStateMachine):
    """A state machine: each published message is either stored or only routed to listeners, exactly once.

    A message may also set or clear a retained message. Each shard commits its part of a batch atomically.
    """

    pair: Pair

    def __init__(self) -> None:
        super().__init__()
        self.temporary = quick_directory()
        self.root = Path(self.temporary.name)
        self.path = self.root / "db"
        self.clock = Clock()
        self.kept_rules: set[PersistenceRule] = set()
        self.patches: list[Any] = [
            # only explicit retention runs may remove expired retained messages
            patch.object(RetainedExpiry, "_work", lambda *_: None),
        ]
        for each in self.patches:
            each.start()

    @initialize(shards=st.sampled_from([1, 3]))
    def begin(self, shards: int) -> None:
        self.shards = [Shard() for _ in range(shards)]
        self.persistent = "persistent" in self.pair.capabilities
        self._open(shards=shards)

    def _open(self, **arguments: Any) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # after a jump back, the last position lies in the future
            self.db = self.pair.open(
                self.path, clock=self.clock, monotonic=self.clock.monotonic, auto_compact=False, **arguments
            )
        self.jumped = 0
        self.ears = {text: Ear() for text in ("#", "$s", "a/+")}
        for text, ear in self.ears.items():
            hub = self.db._publisher.hub
            hub.listen(hub.feed(ts.TopicFilter(text)), ear)
        self.db._publisher.filters.load([(ts.TopicFilter("wanted"), 1)])  # in place of a durable session's subscription

    def teardown(self) -> None:
        if hasattr(self, "db"):
            self.db.close()
        for each in self.patches:
            each.stop()
        self.temporary.cleanup()

    # --- publishing ---

    @rule(
        rows=st.lists(ROWS, max_size=6),
        arrow=st.booleans(),
        value=st.none() | st.integers(0, 2),
        step=st.sampled_from([0, 1, SECOND - 1, SECOND, 600 * SECOND]),
        fault=faults(3),
    )
    def publish(self, rows: list[ts.Message], arrow: bool, value: int | None, step: int, fault: Fault | None) -> None:
        """Publish messages, in some calls with a state write, which is committed even if no message is stored."""
        self.clock.now += step
        if not self.persistent:
            fault = None
        state, after = {}, copy.deepcopy(self.shards)
        if value is not None:
            number = value % len(after)
            after[number].value = b"%d" % value
            state = {number: [ts.StateWrite(b"z", b"%d" % value)]}
        handed = ts.MessageBatch.from_messages(rows).to_arrow() if arrow else rows
        timed = [msgspec.structs.replace(row, timestamp=row.timestamp or self.clock.now) for row in rows]
        stored = [row for row in timed if self._is_stored(row)]
        self._take(after, timed)
        heard = {text: [row for row in timed if row not in stored and match(text, row.topic)] for text in self.ears}
        writes = [shard.writer.counters.batches for shard in self.db.storage.shards]
        for ear in self.ears.values():
            ear.heard.clear()
        result = None
        with striking(fault, self._engines(), self.path, self.root / "killed"):
            result = self.db.publish(handed, state=state)
        assert (result is None) == (fault is not None and fault.struck and not fault.kills)
        if result is None:
            assert not any(ear.heard for ear in self.ears.values())
        else:
            assert heard == {text: ear.heard for text, ear in self.ears.items()}
            assert (len(rows), len(stored), len(rows) - len(stored)) == (result.count, result.stored, result.routed)
            assert stored == result.batch.to_messages()
            assert [self.db.shard_of(row.client_id) for row in stored] == [one.shard for one in result.ids]
            idle = not stored and not state and not any(row.retain for row in rows)
            assert not idle or writes == [shard.writer.counters.batches for shard in self.db.storage.shards]
        self._follow(fault, after)

    def _engines(self) -> list[Any]:
        return [shard.writer.engine for shard in self.db.storage.shards]

    def _is_stored(self, row: ts.Message) -> bool:
        return (
            row.topic == "wanted"
            or row.properties in (asking("1"), asking("true"))
            or any(
                match(rule.topic_filter, row.topic)
                and rule.client_id in (None, row.client_id)
                and row.qos >= rule.least_qos
                for rule in self.kept_rules
            )
        )

    def _take(self, shards: list[Shard], rows: list[ts.Message]) -> None:
        """Apply published messages to these shards of the model."""
        for row in rows:
            if self._is_stored(row):
                shard = shards[self.db.shard_of(row.client_id)]
                shard.stored.append(row)
                shard.newest = max(shard.newest, self.clock.now)
        for topic, row in {row.topic: row for row in rows if row.retain}.items():
            retained = shards[self.db.shard_of(topic)].retained
            retained.pop(topic, None)
            if row.payload:
                since = shards[self.db.shard_of(row.client_id)].newest if self._is_stored(row) else self.clock.now
                seconds = None if row.properties is None else row.properties.message_expiry_interval
                retained[topic] = row, None if seconds is None else since + seconds * SECOND

    def _follow(self, fault: Fault | None, after: list[Shard]) -> None:
        """Update the model after a call; after a fault, each shard must have committed all of its part or nothing."""
        if fault is None or not (fault.kills or fault.struck):
            self.shards = after
            return
        self.db.close()
        if fault.kills:
            shutil.rmtree(self.path)
            (self.root / "killed").rename(self.path)
        self._open()
        there = [self._seen(number) == self._expected(shard) for number, shard in enumerate(after)]
        assert fault.struck or all(there)
        self.shards = [new if found else old for new, old, found in zip(after, self.shards, there, strict=True)]

    @rule(rows=st.lists(ROWS, max_size=3), bad=st.booleans(), shard=st.integers(0, 2))
    def publish_in_vain(self, rows: list[ts.Message], bad: bool, shard: int) -> None:
        """Publish a batch with an invalid message or a failing compare-and-set; nothing may be stored or routed."""
        for ear in self.ears.values():
            ear.heard.clear()
        if bad:
            with pytest.raises(ts.InvalidMessageError) as refused:
                self.db.publish([*rows, ts.Message("+", b"")])
            assert len(rows) == refused.value.index
        else:
            number = shard % len(self.shards)
            with pytest.raises(ts.StateConflictError):
                self.db.publish(rows, state={number: [ts.StateWrite(b"z", b"1", expect=b"other")]})
        assert not any(ear.heard for ear in self.ears.values())

    @rule(rule=RULES, adding=st.booleans())
    def change_rules(self, rule: PersistenceRule, adding: bool) -> None:
        """Add or remove a rule; the change applies from the next call on, and is stored."""
        if adding:
            self.db.persistence.add(rule.topic_filter, client_id=rule.client_id, least_qos=rule.least_qos)
        else:
            assert (rule in self.kept_rules) == self.db.persistence.remove(rule)
        self.kept_rules = self.kept_rules | {rule} if adding else self.kept_rules - {rule}
        assert self.kept_rules == set(self.db.persistence)

    # --- time, removing and reopening ---

    @rule(step=st.sampled_from([0, 1, SECOND - 1, SECOND, 2 * SECOND, 4_000 * SECOND]), run=st.booleans())
    def wait(self, step: int, run: bool) -> None:
        self.clock.now += step
        if run:
            self._run_retention()

    @rule(step=st.sampled_from([DAY, DAY, 3_000 * SECOND, -3_000 * SECOND, -DAY]), run=st.booleans())
    def jump(self, step: int, run: bool) -> None:
        self.clock.jump(step)
        self.jumped += step
        if run:
            self._run_retention()

    def _run_retention(self) -> None:
        """Run retention: exactly the retained messages that expired by elapsed time are removed."""
        now = self.clock.now - max(self.jumped, 0)
        gone = [shard.expired(now) for shard in self.shards]
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "the clock is", RuntimeWarning)
            assert sum(map(len, gone)) == self.db.retention.run().expired
            assert 0 == self.db.retention.run().expired
        for shard, topics in zip(self.shards, gone, strict=True):
            for topic in topics:
                del shard.retained[topic]

    @rule()
    def drop_what_is_stored(self) -> None:
        """Drop all stored messages; retained messages stay, whether they were stored or not."""
        self.db.drop_generation(self.db.add_generation() - 1)
        for shard in self.shards:
            shard.stored.clear()

    @rule()
    def reopen(self) -> None:
        if self.persistent:
            self.db.close()
            self._open()
            assert self.kept_rules == set(self.db.persistence)

    # --- looking up ---

    def _seen(self, number: int) -> object:
        rows = [pair for text in ("#", "$s") for pair in replayed(self.db, text)]
        found = [message for text in ("#", "$s") for message in self.db.retained(text)]
        state = self.db.state(number)
        return (
            [message for one, message in sorted(rows, key=lambda pair: pair[0]) if one.shard == number],
            sorted((m for m in found if self.db.shard_of(m.topic) == number), key=lambda message: message.topic),
            sorted(key for key, _ in state.scan(state_key(b"r"))),
            state.get(b"z"),
        )

    def _expected(self, shard: Shard) -> object:
        keys = sorted(state_key(b"r" + topic.encode()) for topic in shard.retained)
        return shard.stored, shard.found(self.clock.now), keys, shard.value

    @rule(text=st.sampled_from(FILTERS), limit=st.none() | st.integers(1, 3), after=st.none() | st.sampled_from(TOPICS))
    def look_up(self, text: str, limit: int | None, after: str | None) -> None:
        """Look up a page of retained messages: the first matches after a topic, in the order of topics."""
        found = sorted((m for shard in self.shards for m in shard.found(self.clock.now)), key=lambda m: m.topic)
        expected = [m for m in found if match(text, m.topic) and m.topic > (after or "")]
        assert expected[:limit] == self.db.retained(text, after=after, limit=limit)

    @invariant()
    def everything_is_as_in_the_model(self) -> None:
        for number, shard in enumerate(getattr(self, "shards", ())):
            assert self._expected(shard) == self._seen(number)
