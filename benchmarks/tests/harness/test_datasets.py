"""Messages of workloads as Spark makes them, and the answers to their requests."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from topicstore import Message
from topicstore_benchmarks.harness.answers import Answer, Chains, WrongReplayError
from topicstore_benchmarks.harness.dataset import Dataset, make
from topicstore_benchmarks.workloads.definition import Definition, from_parquet, read
from topicstore_benchmarks.workloads.workload import WorkloadError
from topicstore_conformance.oracle.model import match

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

MESSAGES = [Message(f"t/{n % 3}", b"%d" % n, "c", 1, False, n) for n in range(30)]


def answer(messages: Iterable[Message]) -> Answer:
    chains = Chains()
    chains.add(messages)
    return chains.answer("#", 0)


# --- answers ---


def test_topics_may_come_in_any_order() -> None:
    """Only a topic's own messages have one."""
    answer(MESSAGES).check(sorted(MESSAGES, key=lambda message: message.topic))


@pytest.mark.parametrize(
    "replay",
    [
        MESSAGES[:-1],
        [*MESSAGES, MESSAGES[-1]],
        [*MESSAGES[:-1], MESSAGES[0]],
        MESSAGES[::-1],
        [*MESSAGES[:-1], msgspec.structs.replace(MESSAGES[-1], topic="t/9")],
        *(
            [*MESSAGES[:-1], msgspec.structs.replace(MESSAGES[-1], **{field: value})]
            for field, value in {"payload": b"", "client_id": "", "qos": 2, "retain": True, "timestamp": 99}.items()
        ),
    ],
)
def test_a_wrong_replay(replay: list[Message]) -> None:
    """One lost, one twice, one for another, another order, another topic, and every other field."""
    with pytest.raises(WrongReplayError):
        answer(MESSAGES).check(replay)


def test_a_chain_goes_on() -> None:
    """What is stored later is hashed onto what was there."""
    chains = Chains()
    chains.add(MESSAGES[:11])
    chains.add(MESSAGES[11:])
    assert answer(MESSAGES) == chains.answer("#", 0)


# --- datasets ---


def test_answers_are_those_of_a_plain_walk(
    spark: SparkSession, small: Dataset, small_toml: Path, tmp_path: Path
) -> None:
    """For every request: which messages match, from when; and they are the same wherever tasks run."""
    elsewhere, small = small, make(spark, read(str(small_toml)), None, tmp_path)
    assert elsewhere.about == small.about
    messages = [message for chunk in small.chunks() for message in chunk]
    assert (3_000, small.about.messages) == (len(messages), len(messages))
    assert {"replay all": 1, "wildcard": 1, "one device": 5, "late start": 1} == {
        phase: len(answers) for phase, answers in small.about.answers.items()
    }
    for one in [one for answers in small.about.answers.values() for one in answers]:
        wanted = [m for m in messages if match(one.topic_filter, m.topic) and (m.timestamp or 0) >= one.start]
        assert len(wanted) == one.messages > 0
        one.check(wanted)
    (late,) = small.about.answers["late start"]
    assert 30 == late.messages
    chains = small.chains()
    assert small.about.answers["replay all"][0] == chains.answer("#", 0)


def test_it_is_made_once(spark: SparkSession, small_toml: Path, tmp_path: Path) -> None:
    """Fewer messages are others; the directory has a name of its own, and nothing else is left."""
    definition = read(str(small_toml))
    one = make(spark, definition, 1_000, tmp_path)
    before = (one.directory / "about.json").stat().st_mtime_ns
    assert one == make(spark, definition, 1_000, tmp_path)
    assert before == (one.directory / "about.json").stat().st_mtime_ns
    other = make(spark, definition, 2_000, tmp_path)
    assert {one.directory, other.directory} == set(tmp_path.iterdir())


def own(path: Path, times: list[int], topic: str = "a") -> Definition:
    columns: dict[str, Any] = {
        "timestamp": pa.array(times, pa.timestamp("us", "UTC")),
        "topic": [topic] * len(times),
        "payload": [b""] * len(times),
    }
    pq.write_table(pa.table(columns), path / "own.parquet")
    return from_parquet(path / "own.parquet", None, ())


@pytest.mark.parametrize(
    ("times", "topic", "says"),
    [
        ([1, 3, 2], "a", "not in order of time: row 2 of part 0"),
        ([*range(50_000), 5], "a", "part 1 begins before the end of the one before it"),
        ([1, 4_000_000_000_000_000], "a", "times in the future"),
        ([1], "$SYS/a", "topics that begin with"),
    ],
)
def test_messages_that_can_not_be_measured(
    times: list[int], topic: str, says: str, spark: SparkSession, tmp_path: Path
) -> None:
    """Are refused with the reason, and leave nothing."""
    with pytest.raises(WorkloadError, match=rf"own\.parquet: .*{says}"):
        make(spark, own(tmp_path, times, topic), None, tmp_path / "cache")
    assert [] == list((tmp_path / "cache").iterdir())


def test_a_request_that_finds_nothing_is_refused(spark: SparkSession, tmp_path: Path) -> None:
    """Its time would say nothing."""
    definition = own(tmp_path, [1, 2])
    asking = from_parquet(Path(definition.source), "b/+", ())
    with pytest.raises(WorkloadError, match="no message matches 'b/\\+'"):
        make(spark, asking, None, tmp_path / "cache")
