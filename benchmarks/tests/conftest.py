"""Fixtures of all benchmark tests: a small data set with its expected replays, and a Spark session."""

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
    """Mark all tests of this folder as slow, so that only `make test-all` runs them."""
    item.add_marker(pytest.mark.slow)


@pytest.fixture(scope="session")
def small_toml(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The path of the definition of a small generated workload."""
    path = tmp_path_factory.mktemp("workloads") / "small.toml"
    path.write_text(SMALL)
    return path


@pytest.fixture(scope="session")
def spark() -> Iterator[SparkSession]:
    """A local Spark session that runs two tasks at the same time."""
    pytest.importorskip("pyspark", reason='needs pyspark: pip install "topicstore[spark]"')
    from topicstore.spark import session

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)  # PySpark leaves its own sockets open
        running = session(spark_master="local[2, 3]", spark_driver_memory="1g")
        yield running
        running.stop()


@pytest.fixture(scope="session")
def small(small_toml: Path, tmp_path_factory: pytest.TempPathFactory) -> Dataset:
    """The data set of the small workload."""
    from topicstore_benchmarks.harness.dataset import make
    from topicstore_benchmarks.workloads.definition import read

    return make(read(str(small_toml)), tmp_path_factory.mktemp("cache"))
