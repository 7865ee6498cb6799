"""Recommends a layout: measures all installed layouts in one trial with a sample of the user's messages.

The trial is one of the benchmark harness, without Spark: each layout has a process, and the processes take turns phase
by phase. The sample is sorted by time. Each layout stores and replays it, compacts it, and replays it again. The
messages of every replay are checked before replays are timed.

Rule: a layout's *total* is the time of its replays of the filters after compaction, each counted as often as the filter
was given. The smallest total wins. Layouts whose total is within a tenth of it, or within `SHORT_SECONDS`, count as
equal. Among these the smallest cost wins: the time to store and compact a message, multiplied by its bytes on disk.
``reference`` is measured, too, but never recommended.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import topicstore
from topicstore import Message, MessageBatch, TopicFilter
from topicstore.contract.errors import InvalidArgumentError, PluginError, UnsupportedError
from topicstore.plugins import load_target, registry

from topicstore_benchmarks.contenders.catalogue import ContenderSpec, catalogue
from topicstore_benchmarks.harness.dataset import Dataset, write
from topicstore_benchmarks.harness.plan import Plan, Settings, Trial
from topicstore_benchmarks.harness.trial import run_trial
from topicstore_benchmarks.report.run import Run, load
from topicstore_benchmarks.results import LATE_START, REPLAY_ALL, STORE, compacted
from topicstore_benchmarks.workloads.workload import Workload, WorkloadOptions

__all__ = ["Comparison", "LayoutFigures", "Question", "ReplayFigures", "choose", "compare", "representative_filters"]

ORACLE = "reference"
TIE = 1.1
"""The multiple of the smallest total up to which other totals count as equal."""
SHORT_SECONDS = 0.005
"""The difference in seconds below which totals count as equal, because it says nothing about a larger database."""
_SETTINGS = Settings(repeat=9, patience=1.0, mixed_seconds=0)
_PART = 20_000
_MOST_LEVELS = 16
"""The maximum number of a topic's levels that are tried as ``+``."""


@attrs.frozen(kw_only=True)
class Question:
    """One replay that is measured on all layouts."""

    topic_filter: str
    start: int = 0
    """Start of the replay, in microseconds since the epoch."""
    weight: int = 0
    """The number of times that the replay counts in the totals; 0 if it is only shown."""


@attrs.frozen(kw_only=True)
class ReplayFigures:
    """Measurements of one layout's replays of one query."""

    messages: int
    seconds: float
    """Median duration of the replays."""
    rate: float
    """Number of messages read a second."""


