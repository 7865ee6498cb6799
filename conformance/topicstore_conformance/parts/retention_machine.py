"""Retention and archives compared with a model, in random histories of stores, drops, clock jumps and faults.

The model knows when each message was stored, by elapsed time, and so which messages must be there. A message that is
gone must have been allowed to go, and never returns. All others are read unchanged, by filter and by time, from the
database or an archive, and a subscription receives each once.

A fault strikes within an archiving, a run or a drop: a write finds the disk full, or the process is killed there and
only a copy of the database and its archives remains. Repeating the call then completes it.
"""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable, Sequence
from itertools import count
from pathlib import Path
from typing import Any, TypeVar
from unittest.mock import patch

import attrs
import pytest
import topicstore as ts
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from topicstore.contract.positions import time_of
from topicstore.lifecycle import exporting
from topicstore.lifecycle.restoring import exported_generations

from topicstore_conformance.conditions.directories import quick_directory
from topicstore_conformance.faults.clock import START, Clock
from topicstore_conformance.faults.striking import Fault, striking
from topicstore_conformance.oracle.model import match
from topicstore_conformance.subjects.pairs import Pair, layouts_on

T = TypeVar("T")
SECOND = 1_000_000
DAY = 86_400
TOPICS = ["a/1", "a/2", "b/1", "b/c/1", "$SYS/load"]
FILTERS = ["#", "a/#", "+/1", "b/c/1", "$SYS/#", "none/#"]
SMALL = {"_MOST_TOPICS": 3, "_BATCH": 7, "_GROUP_ROWS": 10, "_PART_BYTES": 1_500}
"""Limits that make small exports have several files and row groups."""

MESSAGES = st.lists(
    st.tuples(st.sampled_from(TOPICS), st.sampled_from(["p", "q", "r"]), st.sampled_from([0, 0, 300])),
    min_size=1,
    max_size=20,
)
"""Messages to store: topic, publisher, and bytes of the payload besides its number."""
SETTINGS = st.fixed_dictionaries(
    {
        "max_age": st.sampled_from([None, 50, 200]),
        "rotate_every": st.sampled_from([None, 20]),
        "max_bytes": st.sampled_from([None, None, None, 2_000]),
        "archive_to": st.sampled_from([None, None, "../cold", "../warm"]),
        "filters": st.sampled_from([{}, {}, {"a/#": 30}, {"a/#": 30, "a/1": 90}, {"+/1": 400, "b/#": 10}]),
    }
)
FAULTS = st.none() | st.builds(Fault, st.sampled_from(["full", "before", "after"]), st.integers(1, 6))
"""Faults at writes of engines, or of all files, which are most of the writes of an archiving."""


@attrs.define
class Row:
    """A stored message, and the model's record of it."""

    message: ts.Message
    place: tuple[int, int]
    """Shard and position."""
    generation: int
    steady: int
    """Time of the store by a monotonic clock, in microseconds."""
    jumped: int
    """The clock's offset at the time of the store, in microseconds."""
    doubted: bool = False
    """Whether the clock was set later, and a new process, which couldn't know, trusted it."""
    gone: bool = False

    @property
    def time(self) -> int:
        return time_of(self.place[1])


