"""The phases of a worker, and their measurements.

**store**: Stores all messages in batches, which are prepared before the clock starts. A batch doesn't span two parts of
the data set, so batches of large payloads are small. The first fiftieth of the batches, at most five, warms up and
isn't counted. Then the contender is closed, its files are measured, and it is opened again.
**replays**: A run replays the filters of the phase one after the other. The first run warms up: its messages are
compared with the stored ones, and it isn't timed. The other runs only count messages. The result is the median over
these runs. The time to the first message is the median over all replays.
**reopen**: Opens the contender, and reads the first message of a replay that starts near the end.
**mixed**: One thread stores batches of 100 new messages, or about 256 KiB, at a fixed rate. Another thread of the same
process replays one device after the other. A store's latency begins when the batch is due, so that a pause counts for
all delayed batches. The phase takes at most three times as long as planned. Afterwards all messages are compared with
the stored ones. A 99.9th percentile is reported only for a thousand values or more.
"""

from __future__ import annotations

import gc
import math
import statistics
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import cycle, islice
from typing import Any

import attrs
import msgspec
import numpy as np
from topicstore import Message

from topicstore_benchmarks.contenders.contender import Contender, Limit
from topicstore_benchmarks.results import DEVICE, LATE_START, REPLAY_ALL, STORE, compacted
from topicstore_benchmarks.timing import consume, timed

from .dataset import Dataset, ExpectedReplay
from .plan import Settings

__all__ = ["PhaseResult", "Phases", "Skipped"]

_WARM_UP_BATCHES, _WARM_UP_SHARE = 5, 0.02
_MIXED_BATCH, _MIXED_BYTES = 100, 256 << 10
"""The most messages, and approximately the most bytes, of a batch of ``mixed``."""
_MIXED_PATIENCE = 3.0
"""The multiple of the planned seconds after which ``mixed`` ends."""
_ENOUGH = 1_000
"""The least number of values for which a 99.9th percentile is reported."""
_CANNOT = {
    "filters": "it has no filters",
    "start": "it can't start at a time",
    "mixed": "it can't be read while it is written",
}
_NOTHING_TO_COMPACT = "it has nothing to compact"


class Skipped(Exception):  # noqa: N818 - not an error
    """Raised if the contender can't run a phase; the text says why."""


@attrs.frozen
class PhaseResult:
    """The result of a phase."""

    values: dict[str, float]
    """The values by metric."""
    messages: int
    """The number of messages that the phase stored or read."""


