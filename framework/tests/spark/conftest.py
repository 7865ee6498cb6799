"""One Spark session for all tests, and the data they read."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

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
def real(request: pytest.FixtureRequest) -> Path:
    """A whole set of real messages, in time order."""
    path = DATA / f"{request.param}.parquet"
    if not path.exists():
        pytest.skip(f"{path} is not there; TOPICSTORE_DATA says where")
    return path
