"""The messages of a workload, made once, the expected replays of its requests, and checks of replays against these.

::

    <cache>/<name>-<digest>/part-00000.parquet   messages of `topicstore.SCHEMA`, in order of time
                            topics.parquet       each topic with the count and the hash of its messages
                            about.json           `About`

Parts are made by tasks, in this process or by Spark. The directory is written under another name and renamed,
so that it is complete if it exists. All machines of a cluster must see it under the same path.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain, pairwise
from pathlib import Path
from typing import Any

import attrs
import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from topicstore import Message
from topicstore.contract.batch import MessageBatch
from topicstore.digests import TopicDigests

from topicstore_benchmarks.results import LATE_START, REPLAY_ALL
from topicstore_benchmarks.workloads.definition import Definition
from topicstore_benchmarks.workloads.workload import Workload, WorkloadError

__all__ = ["About", "Dataset", "ExpectedReplay", "Tasks", "WrongReplayError", "make", "write"]

Tasks = Callable[[Callable[[int], Any], Sequence[int]], Sequence[Any]]
"""Runs a function over numbers, as `map` does, wherever; returns the results in order."""

_ABOUT, _TOPICS = "about.json", "topics.parquet"
_LATE = 0.99
"""The fraction of all messages that come before a late start."""


class WrongReplayError(Exception):
    """A replay returned other messages than were stored, or in another order. Its time doesn't count."""


class ExpectedReplay(msgspec.Struct, frozen=True, kw_only=True):
    """The messages that one replay must return."""

    topic_filter: str
    start: int
    messages: int
    topics: int
    digest: int

    @classmethod
    def of(cls, digests: TopicDigests, topic_filter: str = "#", start: int = 0) -> ExpectedReplay:
        """Return the expected replay of messages that all match a request."""
        return cls(
            topic_filter=topic_filter,
            start=start,
            messages=digests.messages,
            topics=len(digests.counts),
            digest=digests.digest(),
        )

    def check_count(self, messages: int) -> None:
        """Raise `WrongReplayError` unless the number of messages is right."""
        if messages != self.messages:
            what = f"{self.topic_filter!r} from {self.start}"
            raise WrongReplayError(f"a replay of {what} gave {messages:,} of {self.messages:,} messages")

    def check(self, replay: Iterable[Message]) -> None:
        """Raise `WrongReplayError` unless a replay returns every message, unchanged, with each topic's in order."""
        given = TopicDigests()
        given.add(replay)
        self.check_count(given.messages)
        if (len(given.counts), given.digest()) != (self.topics, self.digest):
            what = f"{self.topic_filter!r} from {self.start}"
            raise WrongReplayError(f"a replay of {what} gave messages that were changed, or in another order")


class About(msgspec.Struct, frozen=True, kw_only=True):
    """A description of the messages, and the expected replays by request: ``replay all``, ``wildcard`` and so on."""

    name: str
    summary: str
    messages: int
    topics: int
    bytes: int
    """The bytes of topics and payloads."""
    parts: int
    last: int
    """The time of the last message."""
    expected: dict[str, list[ExpectedReplay]]


@attrs.frozen
class Dataset:
    """Messages that were made."""

    directory: Path
    about: About

    @classmethod
    def load(cls, directory: Path) -> Dataset:
        """Return the dataset in a directory."""
        return cls(directory, msgspec.json.decode((directory / _ABOUT).read_bytes(), type=About))

    def chunks(self) -> Iterator[list[Message]]:
        """Yield all messages in order, a part at a time."""
        return map(self.chunk, range(self.about.parts))

    def chunk(self, number: int) -> list[Message]:
        """Return the messages of a part."""
        return _messages(self.directory, number)

    def digests(self) -> TopicDigests:
        """Return the digests of all topics, for more messages to be added."""
        columns = pq.read_table(self.directory / _TOPICS).to_pydict()
        counts, hashes = (dict(zip(columns["topic"], columns[name], strict=True)) for name in ("count", "hash"))
        return TopicDigests(counts, hashes)


def _here(work: Callable[[int], Any], items: Sequence[int]) -> Sequence[Any]:
    return list(map(work, items))


