"""The section ``http``: a replay as Arrow over HTTP, against the same replay in process.

Both read the same stored messages. Over HTTP a client in the measuring process reads them from `topicstore serve` in a
process of its own. Each round measures all variants one after the other, and a figure is the median over the rounds.
The standard library's client shows the speed of the server alone. This package's client, which uses httpx, shows the
speed that a program gets.
"""

from __future__ import annotations

import os
import statistics
import tempfile
from contextlib import closing
from http.client import HTTPConnection
from pathlib import Path
from urllib.parse import urlsplit

import pyarrow as pa
import topicstore
from topicstore.client.arrow_streams import batches_of
from topicstore.client.connection import ARROW, Connection
from topicstore_conformance.mqtt.serving import serving

from topicstore_benchmarks.timing import Progress, check, timed
from topicstore_benchmarks.workloads.definition import read

from .figure import Figure, Section, Sheet

__all__ = ["measure_http"]

_LEAST = 0.5
"""The lower bound of a replay's rate over HTTP, as a fraction of the rate in process."""
_MOST_GROWTH = 64.0
"""The upper bound of the server's memory growth during replays after the first, in MiB."""


def measure_http(messages: int, rounds: int, progress: Progress) -> Section:
    """Store messages, and replay them in process and over HTTP; the first round warms up and doesn't count."""
    rates: dict[str, list[float]] = {"in process": [], "plain socket": [], "httpx": []}
    with tempfile.TemporaryDirectory(prefix="topicstore-bench-") as directory:
        path = Path(directory) / "db"
        with topicstore.open(path, backend="rocksdb", layout="block", timestamps="message", late="lift") as db:
            fleet = read("fleet").limited(messages).make()
            for number in range(fleet.parts):
                db.store(fleet.part(number))
            db.compact()
        grown = 0.0
        for number in range(rounds + 1):
            progress(f"http: round {number} of {rounds}")
            taken = {"in process": _in_process(path, messages)}
            with serving(path, "--http", "127.0.0.1:0") as server:
                os.sched_setaffinity(server.pid, range(os.cpu_count() or 1))  # the server may use all cores
                url = f"http://{server.ready['http'][0]}"
                taken["warm-up"] = timed(lambda url=url: check(_by_socket(url), messages))  # type: ignore[misc]
                before = server.memory()
                taken["plain socket"] = timed(lambda url=url: check(_by_socket(url), messages))  # type: ignore[misc]
                taken["httpx"] = timed(lambda url=url: check(_by_httpx(url), messages))  # type: ignore[misc]
                grown = max(grown, (server.memory() - before) / (1 << 20))
                server.stop()
            for name, found in rates.items() if number else ():
                found.append(messages / taken[name])
    return _section("fleet", {name: statistics.median(found) for name, found in rates.items()}, grown)


def _in_process(path: Path, messages: int) -> float:
    with topicstore.open(path) as db:
        _rows(db)  # warms up, because the server is warm, too
        return timed(lambda: check(_rows(db), messages))


def _rows(db: topicstore.Database) -> int:
    return sum(batch.num_rows for batch in db.replay_arrow("#"))


def _by_socket(url: str) -> int:
    """Read a replay with a minimal client; return the number of messages."""
    with closing(HTTPConnection(urlsplit(url).netloc)) as connection:
        connection.request("GET", "/api/v5/messages", headers={"Accept": ARROW})
        with pa.ipc.open_stream(connection.getresponse()) as stream:
            return sum(batch.num_rows for batch in stream)


def _by_httpx(url: str) -> int:
    with Connection(url, None) as connection:
        return sum(batch.num_rows for batch in batches_of(connection, "/messages"))


def _section(data: str, rates: dict[str, float], grown: float) -> Section:
    base, share = rates["in process"], "share of the rate in process"
    figures = [
        Figure(data=data, subject=name, name="replay as Arrow", value=rate, unit="messages/s")
        for name, rate in rates.items()
    ]
    figures += [
        Figure(data=data, subject=name, name=share, value=rates[name] / base, least=_LEAST)
        for name in ("plain socket", "httpx")
    ]
    name = "growth of its memory"
    figures.append(Figure(data=data, subject="server", name=name, value=grown, unit="MiB", most=_MOST_GROWTH))
    sheet = Sheet.listing(
        f"http: a replay of `{data}` as Arrow",
        {"read": "subject", "figure": "name", "unit": "unit"},
        figures,
        note="RocksDB, `block`, compacted; all in this run, interleaved, medians. The client shares the machine.",
    )
    return Section(name="http", figures=figures, sheets=[sheet])