@attrs.frozen(kw_only=True)
class LayoutFigures:
    """Measurements of one layout."""

    layout: str
    store_rate: float
    """Number of messages stored a second."""
    compact_seconds: float
    merged: int
    """Number of messages that the compaction rewrote; 0 for layouts that keep messages as they were stored."""
    bytes_per_message: float
    """Bytes on disk after compaction, less those of an empty database."""
    delay_seconds: float
    """Maximum seconds until a stored message is visible: the length of an epoch, or 0 without epochs."""
    replays: list[ReplayFigures]
    """Figures of the replays, in the order of ``Comparison.questions``."""
    total_seconds: float
    """Sum of the median durations after compaction, each times the weight of its replay."""
    unmerged_seconds: float | None
    """Sum of the weighted median durations before compaction; None for layouts with nothing to compact."""
    cost: float
    """Seconds to store and compact a message, multiplied by its bytes; decides between layouts of equal speed."""


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

    batches:   the sample. A time in the future counts as now; a message without a time has that of the message before.
    filters:   the filters that will be replayed; a repeated filter counts more than once. A replay of everything, and
               one that starts in the last hundredth, are measured, too, but don't count.
    directory: an existing, empty directory, in which a database of each layout is created.
    options:   options of the backend and of any layouts, by plugin, as for `topicstore.open`.
    progress:  a function called with a description of each step.

    Takes seconds to minutes. Raises `InvalidArgumentError` for an empty sample and for filters that match nothing in
    it, `InvalidFilterError`, `UnsupportedError` if the backend has no layout to choose or isn't persistent,
    `PluginError` if a layout fails or returns other messages, and the errors of `topicstore.open`.
    """
    if not any(map(len, batches)):
        raise InvalidArgumentError("the sample has no messages")
    if not filters:
        raise InvalidArgumentError("without filters there is nothing to choose by")
    weights = Counter(TopicFilter(text).text for text in filters)
    sample = _Sample(batches, [text for text in weights if text != "#"])
    if not any(TopicFilter(text).matches(topic) for text in weights for topic in sample.topics):
        raise InvalidArgumentError(f"nothing in the sample matches {' or '.join(weights)}: nothing to measure by")
    layouts, left_out = _layouts_on(backend)
    options = options or {}
    strangers = sorted(options.keys() - {backend, *registry().layouts()})
    if strangers:
        raise InvalidArgumentError(f"there are options of {', '.join(strangers)}: neither the backend nor a layout")
    specs = [_contender(backend, layout, options) for layout in layouts]
    empty = {spec.name: _empty(spec, directory / "empty" / spec.name) for spec in specs}
    data = write(sample, "sample", directory / "sample")
    questions = {REPLAY_ALL: Question(topic_filter="#", weight=weights["#"])}
    questions |= {
        name: Question(topic_filter=text, weight=weights[text]) for name, (text,) in sample.requests().items()
    }
    questions[LATE_START] = Question(topic_filter="#", start=data.about.expected[LATE_START][0].start)
    run = _measure(specs, data, directory, progress)
    found = [_figures(layout, run, data, questions, empty[layout]) for layout in layouts]
    figures = sorted(found, key=lambda one: one.total_seconds)
    recommended, reason = choose([one for one in figures if one.layout != ORACLE])
    return Comparison(
        backend=backend,
        messages=data.about.messages,
        topics=data.about.topics,
        questions=list(questions.values()),
        layouts=figures,
        left_out=left_out,
        recommended=recommended.layout,
        reason=reason,
        caveats=list(_caveats(recommended, list(questions.values()), reason)),
    )


def representative_filters(counts: Mapping[str, int]) -> list[str]:
    """Return filters for topics with these numbers of messages, to use if the user names no filters.

    These are the topic with the median number of messages, the busiest topic, and wildcard filters. The latter are the
    median topic with one level replaced by ``+``, for the three deepest levels at which topics differ.
    """
    by_traffic = sorted(counts, key=lambda topic: (counts[topic], topic))
    median = by_traffic[len(by_traffic) // 2]
    levels = median.split("/")
    wild = ["/".join([*levels[:n], "+", *levels[n + 1 :]]) for n in range(min(len(levels), _MOST_LEVELS))]
    varying = [text for text in wild if sum(map(TopicFilter(text).matches, counts)) > 1]
    return list(dict.fromkeys([median, by_traffic[-1], *varying[-3:]]))


def _layouts_on(backend: str) -> tuple[list[str], dict[str, str]]:
    """Return the layouts that run on a backend, the reference layout first, and the others with the reasons."""
    load_target(registry().backend(backend))
    pairs = [pair for pair in registry().pairs() if pair.backend.name == backend]
    left_out = {pair.layout.name: why for pair in pairs if (why := pair.why_refused() or pair.why_absent()) is not None}
    usable = [pair.layout.name for pair in pairs if pair.layout.name not in left_out]
    if not set(usable) - {ORACLE}:
        raise UnsupportedError(f"no layout to choose runs on {backend!r}: {'; '.join(left_out.values()) or 'none'}")
    return sorted(usable, key=lambda name: (name != ORACLE, name)), left_out


# --- measuring ---


class _Sample(Workload):
    """The messages of a sample in order of time, and the filters to replay."""

    def __init__(self, batches: Sequence[MessageBatch], filters: Sequence[str]) -> None:
        super().__init__(WorkloadOptions(kind="sample"), Path())
        table = pa.Table.from_batches([batch.to_arrow() for batch in batches if len(batch)])
        times = pc.fill_null_forward(table["timestamp"].cast(pa.int64()).combine_chunks())
        present = time.time_ns() // 1_000
        known = times.fill_null(times.drop_null()[0].as_py() if times.null_count < len(times) else present).to_numpy()
        moved = pa.array(np.minimum(known, present)).cast(topicstore.SCHEMA.field("timestamp").type)
        table = table.set_column(table.schema.get_field_index("timestamp"), "timestamp", moved)
        self._table = table.take(pa.array(np.argsort(known, kind="stable"))).combine_chunks()
        self._filters = filters
        self.topics = set(self._table["topic"].unique().to_pylist())

    @property
    def parts(self) -> int:
        """Return the number of parts."""
        return len(range(0, self._table.num_rows, _PART))

    def part(self, number: int) -> pa.RecordBatch:
        """Return the messages of part ``number`` as one record batch."""
        return self._table.slice(number * _PART, _PART).combine_chunks().to_batches()[0]

    def requests(self) -> dict[str, tuple[str, ...]]:
        """Return each filter as a request of its own, named by a number, because a filter may equal a phase's name."""
        return {f"filter {number}": (text,) for number, text in enumerate(self._filters, 1)}


