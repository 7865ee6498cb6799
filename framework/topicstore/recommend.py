"""Recommending a layout: all layouts that are installed are measured side by side on a sample of the messages.

`compare` stores the sample in a database of each layout, compacts it, and replays each filter
several times; layouts that have something to merge also replay the filters before compaction. Everything is
interleaved, batch by batch and replay by replay, so that a disturbance of the machine affects all layouts alike; the
medians of the replays count.

The rule. A layout's *total* is the time that its replays of the filters take after compaction, each counted as often as
the filter was given. The smallest total wins. Layouts within a tenth of it, or nearer to it than twice the standard
error or `SHORT_SECONDS`, count as equal; of these, the one wins that has the smallest product of the time to store a
message, compaction included, and the bytes that the message takes. ``reference`` is measured because all others must
return as many messages as it does, but it is never recommended.
"""

from __future__ import annotations

import contextlib
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from math import hypot, sqrt
from pathlib import Path
from time import perf_counter
from typing import Any

import attrs
import numpy as np

from . import opening
from .contract.batch import MessageBatch
from .contract.columns import to_iterable
from .contract.errors import InvalidArgumentError, PluginError, UnsupportedError
from .contract.layout import ReadCounters
from .contract.positions import time_of
from .contract.topics import TopicFilter
from .database import Database
from .plugins import load_target, registry

__all__ = ["Comparison", "LayoutFigures", "Question", "ReplayFigures", "choose", "compare", "representative_filters"]

ORACLE = "reference"
TIE = 1.1
"""Factor of the smallest total up to which other totals count as equal."""
LEAST_ROUNDS, MOST_ROUNDS = 3, 9
ENOUGH_SECONDS = 1.0
"""Seconds of measuring after which a replay that was measured often enough is not measured again."""
SHORT_SECONDS = 0.005
"""Seconds below which a difference says nothing about a larger database."""
LATE_PART = 0.99
"""Part of the sample that lies before the late start."""

_ERROR = 0.93
"""Standard error of a median, in interquartile ranges over the root of the number of values, for normal errors
(McGill, Tukey and Larsen: Variations of Box Plots. The American Statistician 32, 1978)."""
_TICK = 10_000
"""Microseconds by which the databases' clock advances with each batch, for messages without a time of their own."""
_MOST_LEVELS = 16
"""Largest number of a topic's levels that are tried as ``+``."""


@attrs.frozen(kw_only=True)
class Question:
    """One replay that is measured on all layouts."""

    topic_filter: str
    start: int = 0
    """Start of the replay, in microseconds since the epoch."""
    weight: int = 0
    """How often the replay counts in the totals; 0: it is only shown."""


@attrs.frozen(kw_only=True)
class ReplayFigures:
    """Measurements of one layout's replays of one question."""

    messages: int
    seconds: float
    """Median duration of the replays."""
    error: float
    """Standard error of the median, in seconds, estimated from the quartiles."""
    rate: float
    """Messages read a second."""
    runs: int
    reads: ReadCounters
    """Read counters of the first replay."""


@attrs.frozen(kw_only=True)
class LayoutFigures:
    """Measurements of one layout."""

    layout: str
    store_rate: float
    """Messages stored a second."""
    compact_seconds: float
    merged: int
    """Number of messages that the compaction rewrote; 0 for layouts that keep messages as they were stored."""
    bytes_per_message: float
    """Bytes on disk after compaction, less those of an empty database; for backends without files, of the values."""
    delay_seconds: float
    """How long a message may stay hidden after it was stored: an epoch, if the layout has epochs."""
    replays: list[ReplayFigures]
    """Figures of the replays, in the order of the questions."""
    total_seconds: float
    """Sum of the median durations after compaction, each times the weight of its question."""
    unmerged_seconds: float | None
    """Sum of the median durations before compaction, likewise; None for layouts with nothing to merge."""
    error_seconds: float
    """Standard error of `total_seconds`."""
    cost: float
    """Seconds to store and compact a message, times its bytes; decides between layouts of equal speed."""


@attrs.frozen(kw_only=True)
class Comparison:
    """The result of comparing layouts on one sample."""

    backend: str
    messages: int
    topics: int
    questions: list[Question]
    layouts: list[LayoutFigures]
    """Figures of the layouts, smallest total first."""
    left_out: dict[str, str]
    """Layouts that can't run with this backend, with the reason."""
    recommended: str
    reason: str
    caveats: list[str]
    """Limits of the comparison, as sentences."""