class Phases:
    """The phases of one contender with one data set, which must be run in the order of `results.phases`."""

    def __init__(self, contender: Contender, data: Dataset, settings: Settings) -> None:
        self._contender = contender
        self._data = data
        self._settings = settings
        self._compacted = False

    def run(self, phase: str) -> PhaseResult:
        """Run a phase. Raises `Skipped`, `WrongReplayError`, and any error of the contender."""
        others = {STORE: self._store, "reopen": self._reopen, "compact": self._compact, "mixed": self._mixed}
        if phase in others:
            return others[phase]()
        requests = self._data.about.expected
        if phase not in requests and not self._compacted:
            raise Skipped(_NOTHING_TO_COMPACT)
        return self._replays(
            phase if phase in requests else next(name for name in requests if compacted(name) == phase)
        )

    def _need(self, ability: str) -> None:
        if ability not in self._contender.abilities:
            raise Skipped(_CANNOT[ability])

    # --- store ---

    def _store(self) -> PhaseResult:
        contender, counted, seconds = self._contender, 0, 0.0
        messages = self._data.about.messages
        batches_in_all = -(-messages // self._settings.batch)
        left = min(_WARM_UP_BATCHES, math.ceil(batches_in_all * _WARM_UP_SHARE), batches_in_all - 1)
        contender.open()
        for chunk in self._data.chunks():
            batches = [chunk[at : at + self._settings.batch] for at in range(0, len(chunk), self._settings.batch)]
            warming, counting = batches[:left], batches[left:]
            left -= len(warming)
            _stored(contender, self._ready(warming))
            seconds += _stored(contender, self._ready(counting))
            counted += sum(map(len, counting))
        if isinstance(contender, Limit):
            seconds += timed(contender.finish)
        contender.close()
        values = {"seconds": seconds, "messages_per_second": counted / seconds, **self._disk(messages)}
        contender.open()
        return PhaseResult(values, counted)

    def _ready(self, batches: Sequence[list[Message]]) -> Sequence[Any]:
        """Return batches in the form that the contender stores: limits encode them."""
        return list(map(self._contender.encode, batches)) if isinstance(self._contender, Limit) else batches

    def _disk(self, messages: int) -> dict[str, float]:
        size = self._contender.disk_bytes()
        return {"disk_bytes": size, "bytes_per_message": size / messages}

    # --- replay ---

    def _replays(self, request: str) -> PhaseResult:
        if request != REPLAY_ALL:
            self._need("start" if request == LATE_START else "filters")
        requests = self._data.about.expected[request]
        self._contender.prepare([expected.topic_filter for expected in requests])
        for expected in requests:
            expected.check(self._replay(expected))
        run = self._scan if isinstance(self._contender, Limit) else self._read
        firsts: list[float] = []
        seconds = self._median(lambda: sum(run(expected, firsts) for expected in requests))
        messages = sum(expected.messages for expected in requests)
        values = {"seconds": seconds, "messages_per_second": messages / seconds}
        if firsts:
            values["first_message_ms"] = statistics.median(firsts) * 1_000
        return PhaseResult(values, messages)

    def _median(self, work: Callable[[], float]) -> float:
        """Call ``work``, which returns seconds, as often as the settings allow; return the median."""
        taken: list[float] = []
        while len(taken) < self._settings.repeat and sum(taken) < self._settings.patience:
            gc.collect()
            taken.append(work())
        return statistics.median(taken)

    def _replay(self, expected: ExpectedReplay) -> Iterator[Message]:
        return iter(self._contender.replay(expected.topic_filter, expected.start))

    def _read(self, expected: ExpectedReplay, firsts: list[float]) -> float:
        """Replay a request; return the seconds, and append those until the first message to ``firsts``."""
        started = time.perf_counter()
        replay = self._replay(expected)
        count = consume(islice(replay, 1))
        firsts.append(time.perf_counter() - started)
        count += consume(replay)
        ended = time.perf_counter()
        expected.check_count(count)
        return ended - started

    def _scan(self, expected: ExpectedReplay, _: list[float]) -> float:
        contender = self._contender
        assert isinstance(contender, Limit)  # noqa: S101 - only limits are scanned
        return timed(lambda: expected.check_count(contender.scan()))

    # --- reopen and compact ---

    def _reopen(self) -> PhaseResult:
        self._need("start")
        (late,) = self._data.about.expected[LATE_START]

        def reopen() -> float:
            self._contender.close()
            started = time.perf_counter()
            self._contender.open()
            replay = self._replay(late)
            count = consume(islice(replay, 1))
            taken = time.perf_counter() - started
            late.check_count(count + consume(replay))
            return taken

        return PhaseResult({"seconds": self._median(reopen)}, 1)

    def _compact(self) -> PhaseResult:
        started = time.perf_counter()
        self._compacted = self._contender.compact()
        seconds = time.perf_counter() - started
        if not self._compacted:
            raise Skipped(_NOTHING_TO_COMPACT)
        self._contender.close()
        size = self._disk(self._data.about.messages)
        self._contender.open()
        return PhaseResult({"seconds": seconds, **size}, self._data.about.messages)

    # --- mixed ---

    def _mixed(self) -> PhaseResult:
        self._need("mixed")
        devices = self._data.about.expected[DEVICE]
        self._contender.prepare([expected.topic_filter for expected in devices])
        planned = self._new_batches(int(self._settings.mixed_seconds * self._settings.mixed_rate))
        gc.collect()
        ending = threading.Event()
        with ThreadPoolExecutor(1, "reader") as threads:
            reading = threads.submit(self._read_until, ending, devices)
            started = time.perf_counter()
            try:
                latencies = self._store_when_due(planned, started)
            finally:
                ending.set()
                read_latencies = reading.result()
            seconds = time.perf_counter() - started
        done = planned[: len(latencies)]
        self._check_all(done)
        messages = sum(map(len, done))
        values = {"seconds": seconds, "messages_per_second": messages / seconds}
        return PhaseResult(values | _latencies("store", latencies) | _latencies("read", read_latencies), messages)

    def _read_until(self, ending: threading.Event, devices: Sequence[ExpectedReplay]) -> list[float]:
        """Replay one device after the other until ``ending`` is set; return the seconds of each replay."""
        latencies = []
        for expected in cycle(devices):
            started = time.perf_counter()
            count = consume(self._replay(expected))
            latencies.append(time.perf_counter() - started)
            expected.check_count(min(count, expected.messages))  # the replay may include new messages
            if ending.is_set():
                break
        return latencies

    def _new_batches(self, count: int) -> list[list[Message]]:
        """Return copies of the last messages with new times, one microsecond apart."""
        about = self._data.about
        batch = max(1, min(_MIXED_BATCH, _MIXED_BYTES * about.messages // about.bytes))
        times = range(about.last + 1, about.last + 1 + count * batch)
        last = cycle(self._data.chunk(about.parts - 1))
        messages = [msgspec.structs.replace(message, timestamp=at) for at, message in zip(times, last, strict=False)]
        return [messages[at : at + batch] for at in range(0, len(messages), batch)]

    def _store_when_due(self, batches: Iterable[list[Message]], started: float) -> list[float]:
        """Store batches at the planned rate, for a limited time; return the latencies in seconds."""
        latencies: list[float] = []
        end = started + _MIXED_PATIENCE * self._settings.mixed_seconds
        for number, batch in enumerate(batches):
            due = started + number / self._settings.mixed_rate
            time.sleep(max(0.0, due - time.perf_counter()))
            self._contender.store(batch)
            now = time.perf_counter()
            latencies.append(now - due)
            if now > end:
                break
        return latencies

    def _check_all(self, batches: Sequence[list[Message]]) -> None:
        digests = self._data.digests()
        for batch in batches:
            digests.add(batch)
        everything = ExpectedReplay.of(digests)
        everything.check(self._replay(everything))


def _stored(contender: Contender, batches: Iterable[Any]) -> float:
    """Store prepared batches; return the seconds that this took."""
    gc.collect()
    started = time.perf_counter()
    for batch in batches:
        contender.store(batch)
    return time.perf_counter() - started


def _latencies(what: str, seconds: Sequence[float]) -> dict[str, float]:
    """Return percentiles of latencies in milliseconds, by metric; ``what`` is the metrics' prefix."""
    values = {f"{what}_p50_ms": 50.0, f"{what}_p99_ms": 99.0}
    if len(seconds) >= _ENOUGH:
        values[f"{what}_p999_ms"] = 99.9
    return {metric: float(np.percentile(seconds, share)) * 1_000 for metric, share in values.items()}
