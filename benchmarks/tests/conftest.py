"""A small set of messages with all answers, for the tests of the harness, and a Spark session."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from pyspark.sql import SparkSession
    from topicstore_benchmarks.harness.dataset import Dataset

SMALL = """
[workload]
kind = "made"
summary = "a few devices"
messages = 3_000
topic = "site/{hall}/device-{device}/{metric}"
devices = 50
groups = { hall = 3 }
popularity = "zipf"
wildcard = "site/+/+/t"
device = "site/{hall}/device-{device}/+"
metrics = [{ name = "t", payload = '{"v":{value:.3f}}' }, { name = "p", bytes = [0, 300] }]
"""


def pytest_itemcollected(item: pytest.Item) -> None:
    """All tests of this folder are left to `make test-all`."""
    item.add_marker(pytest.mark.slow)


@pytest.fixture(scope="session")
def small_toml(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The definition of a workload that is made in no time."""
    path = tmp_path_factory.mktemp("workloads") / "small.toml"
    path.write_text(SMALL)
    return path


@pytest.fixture(scope="session")
def spark() -> Iterator[SparkSession]:
    """Two tasks at a time."""
    pytest.importorskip("pyspark", reason='needs pyspark: pip install "topicstore[spark]"')
    from topicstore.spark import session

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)  # PySpark's own sockets
        running = session(spark_master="local[2, 3]", spark_driver_memory="1g")
        yield running
        running.stop()


@pytest.fixture(scope="session")
def small(small_toml: Path, tmp_path_factory: pytest.TempPathFactory) -> Dataset:
    """The messages of that workload."""
    from topicstore_benchmarks.harness.dataset import make
    from topicstore_benchmarks.workloads.definition import read

    return make(read(str(small_toml)), tmp_path_factory.mktemp("cache"))