def compare(
    batches: Sequence[MessageBatch],
    filters: Sequence[str],
    directory: Path,
    *,
    backend: str = "rocksdb",
    options: Mapping[str, Mapping[str, Any]] | None = None,
    progress: Callable[[str], None] = lambda _: None,
) -> Comparison:
    """Measure all layouts that run on a backend and recommend one; the module's docstring states the rule.

    batches:   the sample, in the order of storing. Messages may be late, or ahead of the clock.
    filters:   filters that will be replayed; one that is given twice counts twice. The replay of everything, and one
               that starts in the last hundredth, are measured too, but don't count.
    directory: an existing, empty directory, in which a database of each layout is created.
    options:   options of the backend and of any layouts, by plugin, as for `topicstore.open`.
    progress:  is called with a description of each step.

    Takes seconds to minutes. Raises `InvalidArgumentError` for an empty sample and for filters that match
    nothing in it, `InvalidFilterError`, `UnsupportedError` if there is nothing to choose from, `PluginError`
    if layouts return different messages, and the errors of `topicstore.open` and `Database.store`.
    """
    if not any(map(len, batches)):
        raise InvalidArgumentError("the sample has no messages")
    if not filters:
        raise InvalidArgumentError("without filters there is nothing to choose by")
    parsed = [TopicFilter(text) for text in filters]
    weights = Counter(one.text for one in parsed)
    topics = {topic for batch in batches for topic in to_iterable(batch.topics)}
    if not any(one.matches(topic) for one in parsed for topic in topics):
        raise InvalidArgumentError(f"nothing in the sample matches {' or '.join(weights)}: nothing to measure by")
    usable, left_out = _layouts_on(backend)
    options = options or {}
    strangers = sorted(options.keys() - {backend, *registry().layouts()})
    if strangers:
        raise InvalidArgumentError(f"there are options of {', '.join(strangers)}: neither the backend nor a layout")
    with contextlib.ExitStack() as stack:
        bench = _Bench(stack, directory, usable, backend=backend, options=options, now=_latest(batches))
        progress("storing")
        late_start = bench.store(batches)
        questions = [Question(topic_filter=text, weight=weight) for text, weight in weights.items()]
        for question in questions:
            progress(f"replaying {question.topic_filter} before compaction")
            bench.replay_unmerged(question)
        progress("compacting")
        bench.compact()
        if "#" not in weights:
            questions.append(Question(topic_filter="#"))
        questions.append(Question(topic_filter="#", start=late_start))
        for question in questions:
            progress(f"replaying {question.topic_filter}")
            bench.replay(question)
        layouts = sorted(bench.figures(questions), key=lambda one: one.total_seconds)
    recommended, reason = choose([one for one in layouts if one.layout != ORACLE])
    return Comparison(
        backend=backend,
        messages=sum(map(len, batches)),
        topics=len(topics),
        questions=questions,
        layouts=layouts,
        left_out=left_out,
        recommended=recommended.layout,
        reason=reason,
        caveats=list(_caveats(recommended, questions, reason)),
    )


