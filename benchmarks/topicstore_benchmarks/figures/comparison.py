"""Every layout on RocksDB, SQLite, and the engine alone, with one set of messages.

A round stores the set into each side, in batches of 1,000 messages, closes it, and opens it again, so
that everything is read from files. Then it runs each task, every replay of it on one side after the
other. `block` takes part twice, as stored and after `Database.compact`; nothing merges by itself. A
small round comes first: it warms up, and compares the replayed messages with the stored ones; the
other rounds only count them.
"""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, closing
from functools import partial
from itertools import cycle, islice
from pathlib import Path

import attrs

from topicstore_benchmarks.contenders.contender import Contender
from topicstore_benchmarks.contenders.database import DatabaseContender
from topicstore_benchmarks.contenders.raw_engine import RawEngine, RawRocksdb
from topicstore_benchmarks.contenders.sqlite import SqliteContender
from topicstore_benchmarks.harness.measuring import replayed, stored
from topicstore_benchmarks.timing import consume, timed

from .message_sets import ALL, SETS, MessageSet, Task

__all__ = ["ENGINE", "MERGE", "MERGED", "SQLITE", "STORE", "Comparison", "Round", "compare"]

ENGINE, SQLITE, MERGED = "engine", "SQLite", "block, merged"
"""Names of sides. All others have the name of their layout."""
STORE, MERGE = "store", "merge"
"""Tasks besides those of the message sets."""

_MERGING = "block"
"""The layout whose messages are merged."""
_RUNS, _ENOUGH = 9, 0.3
"""The most replays of a task in a round, and the seconds after which a side starts no more."""

_WARM_UP = 20
"""The small round has one of this many messages."""

Tell = Callable[[str], None]


@attrs.frozen(kw_only=True)
class Round:
    """The results of one round."""

    seconds: Mapping[tuple[str, str], float]
    """Seconds by side and task."""
    disk_bytes: Mapping[str, int]
    """Bytes on disk by side, except the engine."""


@attrs.frozen(kw_only=True)
class Comparison:
    """The results of all rounds with a message set."""

    data: MessageSet
    """The message set without its messages, so that only one set at a time is in memory."""
    rounds: tuple[Round, ...]

    @property
    def sides(self) -> list[str]:
        """All sides except the engine."""
        return list(self.rounds[0].disk_bytes)

    def median(self, value: Callable[[Round], float]) -> float:
        """Return the median of a value over the rounds."""
        return statistics.median(map(value, self.rounds))


def compare(name: str, messages: int, layouts: Sequence[str], rounds: int, tell: Tell) -> Comparison:
    """Make a set of at most ``messages`` messages, and run the rounds with it. ``tell`` is called with progress."""
    ways: dict[str, str] = {}
    tell(f"{name}: make the messages")
    data = SETS[name](messages)
    small = SETS[name](messages // _WARM_UP)
    _round(small, layouts, {}, partial(_say, tell, f"{name}, small round"), check_contents=True)
    found = [
        _round(data, layouts, ways, partial(_say, tell, f"{name}, round {number} of {rounds}"))
        for number in range(1, rounds + 1)
    ]
    return Comparison(data=attrs.evolve(data, batches=[]), rounds=tuple(found))


def _say(tell: Tell, label: str, text: str) -> None:
    tell(f"{label}: {text}")


def _round(
    data: MessageSet, layouts: Sequence[str], ways: dict[str, str], tell: Tell, *, check_contents: bool = False
) -> Round:
    with tempfile.TemporaryDirectory(prefix="topicstore-bench-") as name:
        directory = Path(name)
        sides: list[Contender] = [DatabaseContender(layout, directory / layout, layout) for layout in layouts]
        sides.insert(
            1, SqliteContender(SQLITE, directory / SQLITE, ways=ways)
        )  # it takes longest, so engine and block are next to it
        return _Run(data, directory, tell).whole(sides, check_contents=check_contents)


class _Run:
    """A round that is running."""

    def __init__(self, data: MessageSet, directory: Path, tell: Tell) -> None:
        self._data = data
        self._directory = directory / ENGINE
        self._tell = tell
        self._seconds: dict[tuple[str, str], float] = {}

    def whole(self, sides: Sequence[Contender], *, check_contents: bool) -> Round:
        """Run the whole round."""
        self._engine(STORE, RawEngine.put)
        readers = [reader for side in sides for reader in self._stored(side)]
        self._engine(ALL, RawEngine.scan)
        with ExitStack() as opened:
            for reader in readers:
                reader.open()
                opened.callback(reader.close)
            self._tell("read everything once")  # warms caches, and lets engines finish the work of opening
            for reader in readers:
                consume(reader.replay("#"))
            for task in self._data.tasks:
                self._tell(f"replay {task.name}")
                for side, seconds in _replay(readers, task).items():
                    self._seconds[side, task.name] = seconds
            if check_contents:
                self._tell("compare with what was stored")
                for reader in readers:
                    for task in self._data.tasks:
                        answer = task.answers[0]
                        answer.check(reader.replay(answer.topic_filter, answer.start))
        return Round(seconds=self._seconds, disk_bytes={reader.name: reader.disk_bytes() for reader in readers})

    def _engine(self, task: str, work: Callable[[RawEngine], float]) -> None:
        self._tell(f"{ENGINE}, {task}")
        with closing(RawRocksdb(self._directory, self._data.messages)) as raw:
            self._seconds[ENGINE, task] = work(raw)

    def _stored(self, side: Contender) -> list[Contender]:
        """Store into a side; return it and, for `block`, also a merged copy."""
        self._tell(f"{side.name}, {STORE}")
        with closing(side):
            side.open()
            self._seconds[side.name, STORE] = stored(side, self._data.batches)
        if not (isinstance(side, DatabaseContender) and side.name == _MERGING):
            return [side]
        self._tell(f"{MERGED}, {MERGE}")
        with closing(side.copy(MERGED)) as merged:
            merged.open()
            self._seconds[MERGED, MERGE] = timed(merged.compact)
        return [side, merged]


def _replay(readers: Sequence[Contender], task: Task) -> dict[str, float]:
    """Run the requests of a task, each on one side after the other; return the median of each side."""
    times: dict[str, list[float]] = {}
    for reader in readers:
        reader.prepare([answer.topic_filter for answer in task.answers])
        times[reader.name] = []
    for answer in islice(cycle(task.answers), _RUNS):
        for reader in readers:
            if sum(times[reader.name]) < _ENOUGH:
                times[reader.name].append(replayed(reader, answer).all)
    return {side: statistics.median(taken) for side, taken in times.items()}
