"""The sets of messages with which the layouts are compared, and the requests for each.

``bus`` is real: positions of buses, as `topicstore_conformance.subjects.datasets` finds them. ``fleet`` is
made: devices that each report five metrics at a time, four times in an hour, in an order that is
shuffled each time. Both come in order of time and are the same in every run. The expected
answers to requests are computed from the messages themselves, as in the harness.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator
from itertools import chain

import attrs
import pyarrow as pa
from topicstore import Message
from topicstore.digests import TopicDigests
from topicstore_conformance.subjects import datasets

from topicstore_benchmarks.harness.expected import ExpectedReplay

__all__ = ["ALL", "BATCH", "FLEET_MESSAGES", "SETS", "MessageSet", "Task", "bus", "fleet", "fleet_batches"]

BATCH = 1_000
FLEET_MESSAGES = 2_000_000
"""The messages of 100,000 devices."""
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
class Task:
    """Replays of one kind. The time of a task is the median over them."""

    name: str
    answers: tuple[ExpectedReplay, ...]
    """The expected answer of each replay. Descriptions show the first one."""

    @property
    def messages(self) -> int:
        """The number of messages in the first answer."""
        return self.answers[0].messages


@attrs.frozen(kw_only=True)
class MessageSet:
    """Messages in batches of 1,000, with tasks."""

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


class _Known:
    """Messages in order of time, with expected answers to requests."""

    def __init__(self, messages: Iterable[Message]) -> None:
        self.messages = list(messages)
        self._digests = TopicDigests()
        self._digests.add(self.messages)
        self.topics = self._digests.counts

    def task(self, name: str, *filters: str) -> Task:
        return Task(name, tuple(ExpectedReplay.of(self._digests.matching(text), text) for text in filters))

    def last_minute(self) -> Task:
        start = (self.messages[-1].timestamp or 0) - _MINUTE
        late = TopicDigests()
        late.add(message for message in self.messages if (message.timestamp or 0) >= start)
        return Task("last minute", (ExpectedReplay.of(late, start=start),))

    def set(self, name: str, *tasks: Task) -> MessageSet:
        batches = [self.messages[start : start + BATCH] for start in range(0, len(self.messages), BATCH)]
        return MessageSet(
            name=name,
            batches=batches,
            messages=len(self.messages),
            topics=len(self.topics),
            tasks=(self.task(ALL, "#"), *tasks, self.last_minute()),
        )


def bus(messages: int) -> MessageSet:
    """Return the real set, or its first ``messages``. `datasets.why_absent` says whether it is available."""
    table = datasets.load("bus")[:messages]
    names = ("topic", "payload", "client_id", "qos", "retain")
    columns = [table.column(name).to_pylist() for name in names]
    known = _Known(map(Message, *columns, table.column("timestamp").cast(pa.int64()).to_pylist()))
    ranked = sorted(known.topics, key=lambda topic: (known.topics[topic], topic))
    middle = len(ranked) // 2
    source = random.Random(7)  # noqa: S311 - the same requests in every run
    vehicles = [message.topic.split("/")[-1] for message in source.sample(known.messages, 5)]
    return known.set(
        "bus",
        known.task("one route", "capmetro/vp/801/+"),
        known.task("one vehicle", *(f"capmetro/vp/+/{vehicle}" for vehicle in vehicles)),
        known.task("median topic", *ranked[middle - 2 : middle + 3]),
        known.task("busiest topic", ranked[-1]),
    )


def fleet(messages: int) -> MessageSet:
    """Return the generated set, with one device for every 20 messages."""
    known = _Known(chain.from_iterable(fleet_batches(messages)))
    source = random.Random(7)  # noqa: S311 - the same requests in every run
    devices = [source.randrange(messages // _MESSAGES_A_DEVICE) for _ in range(9)]
    return known.set(
        "fleet",
        known.task("one metric", "fleet/+/+/temp"),
        known.task("one device", *(f"fleet/region-{number % _REGIONS}/bus-{number}/+" for number in devices)),
    )


def fleet_batches(messages: int) -> Iterator[list[Message]]:
    """Yield the messages of ``fleet`` a batch at a time, so that they need not all be in memory."""
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
"""The sets by name. Each function takes the number of messages."""