def representative_filters(counts: Mapping[str, int]) -> list[str]:
    """Return filters for topics with these numbers of messages.

    These are the topic of median traffic, the busiest topic, and the first of the two with one of its varying levels
    replaced by ``+``, for at most the three deepest of these levels.
    """
    by_traffic = sorted(counts, key=lambda topic: (counts[topic], topic))
    median = by_traffic[len(by_traffic) // 2]
    levels = median.split("/")
    wild = ["/".join([*levels[:n], "+", *levels[n + 1 :]]) for n in range(min(len(levels), _MOST_LEVELS))]
    varying = [text for text in wild if sum(map(TopicFilter(text).matches, counts)) > 1]
    return list(dict.fromkeys([median, by_traffic[-1], *varying[-3:]]))


def _layouts_on(backend: str) -> tuple[list[str], dict[str, str]]:
    """Return the layouts that run on a backend, the reference layout first, and the others with the reason."""
    load_target(registry().backend(backend))
    pairs = [pair for pair in registry().pairs() if pair.backend.name == backend]
    left_out = {pair.layout.name: why for pair in pairs if (why := pair.why_refused() or pair.why_absent()) is not None}
    usable = [pair.layout.name for pair in pairs if pair.layout.name not in left_out]
    if not set(usable) - {ORACLE}:
        raise UnsupportedError(f"no layout to choose runs on {backend!r}: {'; '.join(left_out.values()) or 'none'}")
    return sorted(usable, key=lambda name: (name != ORACLE, name)), left_out


def _latest(batches: Sequence[MessageBatch]) -> int:
    """Return the current time or, if later, the latest time in the sample: no message may lie ahead of the clock."""
    present = time.time_ns() // 1_000
    times = (timestamp for batch in batches for timestamp in to_iterable(batch.timestamps) if timestamp is not None)
    return max(present, max(times, default=0))


# --- measuring ---


@attrs.define
class _Contender:
    """One layout's database, and its measurements so far."""

    layout: str
    db: Database
    empty_bytes: int
    """Bytes on disk before anything was stored."""
    store_seconds: float = 0.0
    compact_seconds: float = 0.0
    merged: int = 0
    delay_seconds: float = 0.0
    found: dict[Question, tuple[int, ReadCounters]] = attrs.field(factory=dict)
    """By question, the number of messages found and the read counters of the first replay."""
    times: dict[Question, list[float]] = attrs.field(factory=dict)
    unmerged: dict[Question, list[float]] = attrs.field(factory=dict)
    """By question, the durations before compaction, if there was something to merge."""

    def explain(self, question: Question) -> int:
        """Replay the question once, which also warms the caches; return the number of messages."""
        explanation = self.db.explain(question.topic_filter, question.start)
        reads = [attrs.astuple(slab.reads) for slab in explanation.slabs]
        self.found[question] = explanation.messages, ReadCounters(*map(sum, zip(*reads, strict=True)))
        self.times[question] = []
        self.delay_seconds = max(self.delay_seconds, *(slab.epoch_seconds for slab in explanation.slabs), 0.0)
        return explanation.messages

    @property
    def waits(self) -> bool:
        """Whether messages are waiting to be merged."""
        return any(shard.backlog() for shard in self.db.storage.shards)

    def measure(self, question: Question, times: list[float]) -> None:
        """Replay the question once more, unless it was measured often enough."""
        if len(times) < LEAST_ROUNDS or sum(times) < ENOUGH_SECONDS:
            started = perf_counter()
            deque(self.db.replay(question.topic_filter, question.start), maxlen=0)
            times.append(perf_counter() - started)

    def figures(self, questions: Sequence[Question]) -> LayoutFigures:
        """Return the layout's figures."""
        info = self.db.info()
        replays = [self._replay_figures(question) for question in questions]
        weighted = [(question.weight, replay) for question, replay in zip(questions, replays, strict=True)]
        bytes_per_message = (max(info.disk_bytes - self.empty_bytes, 0) or info.live_bytes) / info.messages
        return LayoutFigures(
            layout=self.layout,
            store_rate=info.messages / self.store_seconds,
            compact_seconds=self.compact_seconds,
            merged=self.merged,
            bytes_per_message=bytes_per_message,
            delay_seconds=self.delay_seconds,
            replays=replays,
            total_seconds=sum(weight * replay.seconds for weight, replay in weighted),
            unmerged_seconds=self._unmerged_seconds(),
            error_seconds=hypot(*(weight * replay.error for weight, replay in weighted)),
            cost=(self.store_seconds + self.compact_seconds) / info.messages * bytes_per_message,
        )

    def _unmerged_seconds(self) -> float | None:
        if not self.merged or not self.unmerged:
            return None
        return sum(question.weight * float(np.median(times)) for question, times in self.unmerged.items())

    def _replay_figures(self, question: Question) -> ReplayFigures:
        messages, reads = self.found[question]
        runs = len(self.times[question])
        lower, median, upper = np.quantile(self.times[question], (0.25, 0.5, 0.75)).tolist()
        return ReplayFigures(
            messages=messages,
            seconds=median,
            error=_ERROR * (upper - lower) / sqrt(runs),
            rate=messages / median,
            runs=runs,
            reads=reads,
        )


class _Bench:
    """A database of each layout. All of them do the same work, in turns."""

    def __init__(
        self,
        stack: contextlib.ExitStack,
        directory: Path,
        layouts: Sequence[str],
        *,
        backend: str,
        options: Mapping[str, Mapping[str, Any]],
        now: int,
    ) -> None:
        self._now = now
        self._contenders = []
        for number, layout in enumerate(layouts):
            db = opening.open(
                directory / f"{number}",
                "x",
                backend=backend,
                layout=layout,
                timestamps="message",
                late="lift",
                options={name: options[name] for name in (backend, layout) if name in options},
                auto_compact=False,
                clock=lambda: self._now,  # the same for all, so that they give the same positions
            )
            stack.enter_context(db)
            self._contenders.append(_Contender(layout, db, db.info().disk_bytes))

    def store(self, batches: Sequence[MessageBatch]) -> int:
        """Store the sample in every database; return the time at which its last part begins."""
        late_row = int(LATE_PART * sum(map(len, batches)))
        late_start = 0
        for number, batch in enumerate(filter(len, batches)):
            self._now += _TICK
            for contender in self._in_turn(number):
                started = perf_counter()
                result = contender.db.store(batch)
                contender.store_seconds += perf_counter() - started
            if 0 <= late_row < len(batch):
                late_start = time_of(int(result.batch.positions[late_row]))
            late_row -= len(batch)
        return late_start

    def compact(self) -> None:
        """Compact every database."""
        for contender in self._contenders:
            report = contender.db.compact()
            contender.compact_seconds, contender.merged = report.seconds, report.messages

    def replay_unmerged(self, question: Question) -> None:
        """Replay a question in the databases that have something to merge, before they are compacted."""
        waiting = [contender for contender in self._contenders if contender.waits]
        for contender in waiting:
            contender.unmerged[question] = []
            contender.db.explain(question.topic_filter)  # warms the caches, as for the later replays
        for _ in range(MOST_ROUNDS):
            for contender in waiting:
                contender.measure(question, contender.unmerged[question])

    def replay(self, question: Question) -> None:
        """Replay a question in every database several times, the layouts in turns."""
        counts = {contender.layout: contender.explain(question) for contender in self._contenders}
        expected = next(iter(counts.values()))
        for layout, count in counts.items():
            if count != expected:
                since = f" since {question.start}" if question.start else ""
                raise PluginError(
                    f"layout {layout!r} returned {count:,} messages for {question.topic_filter!r}{since}, "
                    f"where {next(iter(counts))!r} returned {expected:,}"
                )
        for number in range(MOST_ROUNDS):
            for contender in self._in_turn(number):
                contender.measure(question, contender.times[question])

    def _in_turn(self, number: int) -> Sequence[_Contender]:
        """Return the contenders, beginning with another one each time: the first one finds the caches colder."""
        first = number % len(self._contenders)
        return self._contenders[first:] + self._contenders[:first]

    def figures(self, questions: Sequence[Question]) -> list[LayoutFigures]:
        """Return the figures of each layout."""
        return [contender.figures(questions) for contender in self._contenders]


# --- choosing ---


def choose(layouts: Sequence[LayoutFigures]) -> tuple[LayoutFigures, str]:
    """Return the best of these layouts, which are sorted by their total, and the reason."""
    fastest, *others = layouts
    total = f"{fastest.total_seconds * 1e3:,.2f} ms for all filters"
    if not others:
        return fastest, f"{fastest.layout} is the only layout to choose"
    near = {one.layout: why for one in others if (why := _indistinct(one, fastest))}
    if not near:
        return fastest, f"{total}; the next is {_timed(others[0])}"
    equal = [fastest, *(one for one in others if one.layout in near)]
    best = min(equal, key=lambda one: one.cost)
    rivals = ", ".join(_timed(one) for one in equal if one is not best)
    why = min(near.values(), key=_WEAKEST.index)
    return best, f"{why}: {_timed(best)} against {rivals}; of these it costs least to store, in time and bytes"


_TOO_SHORT, _TOO_UNSTEADY, _CLOSE = "too short to tell", "too unsteady to tell", "as fast within 10 %"
_WEAKEST = (_TOO_SHORT, _TOO_UNSTEADY, _CLOSE)


def _indistinct(one: LayoutFigures, fastest: LayoutFigures) -> str:
    """Return why a layout counts as equal to the fastest, or an empty text if it doesn't."""
    difference = one.total_seconds - fastest.total_seconds
    if one.total_seconds <= TIE * fastest.total_seconds:
        return _CLOSE
    if difference < SHORT_SECONDS:
        return _TOO_SHORT
    return _TOO_UNSTEADY if difference <= 2 * hypot(one.error_seconds, fastest.error_seconds) else ""


def _timed(one: LayoutFigures) -> str:
    return f"{one.layout} {one.total_seconds * 1e3:,.2f} ms"


def _caveats(best: LayoutFigures, questions: Sequence[Question], reason: str) -> Iterator[str]:
    pairs = zip(questions, best.replays, strict=True)
    empty = [question.topic_filter for question, replay in pairs if question.weight and not replay.messages]
    if empty:
        yield f"nothing in the sample matches {', '.join(empty)}"
    if reason.startswith(_TOO_SHORT):
        yield "a larger sample may tell the layouts apart"
    elif reason.startswith(_TOO_UNSTEADY):
        yield "a quieter machine or a larger sample may tell the layouts apart"
    if best.unmerged_seconds is not None and best.unmerged_seconds > 2 * best.total_seconds:
        yield (
            f"what {best.layout} has not compacted yet is read more slowly: the filters took "
            f"{best.unmerged_seconds * 1e3:,.2f} ms before compaction"
        )
    if best.delay_seconds:
        delay = f"up to {best.delay_seconds:,.3g} s after it was stored"
        yield f"{best.layout} shows a message once its epoch is over: {delay}"
