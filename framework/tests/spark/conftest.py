"""A Spark session for all tests, and the data that they read."""

from __future__ import annotations

import gc
import os
import signal
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import topicstore as ts
from topicstore_conformance.conditions.skipping import need_data
from topicstore_conformance.subjects import datasets

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

FIRST = 1_700_000_000_000_000
"""The time of the first of the numbered messages."""


@pytest.fixture(scope="session")
def spark() -> Iterator[SparkSession]:
    """Return a Spark session that runs two tasks at a time, and tries each task up to three times."""
    pytest.importorskip("pyspark", reason='needs pyspark: pip install "topicstore[spark]"')
    from topicstore.spark import session

    with _sockets_left_open():
        running = session(
            spark_master="local[2, 3]",
            spark_driver_memory="1g",
            spark_sql_shuffle_partitions=2,
            spark_sql_files_openCostInBytes=0,  # makes Spark divide small files, too
        )
    yield running
    with _sockets_left_open():
        running.stop()


@contextmanager
def _sockets_left_open() -> Iterator[None]:
    """Ignore warnings about PySpark's unclosed sockets, only while the session starts and stops."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)
        yield
        gc.collect()  # collects unreachable sockets here, so that no later test warns about them


def load(spark: SparkSession, path: Path, **options: Any) -> DataFrame:
    """Return a database as a data frame."""
    return spark.read.format("topicstore").options(**options).load(str(path))


@pytest.fixture
def dying(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[Iterable[Any]], Iterator[Any]]]:
    """Return a function for tasks that yields its input, and once kills its process after the second item."""
    killed = tmp_path_factory.mktemp("dying") / "killed"

    def dying(things: Iterable[Any]) -> Iterator[Any]:
        for number, thing in enumerate(things):
            yield thing
            if number == 1:
                with suppress(FileExistsError):
                    killed.touch(exist_ok=False)
                    os.kill(os.getpid(), signal.SIGKILL)

    yield dying
    assert killed.exists(), "no process came to its third thing"


@pytest.fixture(scope="session", params=[pytest.param("bus", marks=pytest.mark.slow), "home"])
def real(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Real messages in order of time: the first hundred thousand of a data set, in row groups for two tasks."""
    need_data(f"{request.param}.parquet")
    path = datasets.folder() / f"{request.param}.parquet"
    first = tmp_path_factory.mktemp("real") / path.name
    with pq.ParquetFile(path) as file:
        pq.write_table(pa.Table.from_batches(file.iter_batches()).slice(0, 100_000), first, row_group_size=10_000)
    return first


class Sites:
    """The sites of one cluster, each with a directory of its own."""

    def __init__(self, root: Path) -> None:
        self.log = root / "log"
        self.url = self.log.as_uri()
        self._root = root

    def open(self, name: str, poll_interval: float = 0.02, **how: Any) -> ts.Database:
        cluster = ts.Cluster(self.url, beat_interval=0.02, poll_interval=poll_interval, takeover_after=3_600.0)
        return ts.open(self._root / name, cluster=cluster, site=name, **how)


@pytest.fixture
def sites(tmp_path: Path) -> Sites:
    return Sites(tmp_path)


def numbered(first: int, end: int) -> list[ts.Message]:
    return [
        ts.Message(f"a/{n % 7}", b"%06d" % n, f"c{n % 10}", timestamp=FIRST + n * 1_000_000) for n in range(first, end)
    ]