def _contender(backend: str, layout: str, options: Mapping[str, Mapping[str, Any]]) -> ContenderSpec:
    """Return a contender with its layout's name and options."""
    known = catalogue().get(f"{backend}-{layout}")
    if known is None:
        raise UnsupportedError(f"layouts can't be compared on {backend!r}, which keeps nothing when it is closed")
    chosen = {name: dict(options[name]) for name in (backend, layout) if name in options}
    arguments = {"backend": backend, "layout": layout, "options": chosen}
    return ContenderSpec(name=layout, kind=known.kind, target=known.target, arguments=arguments)


def _empty(spec: ContenderSpec, path: Path) -> tuple[int, float]:
    """Return the bytes of an empty database, and the maximum seconds until a stored message is visible."""
    path.parent.mkdir(exist_ok=True)
    with topicstore.open(path, **spec.arguments) as db:
        size: int = db.info().disk_bytes
        db.store([Message("a", b"")])
        return size, max(slab.epoch_seconds for slab in db.explain("#").slabs)


def _measure(specs: Sequence[ContenderSpec], data: Dataset, directory: Path, progress: Callable[[str], None]) -> Run:
    plan = Plan(workloads=(), durabilities=("commit",), contenders=tuple(specs), repetitions=1, settings=_SETTINGS)
    trial = Trial(workload="sample", durability="commit", repetition=1)
    failed = run_trial(trial, plan, data.directory, directory, lambda text: progress(text.partition(": ")[2])).failed
    if failed:
        raise PluginError(f"layout {failed[0]}")
    return load(directory)


def _figures(
    layout: str, run: Run, data: Dataset, questions: Mapping[str, Question], empty: tuple[int, float]
) -> LayoutFigures:
    """Return the figures of a layout from the results of the trial; ``questions`` are by request."""

    def value(phase: str, metric: str = "seconds") -> float:
        return next(iter(run.of("sample", "commit", layout, phase, metric).values()), 0.0)  # 0 if the phase was skipped

    def replayed(phase: Callable[[str], str]) -> tuple[list[ReplayFigures], float]:
        """Return the figures of the replays, and their weighted total in seconds."""
        found, total = [], 0.0
        for request, question in questions.items():
            seconds, count = value(phase(request)), data.about.expected[request][0].messages
            found.append(ReplayFigures(messages=count, seconds=seconds, rate=count / seconds))
            total += question.weight * seconds
        return found, total

    messages, compact_seconds, store_rate = data.about.messages, value("compact"), value(STORE, "messages_per_second")
    merged = compact_seconds > 0
    unmerged, unmerged_seconds = replayed(lambda request: request)
    replays, total_seconds = replayed(compacted) if merged else (unmerged, unmerged_seconds)
    bytes_per_message = max(value("compact" if merged else STORE, "disk_bytes") - empty[0], 0.0) / messages
    return LayoutFigures(
        layout=layout,
        store_rate=store_rate,
        compact_seconds=compact_seconds,
        merged=messages if merged else 0,
        bytes_per_message=bytes_per_message,
        delay_seconds=empty[1],
        replays=replays,
        total_seconds=total_seconds,
        unmerged_seconds=unmerged_seconds if merged else None,
        cost=(1 / store_rate + compact_seconds / messages) * bytes_per_message,
    )


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


_TOO_SHORT, _CLOSE = "too short to tell", "as fast within 10 %"
_WEAKEST = (_TOO_SHORT, _CLOSE)


def _indistinct(one: LayoutFigures, fastest: LayoutFigures) -> str:
    """Return why a layout counts as equal to the fastest, or an empty text if it doesn't."""
    difference = one.total_seconds - fastest.total_seconds
    if one.total_seconds <= TIE * fastest.total_seconds:
        return _CLOSE
    return _TOO_SHORT if difference < SHORT_SECONDS else ""


def _timed(one: LayoutFigures) -> str:
    return f"{one.layout} {one.total_seconds * 1e3:,.2f} ms"


def _caveats(best: LayoutFigures, questions: Sequence[Question], reason: str) -> Iterator[str]:
    pairs = zip(questions, best.replays, strict=True)
    empty = [question.topic_filter for question, replay in pairs if question.weight and not replay.messages]
    if empty:
        yield f"nothing in the sample matches {', '.join(empty)}"
    if reason.startswith(_TOO_SHORT):
        yield "a larger sample may tell the layouts apart"
    if best.unmerged_seconds is not None and best.unmerged_seconds > 2 * best.total_seconds:
        yield (
            f"what {best.layout} has not compacted yet is read more slowly: the filters took "
            f"{best.unmerged_seconds * 1e3:,.2f} ms before compaction"
        )
    if best.delay_seconds:
        delay = f"up to {best.delay_seconds:,.3g} s after it was stored"
        yield f"{best.layout} shows a message once its epoch is over: {delay}"
