"""Generated workloads: devices that report, with topics and payloads made from patterns.

A *report* of a device is one message for each of its metrics, or for one of them. Patterns are texts with placeholders,
such as ``fleet/region-{region}/bus-{device:05}/{metric}``. Braces around other text are kept literally.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
import numpy as np
import numpy.typing as npt
import pyarrow as pa
import topicstore
from msgspec import Meta
from topicstore import TopicFilter

from topicstore_benchmarks.results import DEVICE, WILDCARD

from .workload import Workload, WorkloadError, WorkloadOptions

__all__ = ["MadeOptions", "MadeWorkload", "Metric"]

_START = 1_735_689_600_000_000
"""The time of the first message, 2025-01-01T00:00:00Z, in microseconds since the epoch."""
_PART_MESSAGES, _PART_BYTES = 20_000, 32 << 20
"""The maximum number of messages, and approximately that of payload bytes, in a part."""
_ASKED = 5
"""The number of devices in the requests."""
_PLACEHOLDER = re.compile(r"\{([a-z_]+)(:[^{}]*)?\}")

_Count = Annotated[int, Meta(ge=1)]
_Share = Annotated[float, Meta(gt=0)]
_Numbers = npt.NDArray[np.int64]


class Metric(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A metric that devices report."""

    name: str = "value"
    share: _Share = 1.0
    """With ``report = "one"``: the relative frequency of this metric."""
    payload: str | None = None
    """Pattern of the payload; placeholders are those of topics, ``unit``, ``value``, ``ms`` (time) and ``number``."""
    bytes: tuple[Annotated[int, Meta(ge=0)], Annotated[int, Meta(ge=0)]] | None = None
    """The minimum and maximum size of a random payload; sizes are distributed log-uniformly."""
    unit: str = ""
    low: float = 0.0
    high: float = 100.0
    """The bounds of ``value`` are ``low`` and ``high``."""


class MadeOptions(WorkloadOptions, frozen=True, kw_only=True):
    """The options of a generated workload."""

    messages: _Count
    topic: str
    """Pattern of the topic; placeholders are ``device`` (its number), ``metric`` and the names of ``groups``."""
    client_id: str = "device-{device}"
    devices: _Count
    messages_a_device: _Count = 1
    """The minimum number of messages per device; a run with few messages has fewer devices."""
    groups: Mapping[str, _Count] = msgspec.field(default_factory=dict)
    """Names of groupings, and the number of groups in each; a device's group is its number modulo that."""
    metrics: Annotated[list[Metric], Meta(min_length=1)] = msgspec.field(default_factory=lambda: [Metric()])
    report: Literal["all", "one"] = "all"
    popularity: Literal["turns", "uniform", "zipf", "hot"] = "turns"
    """The choice of the next device to report.

    ``turns``: all devices in turns, in an order that is shuffled for each turn. ``uniform``: a random one. ``zipf``: by
    Zipf's law with the exponent ``skew``. ``hot``: device 0 with the probability ``hot``, else a random other one.
    """
    skew: _Share = 1.0
    hot: Annotated[float, Meta(gt=0, le=1)] = 0.95
    seconds: Annotated[float, Meta(gt=0, le=31_536_000)] = 3_600.0
    """The seconds from the first message to the last."""
    qos: Annotated[int, Meta(ge=0, le=2)] = 1
    retain: bool = False
    seed: int = 7
    wildcard: str
    """The filter to replay."""
    device: str
    """The pattern of the filters of five devices to replay; placeholders are ``device`` and the ``groups``."""


