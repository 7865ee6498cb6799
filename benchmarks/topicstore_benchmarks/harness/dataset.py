"""The messages of a workload, made once by Spark, and the answers to its requests.

::

    <cache>/<name>-<digest>/part-00000.parquet   messages of `topicstore.SCHEMA`, in order of time
                            topics.parquet       each topic with the hash of its messages: `answers`
                            about.json           `About`

Spark's tasks make the parts, one more hashes them. The directory is written under another name and renamed,
so that it is complete if it exists. All machines of a cluster must see it under the same path.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import attrs
import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from topicstore import Message
from topicstore.contract.batch import MessageBatch
from topicstore.contract.errors import InvalidArgumentError

from topicstore_benchmarks.workloads.definition import Definition
from topicstore_benchmarks.workloads.workload import Requests, Workload, WorkloadError

from .answers import Answer, Chains

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

__all__ = ["About", "Dataset", "make"]

_ABOUT, _TOPICS = "about.json", "topics.parquet"
_LATE = 0.99
"""The fraction of all messages that come before a late start."""


class About(msgspec.Struct, frozen=True, kw_only=True):
    """A description of the messages, and the answers to requests by phase: ``replay all``, ``wildcard`` and so on."""

    name: str
    summary: str
    messages: int
    topics: int
    bytes: int
    """The bytes of topics and payloads."""
    parts: int
    last: int
    """The time of the last message."""
    answers: dict[str, list[Answer]]


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

    def chains(self) -> Chains:
        """Return the hashes of all topics, for more messages to be added."""
        topics = pq.read_table(self.directory / _TOPICS)
        hashes = dict(zip(topics["topic"].to_pylist(), topics["hash"].to_pylist(), strict=True))
        return Chains(hashes, self.about.messages)


def make(spark: SparkSession, definition: Definition, messages: int | None, cache: Path) -> Dataset:
    """Return the messages of a workload, at most ``messages``. They are made if they aren't in ``cache`` yet.

    Raises `WorkloadError` if messages are not what they should be, or a request matches none.
    """
    workload = definition.make(messages)
    directory = cache.absolute() / f"{definition.name}-{definition.digest(workload)}"
    if not directory.exists():
        making = directory.with_name(f".{directory.name}")
        shutil.rmtree(making, ignore_errors=True)
        making.mkdir(parents=True)
        try:
            times = _make_parts(spark, definition, messages, making)
            _make_answers(spark, definition.name, workload, times, making)
        except BaseException:
            shutil.rmtree(making, ignore_errors=True)
            raise
        making.rename(directory)
    return Dataset.load(directory)


def _run(spark: SparkSession, items: Sequence[int], work: Any) -> list[Any]:
    """Run a function over numbers, in tasks for all cores; a bad message or filter comes back as `WorkloadError`."""

    def guarded(item: int) -> tuple[Any, str | None]:
        try:
            return work(item), None
        except InvalidArgumentError as bad:
            return None, str(bad)

    context = spark.sparkContext
    found = context.parallelize(items, min(len(items), context.defaultParallelism)).map(guarded).collect()
    for _, reason in found:
        if reason is not None:
            raise WorkloadError(reason)
    return [value for value, _ in found]


def _make_parts(spark: SparkSession, definition: Definition, messages: int | None, making: Path) -> list[Any]:
    """Make all parts; return their times, in order."""
    parts = definition.make(messages).parts
    times = _run(spark, range(parts), lambda number: _make_part(definition, messages, number, making))
    ends = [(int(part[0]), int(part[-1])) for part in times]
    for number, ((_, last), (first, _)) in enumerate(pairwise(ends), 1):
        if first < last:
            raise WorkloadError(f"{definition.source}: part {number} begins before the end of the one before it")
    return times


def _make_part(definition: Definition, messages: int | None, number: int, making: Path) -> Any:
    """Write a part; return its times."""
    batch = definition.make(messages).part(number)
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


def _make_answers(spark: SparkSession, name: str, workload: Workload, times: list[Any], making: Path) -> None:
    requests, summary = workload.requests(), workload.options.summary
    _run(spark, [0], lambda _: _hash_all(making, name, summary, times, requests))


def _part(directory: Path, number: int) -> Path:
    return directory / f"part-{number:05}.parquet"


def _messages(directory: Path, number: int) -> list[Message]:
    batches = pq.read_table(_part(directory, number)).combine_chunks().to_batches()
    return MessageBatch.from_arrow(batches[0]).to_messages()


def _hash_all(making: Path, name: str, summary: str, times: list[Any], requests: Requests) -> None:
    """Write the description of the messages, and the answers."""
    every = np.concatenate(times)
    late = int(every[int(len(every) * _LATE)])
    everything, last_ones, size = Chains(), Chains(), 0
    for number in range(len(times)):
        chunk = _messages(making, number)
        size += sum(len(message.topic.encode()) + len(message.payload) for message in chunk)
        everything.add(chunk)
        last_ones.add(message for message in chunk if (message.timestamp or 0) >= late)
    counts = _counts(making, len(times))
    answers = {
        "replay all": [everything.answer("#", 0)],
        "wildcard": [_matching(requests.wildcard, everything, counts)],
        "one device": [_matching(text, everything, counts) for text in requests.devices],
        "late start": [last_ones.answer("#", late)],
    }
    about = About(
        name=name,
        summary=summary,
        messages=len(every),
        topics=len(counts),
        bytes=size,
        parts=len(times),
        last=int(every[-1]),
        answers=answers,
    )
    hashes = pa.array(everything.hashes.values(), pa.uint64())
    pq.write_table(pa.table({"topic": list(everything.hashes), "hash": hashes}), making / _TOPICS)
    (making / _ABOUT).write_bytes(msgspec.json.format(msgspec.json.encode(about)))


def _counts(making: Path, parts: int) -> dict[str, int]:
    """Return the number of messages of each topic."""
    topics = pa.chunked_array(
        [chunk for n in range(parts) for chunk in pq.read_table(_part(making, n), columns=["topic"])["topic"].chunks]
    )
    counted = topics.value_counts()
    return dict(zip(counted.field("values").to_pylist(), counted.field("counts").to_pylist(), strict=True))


def _matching(text: str, everything: Chains, counts: dict[str, int]) -> Answer:
    """Return the answer to a filter."""
    answer = everything.matching(text, counts)
    if not answer.messages:
        raise WorkloadError(f"no message matches {text!r}, which is a requested filter")
    return answer
