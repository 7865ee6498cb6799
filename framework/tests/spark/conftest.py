"""One Spark session for all tests, and the data they read."""

from __future__ import annotations

import gzip
import json
import os
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import topicstore as ts

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

DATA = Path(os.environ.get("TOPICSTORE_DATA", Path(__file__).resolve().parents[4] / "shared" / "data"))


@pytest.fixture(scope="session")
def spark() -> Iterator[SparkSession]:
    """Two tasks at a time, each tried up to three times."""
    pytest.importorskip("pyspark", reason='needs pyspark: pip install "topicstore[spark]"')
    from topicstore.spark import session

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)  # PySpark's own sockets
        running = session(spark_master="local[2, 3]", spark_driver_memory="1g")
        yield running
        running.stop()


@pytest.fixture(scope="session", params=["bus", "home"])
def sample(request: pytest.FixtureRequest) -> list[ts.Message]:
    """Five thousand messages of real data, in time order."""
    path = DATA / f"{request.param}-sample.jsonl.gz"
    if not path.exists():
        pytest.skip(f"{path} is not there; TOPICSTORE_DATA says where")
    with gzip.open(path, "rt") as lines:
        return [_message(json.loads(line)) for line in lines]


def _message(row: dict[str, object]) -> ts.Message:
    return ts.Message(
        str(row["topic"]),
        str(row["payload"]).encode(),
        str(row["client_id"]),
        qos=int(str(row["qos"])),
        retain=bool(row["retain"]),
        timestamp=int(str(row["timestamp"])),
    )
