"""Counts of topics and client ids as tables of Spark."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import topicstore as ts

from .conftest import load

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

NAMES = {"topics": "topic", "clients": "client_id"}


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tallies") / "db"
    with ts.open(path, shards=2) as db:
        db.store([ts.Message(f"a/{n % 3}", b"x" * n, f"c{n % 5}") for n in range(100)])
        db.add_generation()
        db.store([ts.Message("a/0", b"x", "c0"), ts.Message("b", b"", "c0")])
        db.compact()
    return path


@pytest.mark.parametrize(("of", "topic_filter"), [("topics", "#"), ("topics", "none"), ("clients", "a/+")])
def test_what_is_counted_is_what_messages_add_up_to(
    spark: SparkSession, path: Path, of: str, topic_filter: str
) -> None:
    from pyspark.sql import functions as f

    size = f.octet_length("topic") + f.octet_length("payload")
    time = f.timestamp_micros(f.shiftright("position", 11))
    grouped = (
        load(spark, path, filter=topic_filter, ids="true")
        .groupBy(NAMES[of])
        .agg(f.count("*"), f.sum(size), f.min(time), f.max(time))
    )
    counted = load(spark, path, filter=topic_filter, of=of)
    assert [NAMES[of], "messages", "bytes", "first", "last"] == counted.columns
    assert sorted(map(tuple, grouped.collect())) == sorted(map(tuple, counted.collect()))


def test_columns_are_chosen(spark: SparkSession, path: Path) -> None:
    chosen = spark.read.format("topicstore").option("of", "topics").schema("messages long, topic string")
    assert [(35, "a/0"), (33, "a/1"), (33, "a/2"), (1, "b")] == [tuple(row) for row in chosen.load(str(path)).collect()]


@pytest.mark.parametrize(
    "options", [{"of": "topic"}, {"of": "topics", "start": "-1h"}, {"of": "clients", "ids": "true"}]
)
def test_what_makes_no_sense_is_refused(spark: SparkSession, path: Path, options: dict[str, str]) -> None:
    with pytest.raises(Exception, match="InvalidArgumentError"):
        load(spark, path, **options).collect()


def test_a_stream_is_of_messages(spark: SparkSession, path: Path) -> None:
    topics = spark.readStream.format("topicstore").option("of", "topics").load(str(path))
    query = topics.writeStream.format("noop").trigger(availableNow=True).start()
    with pytest.raises(Exception, match="for batches"):
        query.awaitTermination()
