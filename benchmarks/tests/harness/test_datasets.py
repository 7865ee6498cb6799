"""Data sets: messages generated in process and with Spark, and the expected replays of their requests."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from topicstore_benchmarks.harness.dataset import Dataset, ExpectedReplay, make
from topicstore_benchmarks.harness.drive import spark_tasks
from topicstore_benchmarks.workloads.definition import Definition, from_parquet, read
from topicstore_benchmarks.workloads.workload import WorkloadError
from topicstore_conformance.oracle.model import match

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


def test_expected_replays_are_those_of_a_plain_walk(
    spark: SparkSession, small: Dataset, small_toml: Path, tmp_path: Path
) -> None:
    """Expected replays equal those of a plain filter over all messages, and Spark generates the same data set."""
    elsewhere, small = small, make(read(str(small_toml)), tmp_path, spark_tasks(spark))
    assert elsewhere.about == small.about
    messages = [message for chunk in small.chunks() for message in chunk]
    assert (3_000, small.about.messages) == (len(messages), len(messages))
    assert {"replay all": 1, "wildcard": 1, "one device": 5, "late start": 1} == {
        phase: len(answers) for phase, answers in small.about.expected.items()
    }
    for one in [one for answers in small.about.expected.values() for one in answers]:
        wanted = [m for m in messages if match(one.topic_filter, m.topic) and (m.timestamp or 0) >= one.start]
        assert len(wanted) == one.messages > 0
        one.check(wanted)
    (late,) = small.about.expected["late start"]
    assert 30 == late.messages
    assert small.about.expected["replay all"] == [ExpectedReplay.of(small.digests())]


def test_it_is_made_once(small_toml: Path, tmp_path: Path) -> None:
    """A data set is generated once; a data set with another number of messages has its own directory."""
    definition = read(str(small_toml))
    one = make(definition.limited(1_000), tmp_path)
    before = (one.directory / "about.json").stat().st_mtime_ns
    assert one == make(definition.limited(1_000), tmp_path)
    assert before == (one.directory / "about.json").stat().st_mtime_ns
    other = make(definition.limited(2_000), tmp_path)
    assert {one.directory, other.directory} == set(tmp_path.iterdir())


def own(path: Path, times: list[int], topic: str = "a") -> Definition:
    columns: dict[str, Any] = {
        "timestamp": pa.array(times, pa.timestamp("us", "UTC")),
        "topic": [topic] * len(times),
        "payload": [b""] * len(times),
    }
    pq.write_table(pa.table(columns), path / "own.parquet")
    return from_parquet(path / "own.parquet")


@pytest.mark.parametrize(
    ("times", "topic", "says"),
    [
        ([1, 3, 2], "a", "not in order of time: row 2 of part 0"),
        ([*range(50_000), 5], "a", "part 1 begins before the end of the one before it"),
        ([1, 4_000_000_000_000_000], "a", "times in the future"),
        ([1], "$SYS/a", "topics that begin with"),
    ],
)
def test_messages_that_can_not_be_measured(times: list[int], topic: str, says: str, tmp_path: Path) -> None:
    """Unordered messages, future times and topics with ``$`` are rejected with the reason, and no file is left."""
    with pytest.raises(WorkloadError, match=rf"own\.parquet: .*{says}"):
        make(own(tmp_path, times, topic), tmp_path / "cache")
    assert [] == list((tmp_path / "cache").iterdir())


def test_a_request_that_finds_nothing_is_refused(tmp_path: Path) -> None:
    """A request whose filter matches no message is rejected."""
    definition = own(tmp_path, [1, 2])
    asking = from_parquet(Path(definition.source), {"wildcard": ["b/+"]})
    with pytest.raises(WorkloadError, match="no message matches 'b/\\+'"):
        make(asking, tmp_path / "cache")
