"""The section ``http``: a replay as Arrow over HTTP, against the same replay in process.

Both read the same stored messages; over HTTP a client in the measuring process reads them from `topicstore serve`, in a
process of its own. Each round measures all of them one after the other, and a figure is the median of the rounds.
Python's own client on a plain socket shows what the server gives; that of this package, by httpx, what a program gets.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import closing, contextmanager
from http.client import HTTPConnection
from pathlib import Path
from urllib.parse import urlsplit

import pyarrow as pa
import topicstore
from topicstore.client.arrow_streams import batches_of
from topicstore.client.connection import ARROW, Connection

from topicstore_benchmarks.harness.hardware import resident
from topicstore_benchmarks.timing import Progress, check, timed
from topicstore_benchmarks.workloads.definition import read

from .figure import Cell, Figure, Section, Sheet, shown

__all__ = ["measure_http"]

_LEAST = 0.5
"""The least share of the rate in process that a replay over HTTP has."""
_MOST_GROWTH = 64.0
"""The most mebibytes by which the server may grow in a replay after the first."""


def measure_http(messages: int, rounds: int, progress: Progress) -> Section:
    """Store a message set, and replay it in process and over HTTP; the first round warms up and doesn't count."""
    rates: dict[str, list[float]] = {"in process": [], "plain socket": [], "httpx": []}
    with tempfile.TemporaryDirectory(prefix="topicstore-bench-") as directory:
        path = Path(directory) / "db"
        with topicstore.open(path, backend="rocksdb", layout="block", timestamps="message", late="lift") as db:
            fleet = read("fleet").make(messages)
            for number in range(fleet.parts):
                db.store(fleet.part(number))
            db.compact()
        grown = 0.0
        for number in range(rounds + 1):
            progress(f"http: round {number} of {rounds}")
            taken = {"in process": _in_process(path, messages)}
            with _serving(path) as (url, process):
                taken["warm-up"] = timed(lambda url=url: check(_by_socket(url), messages))  # type: ignore[misc]
                before = resident(process)
                taken["plain socket"] = timed(lambda url=url: check(_by_socket(url), messages))  # type: ignore[misc]
                taken["httpx"] = timed(lambda url=url: check(_by_httpx(url), messages))  # type: ignore[misc]
                grown = max(grown, (resident(process) - before) / (1 << 20))
            for name, found in rates.items() if number else ():
                found.append(messages / taken[name])
    return _section("fleet", {name: statistics.median(found) for name, found in rates.items()}, grown)


def _in_process(path: Path, messages: int) -> float:
    with topicstore.open(path) as db:
        _rows(db)  # as the server is warm too
        return timed(lambda: check(_rows(db), messages))


def _rows(db: topicstore.Database) -> int:
    return sum(batch.num_rows for batch in db.replay_arrow("#"))


@contextmanager
def _serving(path: Path) -> Iterator[tuple[str, int]]:
    """Serve a database in another process; yield the URL of its HTTP interface, and the process's id."""
    listening = ["--listen", "127.0.0.1:0", "--http", "127.0.0.1:0", "--print-ready"]
    command = [sys.executable, "-m", "topicstore.cli", "serve", str(path), *listening]
    with (
        (path.parent / "log").open("wb") as log,
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log) as process,  # noqa: S603 - our own program
    ):
        try:
            ready = process.stdout.readline() if process.stdout is not None else b""
            os.sched_setaffinity(process.pid, range(os.cpu_count() or 1))  # a client has a machine of its own
            yield f"http://{json.loads(ready)['http'][0]}", process.pid
        finally:
            process.terminate()


def _by_socket(url: str) -> int:
    """Read a replay by the least that a client can do; return its messages."""
    with closing(HTTPConnection(urlsplit(url).netloc)) as connection:
        connection.request("GET", "/api/v5/messages", headers={"Accept": ARROW})
        with pa.ipc.open_stream(connection.getresponse()) as stream:
            return sum(batch.num_rows for batch in stream)


def _by_httpx(url: str) -> int:
    with Connection(url, None) as connection:
        return sum(batch.num_rows for batch in batches_of(connection, "/messages"))


def _section(data: str, rates: dict[str, float], grown: float) -> Section:
    base = rates["in process"]
    figures = [Figure(data=data, subject=name, name="replay as Arrow", value=rate) for name, rate in rates.items()]
    shares = [
        Figure(data=data, subject=name, name="share of the rate in process", value=rates[name] / base, least=_LEAST)
        for name in ("plain socket", "httpx")
    ]
    memory = Figure(
        data=data, subject="server", name="growth of its memory", value=grown, unit="MiB", most=_MOST_GROWTH
    )
    rows: list[list[str | Cell]] = [
        [name, Cell(shown(rate)), Cell("") if name == "in process" else shares[number - 1].cell()]
        for number, (name, rate) in enumerate(rates.items())
    ]
    rows.append(["the server grew by, in MiB", memory.cell(), Cell("")])
    sheet = Sheet(
        title=f"http: a replay of `{data}` as Arrow",
        columns=["read", "messages a second", "of the rate in process"],
        rows=rows,
        note="RocksDB, `block`, compacted; all in this run, interleaved, medians. The client shares the machine.",
    )
    return Section(name="http", figures=[*figures, *shares, memory], sheets=[sheet])
