"""The sets of messages that the layouts are compared on, and what is asked of each.

``bus`` is real: positions of buses, as `topicstore_conformance.subjects.datasets` finds them. ``fleet`` is
made: devices that each report five metrics at a time, four times in an hour, in an order that is
shuffled anew each time. Both come in order of time and are the same in every run. How many
messages must come back for a request is counted here, from the messages themselves.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator
from itertools import chain

import attrs
import pyarrow as pa
from topicstore import Message, TopicFilter
from topicstore_conformance.subjects import datasets

__all__ = ["ALL", "BATCH", "FLEET_MESSAGES", "SETS", "MessageSet", "Request", "Task", "bus", "fleet", "fleet_batches"]

BATCH = 1_000
FLEET_MESSAGES = 2_000_000
"""Of 100,000 devices."""
ALL = "all"
"""The task that each set has: a replay of everything."""

_METRICS = {
    "temp": (b"C", -10.0, 35.0),
    "speed": (b"km/h", 0.0, 90.0),
    "fuel": (b"%", 0.0, 100.0),
    "load": (b"kg", 0.0, 6_000.0),
    "pressure": (b"bar", 6.0, 9.0),
}
"""Name, unit, lowest and highest value."""
_REGIONS = 20
_REPORTS = 4
_MESSAGES_A_DEVICE = _REPORTS * len(_METRICS)
_HOUR, _MINUTE = 3_600_000_000, 60_000_000
_START = 1_735_689_600_000_000
"""2025-01-01T00:00:00Z."""


@attrs.frozen
class Request:
    """One replay."""

    topic_filter: str
    start: int
    messages: int
    """How many it must return."""


@attrs.frozen
class Task:
    """Replays of one kind. Its time is the median over them."""

    name: str
    requests: tuple[Request, ...]

    @property
    def topic_filter(self) -> str:
        """Of its first request, which stands for all."""
        return self.requests[0].topic_filter

    @property
    def messages(self) -> int:
        """What its first request returns."""
        return self.requests[0].messages


@attrs.frozen(kw_only=True)
class MessageSet:
    """Messages in batches of 1,000, and what is asked of them."""

    name: str
    batches: list[list[Message]]
    messages: int
    topics: int
    tasks: tuple[Task, ...]

    def task(self, name: str) -> Task:
        """Return one of the tasks."""
        return next(task for task in self.tasks if task.name == name)

    def rows(self) -> Iterator[Message]:
        """Iterate over the messages."""
        return chain.from_iterable(self.batches)


class _Counts:
    """Counts what requests must return."""

    def __init__(self, batches: list[list[Message]]) -> None:
        self.topics = Counter(message.topic for message in chain.from_iterable(batches))
        self._times = [message.timestamp or 0 for message in chain.from_iterable(batches)]

    def task(self, name: str, *filters: str) -> Task:
        return Task(name, tuple(Request(text, 0, self._matching(text)) for text in filters))

    def _matching(self, text: str) -> int:
        if text in self.topics:
            return self.topics[text]
        matches = TopicFilter(text).matches
        return sum(count for topic, count in self.topics.items() if matches(topic))

    def last_minute(self) -> Task:
        start = self._times[-1] - _MINUTE
        return Task("last minute", (Request("#", start, sum(time >= start for time in self._times)),))

    def messages(self) -> int:
        return len(self._times)


def bus(messages: int) -> MessageSet:
    """Return the real set, or its first ``messages``. `datasets.why_absent` says whether it is there."""
    table = datasets.load("bus")[:messages]
    names = ("topic", "payload", "client_id", "qos", "retain")
    columns = [table.column(name).to_pylist() for name in names]
    rows = list(map(Message, *columns, table.column("timestamp").cast(pa.int64()).to_pylist()))
    batches = [rows[start : start + BATCH] for start in range(0, len(rows), BATCH)]
    counts = _Counts(batches)
    ranked = sorted(counts.topics, key=lambda topic: (counts.topics[topic], topic))
    middle = len(ranked) // 2
    source = random.Random(7)  # noqa: S311 - the same requests in every run
    vehicles = [message.topic.split("/")[-1] for message in source.sample(rows, 5)]
    tasks = (
        counts.task(ALL, "#"),
        counts.task("one route", "capmetro/vp/801/+"),
        counts.task("one vehicle", *(f"capmetro/vp/+/{vehicle}" for vehicle in vehicles)),
        counts.task("median topic", *ranked[middle - 2 : middle + 3]),
        counts.task("busiest topic", ranked[-1]),
        counts.last_minute(),
    )
    return MessageSet(name="bus", batches=batches, messages=len(rows), topics=len(ranked), tasks=tasks)


def fleet(messages: int) -> MessageSet:
    """Return the made set, of a device for every 20 messages."""
    batches = list(fleet_batches(messages))
    counts = _Counts(batches)
    source = random.Random(7)  # noqa: S311 - the same requests in every run
    devices = [source.randrange(messages // _MESSAGES_A_DEVICE) for _ in range(9)]
    tasks = (
        counts.task(ALL, "#"),
        counts.task("one metric", "fleet/+/+/temp"),
        counts.task("one device", *(f"fleet/region-{number % _REGIONS}/bus-{number}/+" for number in devices)),
        counts.last_minute(),
    )
    return MessageSet(name="fleet", batches=batches, messages=counts.messages(), topics=len(counts.topics), tasks=tasks)


def fleet_batches(messages: int) -> Iterator[list[Message]]:
    """Yield the messages of ``fleet`` a batch at a time, for who doesn't want them all in memory."""
    source = random.Random(7)  # noqa: S311 - the same messages in every run
    devices = [
        (f"bus-{number}", [f"fleet/region-{number % _REGIONS}/bus-{number}/{metric}" for metric in _METRICS])
        for number in range(messages // _MESSAGES_A_DEVICE)
    ]
    pause = _HOUR // (_REPORTS * len(devices))
    time, batch = _START, list[Message]()
    for _ in range(_REPORTS):
        source.shuffle(devices)
        for client_id, topics in devices:
            time += pause
            batch += [
                Message(topic, _payload(source, time, *metric), client_id, 1, False, time + number)
                for number, (topic, metric) in enumerate(zip(topics, _METRICS.values(), strict=True))
            ]
            if len(batch) >= BATCH:
                yield batch
                batch = []
    if batch:
        yield batch


def _payload(source: random.Random, time: int, unit: bytes, low: float, high: float) -> bytes:
    value = low + (high - low) * source.random()
    return b'{"ts":%d,"value":%.1f,"unit":"%b","status":"ok"}' % (time // 1_000, value, unit)


SETS = {"bus": bus, "fleet": fleet}
"""By name; each takes the number of messages that are wanted."""
