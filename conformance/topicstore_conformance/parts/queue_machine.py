"""A queue compared with a list, in random histories of appends, reads, commits, bounds and restarts, with faults."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar
from unittest.mock import patch

import attrs
import msgspec
import pytest
import topicstore as ts
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from topicstore.contract.errors import QuotaExceededError, ShardReadOnlyError
from topicstore.queues import queue as queues
from topicstore.shard.records import GenerationRecord

from topicstore_conformance.conditions.directories import quick_directory
from topicstore_conformance.faults.clock import Clock
from topicstore_conformance.faults.striking import Fault, faults, striking
from topicstore_conformance.subjects.pairs import Pair

T = TypeVar("T")
GENERATION, LOOK = 150, 3
"""Small limits: bytes after which a queue begins a generation, and number of messages whose sizes it reads at once."""
PROPERTIES = [None, None, ts.Properties(correlation_data=b"\0", user_properties=(("a", "b"), ("a", "c")))]
MESSAGES = st.builds(
    ts.Message,
    st.sampled_from(["t", "$SYS/x", "é/ü", "/"]),
    st.integers(0, 31).map(bytes),
    st.sampled_from(["", "me", "é"]),
    st.integers(0, 2),
    st.booleans(),
    st.sampled_from([None, None, 7]),
    st.sampled_from(PROPERTIES),
)
MOST, MOST_BYTES = st.none() | st.integers(1, 12), st.none() | st.integers(10, 500)
OVERFLOW = st.sampled_from(["refuse", "drop_oldest", "drop_newest"])
BOUNDS = {"max_messages": MOST, "max_bytes": MOST_BYTES, "overflow": OVERFLOW}
SHARE = st.sampled_from([0, 0.2, 0.5, 0.8, 1, 1])


def size_of(message: ts.Message) -> int:
    """Return the number of bytes by which a short message counts towards `max_bytes`."""
    return 5 + len(message.topic.encode()) + len(message.client_id.encode()) + len(message.payload)


@attrs.frozen
class Model:
    """The state of a queue: messages with their ids or None, the number of dropped messages, and the bounds."""

    held: tuple[tuple[int | None, ts.Message], ...] = ()
    dropped: int = 0
    bounds: Mapping[str, Any] = {"max_messages": None, "max_bytes": None, "overflow": "refuse"}

    @property
    def bytes(self) -> int:
        return sum(size_of(message) for _, message in self.held)

    @property
    def over(self) -> bool:
        most, most_bytes = self.bounds["max_messages"], self.bounds["max_bytes"]
        return len(self.held) > (most or 10**9) or self.bytes > (most_bytes or 10**9)

    def append(self, messages: Sequence[ts.Message]) -> Model | None:
        """Return the queue after an append, with None as ids of new messages; None if the queue refuses the append."""
        found, overflow = self, self.bounds["overflow"]
        for message in messages:
            more = attrs.evolve(found, held=(*found.held, (None, message)))
            if overflow == "drop_newest" and more.over:
                break
            if overflow != "drop_oldest" or size_of(message) <= (self.bounds["max_bytes"] or 10**9):
                found = more
        if overflow == "refuse" and found.over:
            return None
        while overflow == "drop_oldest" and found.over:
            found = found.without(1)
        return attrs.evolve(found, dropped=self.dropped + len(self.held) + len(messages) - len(found.held))

    def with_ids(self, ids: Sequence[int]) -> Model:
        """Return the queue after assigning ids to its last messages, which have none yet."""
        known = [pair for pair in self.held if pair[0] is not None]
        assert len(ids) == len(self.held) - len(known)
        new = [message for _, message in self.held[len(known) :]]
        return attrs.evolve(self, held=(*known, *zip(ids, new, strict=True)))

    def without(self, count: int) -> Model:
        """Return the queue without its oldest messages."""
        return attrs.evolve(self, held=self.held[count:])


class QueueHistories(RuleBasedStateMachine):
    """Random histories; a queue equals its model, and a call with a fault takes effect as a whole or not at all."""

    pair: Pair

    def __init__(self) -> None:
        super().__init__()
        self.temporary = quick_directory()
        self.root = Path(self.temporary.name)
        self.path = self.root / "db"
        self.clock = Clock()
        self.model = Model()
        self.read_upto = self.appended = 0
        self.patch = patch.multiple(queues, _GENERATION_BYTES=GENERATION, _LOOK=LOOK)
        self.patch.start()

    @initialize(bounds=st.fixed_dictionaries(BOUNDS))
    def begin(self, bounds: dict[str, Any]) -> None:
        self.db = self.pair.open(self.path, clock=self.clock, auto_compact=False)
        self.queue = self.db.queues.open("q", **bounds)
        self.model = attrs.evolve(self.model, bounds={**self.model.bounds, **bounds})

    def teardown(self) -> None:
        if hasattr(self, "db"):
            self.db.close()
        self.patch.stop()
        self.temporary.cleanup()

    # --- calls that write ---

    @rule(drawn=st.lists(MESSAGES, min_size=1, max_size=6), arrow=st.booleans(), fault=faults())
    def append(self, drawn: list[ts.Message], arrow: bool, fault: Fault | None) -> None:
        messages = [msgspec.structs.replace(m, payload=m.payload + self._number()) for m in drawn]
        self.clock.now += 1_000
        handed = ts.MessageBatch.from_messages(messages).to_arrow() if arrow else messages
        timed = [msgspec.structs.replace(m, timestamp=m.timestamp or self.clock.now) for m in messages]
        after = self.model.append(timed)
        if after is None:
            with pytest.raises(QuotaExceededError):
                self.queue.append(handed)
            return
        before = self._generations()[-1]
        ids = self._call(fault, lambda: self.queue.append(handed), after)
        if ids is not None:
            self._adopt(after.with_ids(ids))
            assert (before.live_bytes >= GENERATION) == (self._generations()[-1].number > before.number)

    def _has_dropped_what_was_passed(self) -> bool:
        return all((one.last_position or 0) > self.queue._record.head for one in self._generations()[:-1])

    def _generations(self) -> list[GenerationRecord]:
        return self.queue._storage.shards[0].generations.listed()

    def _number(self) -> bytes:
        self.appended += 1
        return self.appended.to_bytes(2, "big")

    @rule(drawn=st.lists(MESSAGES, max_size=3))
    def append_badly(self, drawn: list[ts.Message]) -> None:
        """Append messages of which one is invalid, so that the whole call is refused."""
        with pytest.raises(ts.InvalidMessageError) as refused:
            self.queue.append([*drawn, ts.Message("#", b"")])
        assert len(drawn) == refused.value.index

    @rule(share=SHARE, beyond=st.sampled_from([0, 0, 1, 2**64]), fault=faults())
    def commit(self, share: float, beyond: int, fault: Fault | None) -> None:
        """Commit up to an id, existing or not; then repeat the commit, which must have no effect."""
        count = int(len(self.model.held) * share)
        upto = min((self.model.held[count - 1][0] or 0) + beyond if count else 0, 2**64 - 1)
        gone = sum((one or 0) <= upto for one, _ in self.model.held)
        after = self.model.without(gone)
        done = self._call(fault, lambda: self.queue.commit(upto), after)
        if done is not None:
            assert gone == done
            assert 0 == self.queue.commit(upto)
            assert not gone or self._has_dropped_what_was_passed()
            removed = [one or 0 for one, _ in self.model.held[:gone]]
            self._adopt(after)
            # Not up to ``upto``: messages that are appended later may have lower ids.
            self.read_upto = max([self.read_upto, *removed])

    @rule(bounds=st.fixed_dictionaries({}, optional=BOUNDS), fault=faults(1))
    def open_again(self, bounds: dict[str, Any], fault: Fault | None) -> None:
        """Change bounds by opening the queue again; omitted bounds stay, and None removes one."""
        after = attrs.evolve(self.model, bounds={**self.model.bounds, **bounds})
        queue = self._call(fault, lambda: self.db.queues.open("q", **bounds), after)
        if queue is not None:
            assert queue is self.queue
            self._adopt(after)

    def _call(self, fault: Fault | None, call: Callable[[], T], after: Model) -> T | None:
        """Return the result of a call, or None after a fault, with the database reopened."""
        result = None
        with striking(fault, [self.queue._storage.shards[0].writer.engine], self.path, self.root / "killed"):
            result = call()
        if fault is None or not (fault.kills or fault.struck):
            return result
        if fault.kills:
            self.db.close()
            shutil.rmtree(self.path)
            (self.root / "killed").rename(self.path)
            self._open()
        else:
            assert result is None
            with pytest.raises(ShardReadOnlyError):
                self.db.queues.open("q", max_messages=99)
        possible = [self.model, after] if fault.struck else [after]
        if not fault.kills and fault.write == 1:
            possible = [self.model]  # later writes only drop generations that the first write has made obsolete
        self._adopt(next(model for model in possible if self._is(model)))
        if not fault.kills:
            self.reopen()
        return None

    def _is(self, model: Model) -> bool:
        """Return whether the queue equals a model, in which an id may be None."""
        found = self._all()
        return (
            [message for _, message in model.held] == [message for _, message in found]
            and all(known in (None, one) for (known, _), (one, _) in zip(model.held, found, strict=True))
            and (model.dropped, model.bytes) == (self.queue.dropped, self.queue.bytes)
            and model.bounds == {name: getattr(self.queue.info(), name) for name in model.bounds}
        )

    def _adopt(self, model: Model) -> None:
        ids = [one for one, _ in self._all()]
        self.model = model.with_ids([ids[row] for row, (one, _) in enumerate(model.held) if one is None])

    # --- reading ---

    def _all(self, after: int = 0, limit: int = 1_000) -> list[tuple[int, ts.Message]]:
        """Return the messages after an id, without changing the read position."""
        found: list[tuple[int, ts.Message]] = []
        while batch := self.queue.peek(limit, after=after):
            found += zip(batch.ids, batch.messages, strict=True)
            after = batch.last
        return found

    @rule(limit=st.integers(1, 8), anew=st.sampled_from([False, False, False, True]))
    def read(self, limit: int, *, anew: bool) -> None:
        """Read from the end of the last read, or from the head; a read returns a message if there is any."""
        if anew:
            self.queue.rewind()
            self.read_upto = 0
        expected = [pair for pair in self.model.held if (pair[0] or 0) > self.read_upto]
        batch = self.queue.read(limit)
        assert expected[: len(batch)] == list(zip(batch.ids, batch.messages, strict=True))
        assert min(len(expected), 1) <= len(batch) <= limit
        if batch:
            self.read_upto = batch.last

    @rule(share=SHARE, limit=st.integers(1, 8))
    def peek(self, share: float, limit: int) -> None:
        """Peek at the messages after an id, or from the head if the id is lower."""
        row = int(len(self.model.held) * share)
        after = (self.model.held[row - 1][0] or 0) if row else 0
        assert list(self.model.held[row:]) == self._all(after, limit)

    # --- the whole database ---

    @rule()
    def reopen(self) -> None:
        """Reopen the database; reads begin at the first message that wasn't committed."""
        self.db.close()
        self._open()
        assert self._is(self.model)

    def _open(self) -> None:
        self.db = self.pair.open(self.path, clock=self.clock, auto_compact=False)
        listed = self.db.queues["q"]
        self.queue = self.db.queues.open("q")
        assert attrs.evolve(listed, disk_bytes=0) == attrs.evolve(self.queue.info(), disk_bytes=0)
        assert [] == self.queue.damages()
        assert self._has_dropped_what_was_passed()
        self.read_upto = 0

    @invariant()
    def figures(self) -> None:
        """Check that the counts equal the model's, and that the database itself has none of the queue's messages."""
        if not hasattr(self, "db"):
            return
        model, queue = self.model, self.queue
        assert (len(model.held), model.bytes, model.dropped) == (len(queue), queue.bytes, queue.dropped)
        assert 0 == self.db.info().messages