class RetentionHistories(RuleBasedStateMachine):
    """Random histories; reads return every message that must be there exactly once, and no other message."""

    pair: Pair

    @initialize(shards=st.sampled_from([1, 2, 3]), jumps=st.booleans(), first=SETTINGS)
    def begin(self, shards: int, jumps: bool, first: dict[str, Any]) -> None:
        """Begin a history; if the clock never jumps, a run must remove every message above its maximum age."""
        self.jumps = jumps
        self.small = patch.multiple(exporting, **SMALL)  # type: ignore[call-overload]
        self.small.start()
        self.temporary = quick_directory()
        self.root = Path(self.temporary.name) / "root"
        self.root.mkdir()
        self.clock = Clock()
        self.jumped = 0
        self.settings = ts.RetentionSettings()
        self.rows: dict[int, Row] = {}
        self.generations, self.archived = [1], dict[int, str]()
        self.numbers, self.exports = count(), count()
        self.place: Any = 0
        self.followed: set[int] = set()
        fitting = layouts_on(self.pair.backend)
        self.layouts = [self.pair.layout, *(name for name in ("block", "reference") if name in fitting)]
        self.persistent = "persistent" in self.pair.capabilities
        self.open(shards=shards)
        self.configure(first)

    def open(self, **how: Any) -> None:
        clocks: dict[str, Any] = {"clock": self.clock, "monotonic": self.clock.monotonic}
        self.db = self.pair.open(self.root / "db", auto_compact=False, **clocks, **how)
        self.db.retention.stop()
        self.follower = self.db.subscribe("#", self.place)

    def teardown(self) -> None:
        if hasattr(self, "db"):
            try:
                if sys.exc_info()[0] is None:
                    self.settle()
            finally:
                self.small.stop()
                self.db.close()
                self.temporary.cleanup()

    # --- messages, and time ---

    @rule(drawn=MESSAGES)
    def store(self, drawn: list[tuple[str, str, int]]) -> None:
        messages = [
            ts.Message(topic, b"%d %s" % (next(self.numbers), bytes(size)), publisher, 1)
            for topic, publisher, size in drawn
        ]
        result = self.db.store(messages)
        for message, id_ in zip(result.batch.to_messages(), result.ids, strict=True):
            place = id_.shard, id_.position
            row = Row(message, place, self.generations[-1], self.clock.monotonic(), self.jumped)
            self.rows[number_of(message)] = row

    @rule(seconds=st.sampled_from([1, 15, 31, 60, 250]))
    def wait(self, seconds: int) -> None:
        self.clock.now += seconds * SECOND

    @precondition(lambda self: self.jumps)
    @rule(seconds=st.sampled_from([100, 3_600, DAY]), back=st.booleans())
    def jump(self, seconds: int, back: bool) -> None:
        """Set the wall clock to another time."""
        by = (-seconds if back else seconds) * SECOND
        self.clock.jump(by)
        self.jumped += by

    @precondition(lambda self: self.jumps)
    @rule(drawn=MESSAGES, seconds=st.sampled_from([100, DAY]))
    def store_while_set_back(self, drawn: list[tuple[str, str, int]], seconds: int) -> None:
        """Store while the clock is behind, and correct the clock before a run."""
        self.jump(seconds, back=True)
        self.store(drawn)
        self.jump(seconds, back=False)

    # --- retention ---

    @rule(how=SETTINGS)
    def configure(self, how: dict[str, Any]) -> None:
        self.settings = self.db.retention.set(**how, when_full="drop")

    @rule(drawn=MESSAGES, seconds=st.sampled_from([1, 21, 31, 60]))
    def turn(self, drawn: list[tuple[str, str, int]], seconds: int) -> None:
        """Make the most frequent steps: store, let time pass, and run retention."""
        self.store(drawn)
        self.wait(seconds)
        self.run(None, files=False)

    @rule(fault=FAULTS, files=st.booleans())
    def run(self, fault: Fault | None, files: bool) -> None:
        """Run retention, which removes exactly the due messages; after an interruption, the next run completes it."""
        before, place = set(self.generations), self.settings.archive_to
        report = self.call(fault, self.db.retention.run, files=files)
        self.adopt()
        if report is None:
            report = self.db.retention.run()
            self.adopt()
        elif fault is None or not fault.struck:
            assert set(report.dropped) == before - set(self.generations)
        assert not report.archived or {self.archived[number] for number in report.archived} == {place}
        self.check_due()
        again = self.db.retention.run()
        idle = (None, (), (), {}) == (again.rotated, again.dropped, again.archived, again.deleted)
        assert idle or self.jumps  # a first run may only warn of the clock's jump, and a second one trust the clock
        self.adopt()

    def limit(self, row: Row) -> float | None:
        """Return the seconds for which a message stays, or None for ever."""
        ages = [age for text, age in self.settings.filters.items() if match(text, row.message.topic)]
        ages = ages or [self.settings.max_age]
        return None if None in ages else max(age for age in ages if age is not None)

    @property
    def whole(self) -> float | None:
        """The seconds after which all of a generation is removed or archived, or None for never."""
        ages = [self.settings.max_age, *({} if self.settings.archive_to else self.settings.filters).values()]
        return None if None in ages else max(age for age in ages if age is not None)

    def goes_by_filter(self, row: Row) -> bool:
        """Return whether a message is deleted before its generation when it is old enough."""
        limit = self.limit(row)
        earlier = limit is not None and (self.whole is None or limit < self.whole)
        return bool(self.settings.filters) and earlier and row.generation not in self.archived

    def may_go(self, row: Row) -> bool:
        """Return whether a run may remove a message."""
        age = (self.clock.monotonic() - row.steady) / SECOND
        limit = self.limit(row)
        if limit is not None and self.goes_by_filter(row) and (row.doubted or age > limit):
            return True
        if self.settings.archive_to is not None:
            return False
        if self.settings.max_bytes is not None and row.generation not in self.archived:
            return True
        return self.whole is not None and (row.doubted or age > self.whole)

    def adopt(self) -> None:
        """Mark messages as removed, after checking that retention was allowed to remove them."""
        there = set(self.read("#") + self.read("$SYS/#"))
        for number in self.live() - there:
            assert self.may_go(self.rows[number]), self.rows[number]
            self.rows[number].gone = True
        self.take_generations()

    def take_generations(self) -> None:
        """Update the generations; a generation must not return, nor leave its archive."""
        before = self.archived
        generations = [one.number for one in self.db.generations()]
        assert not [n for n in generations if n < self.generations[-1] and n not in self.generations]
        self.generations = generations
        self.archived = {one.generation: f"../{one.path.name}" for one in self.db.archives}
        assert set(before) & set(generations) <= set(self.archived)

    def check_due(self) -> None:
        """Check that all due messages were removed, unless the clock was set."""
        oldest = 0 if self.whole is None else self.clock.now - self.whole * SECOND
        for number in self.generations[:-1] if not self.jumps else ():
            stored = [row for row in self.rows.values() if row.generation == number]
            rows = [row for row in stored if not row.gone]
            for row in rows:
                limit = self.limit(row)
                late = limit is not None and row.time < self.clock.now - limit * SECOND
                assert not (late and self.goes_by_filter(row))
            # the newest message ever stored in a generation determines its age
            if rows and max(row.time for row in stored) < oldest:
                assert number in self.archived
                assert self.settings.archive_to is not None
        if self.settings.max_bytes is not None:
            live = [one for one in self.db.generations() if one.number not in self.archived]
            assert len(live) == 1 or sum(one.live_bytes for one in live) <= self.settings.max_bytes

    # --- requests ---

    @rule(layout=st.integers(0, 3))
    def add_generation(self, layout: int) -> None:
        self.generations.append(self.db.add_generation(self.layouts[layout % len(self.layouts)]))

    @precondition(lambda self: len(self.generations) > 1)
    @rule(which=st.integers(0, 9), fault=FAULTS)
    def drop(self, which: int, fault: Fault | None) -> None:
        """Drop a local or archived generation; after an interruption, the drop is completed in all shards."""
        number = self.generations[which % (len(self.generations) - 1)]
        dropped = self.call(fault, lambda: self.db.drop_generation(number))
        assert dropped or fault is not None
        if dropped is None:
            self.db.drop_generation(number)
        assert not self.db.drop_generation(number)
        for row in self.rows.values():
            row.gone |= row.generation == number
        self.take_generations()
        assert number not in self.generations

    @precondition(lambda self: len(self.generations) > 1)
    @rule(
        some=st.lists(st.integers(0, 9), max_size=3),
        place=st.sampled_from(["../cold", "../cold", "../warm"]),
        fault=FAULTS,
        files=st.booleans(),
    )
    def archive(self, some: list[int], place: str, fault: Fault | None, files: bool) -> None:
        """Archive generations, or move them to another archive; each stays readable throughout."""
        sealed = self.generations[:-1]
        chosen = {sealed[which % len(sealed)] for which in some}
        wanted = chosen or {number for number in sealed if number not in self.archived}

        def archive() -> object:
            return self.db.archives.archive(self.root / place[3:], generations=sorted(chosen) or None)

        if self.call(fault, archive, files=files) is None:
            self.take_generations()
            self.check_all()
            archive()
        self.take_generations()
        assert {place} >= {self.archived[number] for number in wanted}

    @precondition(lambda self: len(self.generations) > 1)
    @rule()
    def export(self) -> None:
        """Export all sealed generations, local or archived, and compare the rows."""
        target = self.root / f"export-{next(self.exports)}"
        self.db.archives.export(target)
        for exported in exported_generations(target):
            found = [number_of(one) for batch in exported.rows() for one in batch.to_messages()]
            assert sorted(found) == sorted(n for n in self.live() if self.rows[n].generation == exported.number)

    @precondition(lambda self: self.archived)
    @rule(seconds=st.sampled_from([0, 250]))
    def unmount(self, seconds: int) -> None:
        """Move an archive away during a run, which must not recreate it, and then move it back."""
        place = next(iter(self.archived.values()))
        self.clock.now += seconds * SECOND
        (self.root / place[3:]).rename(self.root / "away")
        self.db.retention.run()
        assert not (self.root / place[3:]).exists()
        (self.root / "away").rename(self.root / place[3:])
        self.adopt()

    @rule(text=st.sampled_from(FILTERS))
    def delete(self, text: str) -> None:
        """Delete by filter, which is refused as a whole if archived messages match."""
        if any(row.generation in self.archived and not row.gone for row in self.rows.values()):
            with pytest.raises(ts.GenerationError):
                self.db.delete(text)
        else:
            gone = self.found(text)
            assert len(gone) == self.db.delete(text)
            for number in gone:
                self.rows[number].gone = True

    # --- processes ---

    def call(self, fault: Fault | None, call: Callable[[], T], *, files: bool = False) -> T | None:
        """Return the result of a call, or None after a fault; a new process opens the database if needed."""
        lasting = self.persistent
        fault = fault if fault is None or lasting or not fault.kills else None
        copy, result = self.root.with_name("copy"), None
        engines = [shard.writer.engine for shard in self.db.storage.shards if lasting]
        with striking(fault, engines, self.root, copy, files=files):
            result = call()
        if fault is None or not (fault.kills or fault.struck):
            return result
        if fault.kills or any(shard.writer.failure is not None for shard in self.db.storage.shards):
            self.leave()
            if fault.kills:
                shutil.rmtree(self.root)
                copy.rename(self.root)
            self.open()
        return None

    @precondition(lambda self: self.persistent)
    @rule()
    def reopen(self) -> None:
        self.leave()
        self.open()

    def leave(self) -> None:
        self.place = self.follower.place
        self.follower.close()
        self.db.close()
        for row in self.rows.values():
            row.doubted |= row.jumped != self.jumped

    # --- reading ---

    def live(self) -> set[int]:
        return {number for number, row in self.rows.items() if not row.gone}

    def found(self, text: str, start: int = 0, until: int | None = None) -> list[int]:
        """Return the numbers of the messages that a replay should find, in order of positions."""
        rows = [(number, row) for number, row in self.rows.items() if not row.gone and match(text, row.message.topic)]
        rows = [(number, row) for number, row in rows if start <= row.time and (until is None or row.time < until)]
        return [number for number, row in sorted(rows, key=lambda one: one[1].place[::-1])]

    def read(self, text: str, *times: int | None, **how: Any) -> list[int]:
        """Return the numbers of the messages that a replay finds, after comparing them with the stored messages."""
        found = list(self.db.replay(text, *times, **how))  # type: ignore[arg-type]
        numbers = [number_of(message) for message in found]
        assert found == [self.rows[number].message for number in numbers]
        assert len(numbers) == len(set(numbers))
        assert self.live() >= set(numbers)
        return numbers

    @rule(
        text=st.sampled_from(FILTERS),
        which=st.lists(st.integers(0, 1_000), min_size=2, max_size=2),
        order=st.sampled_from(["any", "time"]),
        size=st.sampled_from([1, 3, 1_000]),
    )
    def replay(self, text: str, which: list[int], order: str, size: int) -> None:
        """Replay a filter between the times of two messages."""
        times = sorted(row.time for row in self.rows.values()) or [START]
        start, until = sorted(times[number % len(times)] for number in which)
        for end in (until, None):
            found, expected = self.read(text, start, end, order=order, batch_size=size), self.found(text, start, end)
            assert sorted(found) == sorted(expected)
            if order == "time":
                assert [self.rows[n].place[1] for n in found] == [self.rows[n].place[1] for n in expected]

    @rule(limit=st.sampled_from([1, 5, 1_000]))
    def follow(self, limit: int) -> None:
        """Fetch the next messages of the subscription; no message may come twice."""
        self.take(self.follower.fetch(limit, timeout=0).messages)

    def take(self, messages: Sequence[ts.Message]) -> None:
        numbers = [number_of(message) for message in messages]
        assert len(numbers) == len(set(numbers))
        assert not self.followed & set(numbers)
        assert self.live() >= set(numbers)
        self.followed.update(numbers)

    @invariant()
    def check_all(self) -> None:
        if hasattr(self, "db"):
            for text in ("#", "$SYS/#"):
                assert sorted(self.read(text)) == sorted(self.found(text))

    def settle(self) -> None:
        """Read the subscription to its end, verify the database, and let all messages expire."""
        while (batch := self.follower.fetch(timeout=0)).messages or batch.dropped:
            self.take(batch.messages)
        assert self.followed >= set(self.found("#"))
        report = self.db.verify()
        assert ([], len(self.live())) == (report.damages, report.messages)
        self.configure({"max_age": 50, "rotate_every": 20, "max_bytes": None, "archive_to": None, "filters": {}})
        self.clock.now += 2 * DAY * SECOND
        for _ in range(3):
            self.clock.now += 51 * SECOND
            self.run(None, files=False)
        assert set() == self.live()


def number_of(message: ts.Message) -> int:
    return int(message.payload.split()[0])