class MadeWorkload(Workload):
    """A generated workload of reporting devices."""

    Options = MadeOptions
    options: MadeOptions

    def __init__(self, options: MadeOptions, beside: Path) -> None:
        super().__init__(options, beside)
        self._devices = min(options.devices, max(1, options.messages // options.messages_a_device))
        self._a_report = len(options.metrics) if options.report == "all" else 1
        self._reports = -(-options.messages // self._a_report)
        largest = max(metric.bytes[1] if metric.bytes else 200 for metric in options.metrics)
        fitting = min(_PART_MESSAGES, max(1, _PART_BYTES // max(1, largest)))
        self._a_part = max(1, fitting // self._a_report)
        self._patterns()

    @property
    def summary(self) -> str:
        """Return the summary, in which ``{devices}`` and the names of groupings are replaced by their numbers."""
        return self._summary.format(**self._counts())

    def _counts(self) -> dict[str, int]:
        groups = {name: min(count, self._devices) for name, count in self.options.groups.items()}
        return {"devices": self._devices, **groups}

    def identity(self) -> str:
        """Return the generator's version, which changes when the same options generate other messages."""
        return "1"

    @property
    def parts(self) -> int:
        """Return the number of parts."""
        return -(-self._reports // self._a_part)

    # --- patterns ---

    def _patterns(self) -> None:
        options = self.options
        ours = {"device": 0, **dict.fromkeys(options.groups, 0)}
        topics = {**ours, "metric": ""}
        payloads = {**topics, "unit": "", "value": 0.0, "ms": 0, "number": 0}
        self._summary = _pattern("summary", options.summary, self._counts())
        self._topic = _pattern("topic", options.topic, topics)
        self._client_id = _pattern("client_id", options.client_id, topics)
        self._filter = _pattern("device", options.device, ours)
        for text in (options.wildcard, self._filter.format(**ours)):
            TopicFilter(text)  # raises for an invalid filter
        for metric in options.metrics:
            if (metric.payload is None) == (metric.bytes is None):
                raise WorkloadError(f"the metric {metric.name!r} needs either 'payload' or 'bytes'")
            if metric.bytes is not None and metric.bytes[0] > metric.bytes[1]:
                raise WorkloadError(f"the metric {metric.name!r} has the larger number of 'bytes' first")
        self._payloads = [
            None if metric.payload is None else _pattern("payload", metric.payload, payloads)
            for metric in options.metrics
        ]

    def _of(self, device: int) -> dict[str, Any]:
        """Return the placeholders' values of a device."""
        return {"device": device, **{name: device % count for name, count in self.options.groups.items()}}

    # --- reporting devices ---

    def _reporting(self, part: int, source: np.random.Generator) -> _Numbers:
        """Return the devices of a part's reports; ``source`` is the part's new random generator."""
        first = part * self._a_part
        reports = min(self._a_part, self._reports - first)
        popularity, devices = self.options.popularity, self._devices
        if popularity == "turns":
            turns = np.arange(first, first + reports)
            return np.concatenate(
                [_turn(self.options.seed, turn, devices)[places] for turn, places in _split(turns, devices)]
            )
        if popularity == "uniform" or devices == 1:
            return source.integers(0, devices, reports)
        if popularity == "zipf":
            return np.searchsorted(self._popularity, source.random(reports)).astype(np.int64)
        others = source.integers(1, devices, reports)
        return np.where(source.random(reports) < self.options.hot, 0, others)

    @cached_property
    def _popularity(self) -> npt.NDArray[np.float64]:
        """Return the cumulative distribution of the reports over the devices."""
        weights = np.arange(1, self._devices + 1, dtype=np.float64) ** -self.options.skew
        popularity: npt.NDArray[np.float64] = np.cumsum(weights) / weights.sum()
        return popularity

    def _source(self, part: int) -> np.random.Generator:
        return np.random.default_rng([self.options.seed, 1, part])

    # --- messages ---

    def part(self, number: int) -> pa.RecordBatch:
        """Generate the messages of part ``number`` as one record batch."""
        options, source = self.options, self._source(number)
        reporting = self._reporting(number, source)
        first = number * self._a_part * self._a_report
        rows = min(len(reporting) * self._a_report, options.messages - first)
        devices = np.repeat(reporting, self._a_report)[:rows]
        metrics = self._metrics(len(devices), source)
        times = self._times(first, rows, source)
        topics, client_ids = self._names(devices.tolist(), metrics.tolist())
        payloads = self._made_payloads(devices, metrics, times, first, source)
        return pa.RecordBatch.from_arrays(
            [
                pa.array(times).cast(topicstore.SCHEMA.field("timestamp").type),
                pa.array(topics, pa.string()),
                pa.array(client_ids, pa.string()),
                pa.repeat(pa.scalar(options.qos, pa.int8()), rows),
                pa.repeat(pa.scalar(options.retain), rows),
                pa.array(payloads, pa.binary()),
                pa.nulls(rows, topicstore.SCHEMA.field("properties").type),
            ],
            schema=topicstore.SCHEMA,
        )

    def _metrics(self, rows: int, source: np.random.Generator) -> _Numbers:
        if self.options.report == "all":
            return np.arange(rows) % self._a_report
        shares = np.array([metric.share for metric in self.options.metrics])
        return source.choice(len(shares), rows, p=shares / shares.sum())

    def _times(self, first: int, rows: int, source: np.random.Generator) -> _Numbers:
        """Return ascending times in microseconds, each random within its interval of equal length."""
        step = self.options.seconds * 1e6 / self.options.messages
        moved = np.arange(first, first + rows) + source.random(rows)
        return _START + (moved * step).astype(np.int64)

    def _names(self, devices: list[int], metrics: list[int]) -> tuple[list[str], list[str]]:
        """Return the topics and the client ids of messages; equal ones are the same string object."""
        names = [metric.name for metric in self.options.metrics]
        known: dict[tuple[int, int], tuple[str, str]] = {}
        topics, client_ids = [], []
        for pair in zip(devices, metrics, strict=True):
            if pair not in known:
                values = {**self._of(pair[0]), "metric": names[pair[1]]}
                known[pair] = self._topic.format(**values), self._client_id.format(**values)
            topic, client_id = known[pair]
            topics.append(topic)
            client_ids.append(client_id)
        return topics, client_ids

    def _made_payloads(
        self, devices: _Numbers, metrics: _Numbers, times: _Numbers, first: int, source: np.random.Generator
    ) -> list[bytes]:
        values = source.random(len(devices)).tolist()
        rows = zip(devices.tolist(), metrics.tolist(), (times // 1_000).tolist(), values, strict=True)
        payloads = []
        for number, (device, metric, ms, value) in enumerate(rows, first):
            what, pattern = self.options.metrics[metric], self._payloads[metric]
            if pattern is None:
                payloads.append(source.bytes(_size(what, value)))
                continue
            read = what.low + (what.high - what.low) * value
            texts = {**self._of(device), "metric": what.name, "unit": what.unit}
            payloads.append(pattern.format(**texts, value=read, ms=ms, number=number).encode())
        return payloads

    # --- requests ---

    def requests(self) -> dict[str, tuple[str, ...]]:
        """Return the filters of the options, with five devices that reported at different times."""
        devices: list[int] = []
        for number in range(_ASKED):
            part, place = divmod(self._reports * (2 * number + 1) // (2 * _ASKED), self._a_part)
            reporting = self._reporting(part, self._source(part))[place:].tolist()
            devices += [device for device in dict.fromkeys(reporting) if device not in devices][:1]
        filters = tuple(self._filter.format(**self._of(device)) for device in devices)
        return {WILDCARD: (self.options.wildcard,), DEVICE: filters, **self.options.requests}


def _pattern(key: str, text: str, known: Mapping[str, Any]) -> str:
    """Return a pattern as a format string for `str.format`. Raises `WorkloadError` if it is invalid."""
    made, end = [], 0
    for found in _PLACEHOLDER.finditer(text):
        if found[1] not in known:
            raise WorkloadError(f"{key!r} has the placeholder {{{found[1]}}}; it may have: {', '.join(known)}")
        made += [_literal(text[end : found.start()]), found[0]]
        end = found.end()
    pattern = "".join([*made, _literal(text[end:])])
    try:
        pattern.format(**known)
    except ValueError as bad:
        raise WorkloadError(f"{key!r} can't be filled in: {bad}") from bad
    return pattern


def _literal(text: str) -> str:
    return text.replace("{", "{{").replace("}", "}}")


def _size(metric: Metric, value: float) -> int:
    """Return a payload size for a random ``value`` from 0 to 1; sizes are distributed log-uniformly."""
    low, high = metric.bytes or (0, 0)
    size: int = round((low + 1) * ((high + 1) / (low + 1)) ** value) - 1
    return size


@lru_cache(maxsize=2)
def _turn(seed: int, number: int, devices: int) -> _Numbers:
    """Return the random order in which the devices report in a turn."""
    return np.random.default_rng([seed, 2, number]).permutation(devices)


def _split(reports: _Numbers, devices: int) -> Iterable[tuple[int, _Numbers]]:
    """Split consecutive reports by turns; yield the number of each turn, and the places within the turn."""
    turns, places = np.divmod(reports, devices)
    ends = np.flatnonzero(np.diff(turns)) + 1
    for part, number in zip(np.split(places, ends), turns[np.r_[0, ends]].tolist(), strict=True):
        yield number, part