def make(definition: Definition, cache: Path, tasks: Tasks = _here) -> Dataset:
    """Return the messages of a workload. They are made if they aren't in ``cache`` yet.

    Raises `WorkloadError` if messages are not what they should be, or a request matches none.
    """
    workload = definition.make()
    directory = cache.absolute() / f"{definition.name}-{definition.digest(workload)}"
    if not directory.exists():
        making = directory.with_name(f".{directory.name}")
        shutil.rmtree(making, ignore_errors=True)
        making.mkdir(parents=True)
        try:
            times = tasks(lambda number: _make_part(definition, number, making), range(workload.parts))
            _check_order(definition, times)
            about = _describe(making, definition.name, workload, np.concatenate(times))
            for one in chain.from_iterable(about.expected.values()):
                if not one.messages:
                    raise WorkloadError(f"no message matches {one.topic_filter!r}, which is a requested filter")
        except BaseException:
            shutil.rmtree(making, ignore_errors=True)
            raise
        making.rename(directory)
    return Dataset.load(directory)


def write(workload: Workload, name: str, directory: Path) -> Dataset:
    """Write messages that are in order of time, and their description, into a new directory.

    Topics may begin with ``$``, and requests may match nothing.
    """
    directory.mkdir()
    batches = [workload.part(number) for number in range(workload.parts)]
    for number, batch in enumerate(batches):
        pq.write_table(pa.Table.from_batches([batch]), _part(directory, number))
    times = [batch.column("timestamp").cast(pa.int64()).to_numpy() for batch in batches]
    _describe(directory, name, workload, np.concatenate(times))
    return Dataset.load(directory)


def _check_order(definition: Definition, times: Sequence[Any]) -> None:
    ends = [(int(part[0]), int(part[-1])) for part in times]
    for number, ((_, last), (first, _)) in enumerate(pairwise(ends), 1):
        if first < last:
            raise WorkloadError(f"{definition.source}: part {number} begins before the end of the one before it")


def _make_part(definition: Definition, number: int, making: Path) -> Any:
    """Write a part; return its times."""
    batch = definition.make().part(number)
    times = batch.column("timestamp").cast(pa.int64()).to_numpy()
    falls = np.flatnonzero(np.diff(times) < 0)
    if len(falls):
        row = int(falls[0]) + 1
        raise WorkloadError(f"{definition.source}: messages are not in order of time: row {row:,} of part {number}")
    if times[-1] > time.time() * 1e6:
        raise WorkloadError(f"{definition.source}: there are times in the future, in part {number}")
    if pc.any(pc.starts_with(batch.column("topic"), "$")).as_py():
        raise WorkloadError(f"{definition.source}: topics that begin with $, which # doesn't match; leave them out")
    pq.write_table(pa.Table.from_batches([batch]), _part(making, number), compression="zstd")
    return times


def _part(directory: Path, number: int) -> Path:
    return directory / f"part-{number:05}.parquet"


def _messages(directory: Path, number: int) -> list[Message]:
    batches = pq.read_table(_part(directory, number)).combine_chunks().to_batches()
    return MessageBatch.from_arrow(batches[0]).to_messages()


def _describe(making: Path, name: str, workload: Workload, times: Any) -> About:
    """Write the description of the messages, and the expected replays."""
    late = int(times[int(len(times) * _LATE)])
    everything, last_ones, size = TopicDigests(), TopicDigests(), 0
    for number in range(workload.parts):
        chunk = _messages(making, number)
        size += sum(len(message.topic.encode()) + len(message.payload) for message in chunk)
        everything.add(chunk)
        last_ones.add(message for message in chunk if (message.timestamp or 0) >= late)
    requests = {REPLAY_ALL: ("#",), **workload.requests()}
    expected = {
        request: [ExpectedReplay.of(everything.matching(text), text) for text in filters]
        for request, filters in requests.items()
    }
    expected[LATE_START] = [ExpectedReplay.of(last_ones.matching("#"), start=late)]
    about = About(
        name=name,
        summary=workload.summary,
        messages=len(times),
        topics=len(everything.counts),
        bytes=size,
        parts=workload.parts,
        last=int(times[-1]),
        expected=expected,
    )
    topics = {
        "topic": list(everything.counts),
        "count": pa.array(everything.counts.values(), pa.int64()),
        "hash": pa.array(everything.hashes.values(), pa.uint64()),
    }
    pq.write_table(pa.table(topics), making / _TOPICS)
    (making / _ABOUT).write_bytes(msgspec.json.format(msgspec.json.encode(about)))
    return about
