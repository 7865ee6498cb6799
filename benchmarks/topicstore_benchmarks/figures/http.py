"""The section ``http``: a replay as Arrow over HTTP, against the same replay in process.

Both read the same stored messages; over HTTP a client in the measuring process reads them from `topicstore serve`, in a
process of its own. Each round measures all of them one after the other, and a figure is the median of the rounds. A
client on a plain socket shows what the server gives; httpx shows what a program gets.
"""

from __future__ import annotations

import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import urlsplit

import httpx
import pyarrow as pa
import topicstore

from topicstore_benchmarks.timing import Progress, check, timed
from topicstore_benchmarks.workloads.definition import read

from .figure import Cell, Figure, Section, Sheet, shown

__all__ = ["measure_http"]

_ARROW = "application/vnd.apache.arrow.stream"
_PATH = "/api/v5/messages"
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
                before = _memory(process)
                taken["plain socket"] = timed(lambda url=url: check(_by_socket(url), messages))  # type: ignore[misc]
                taken["httpx"] = timed(lambda url=url: check(_by_httpx(url), messages))  # type: ignore[misc]
                grown = max(grown, _memory(process) - before)
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


def _memory(process: int) -> float:
    """Return the mebibytes of a process that are in memory."""
    pages = int(Path(f"/proc/{process}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / (1 << 20)


def _by_socket(url: str) -> int:
    """Read a replay by the least that a client can do; return its messages."""
    address = urlsplit(url)
    with socket.create_connection((address.hostname or "", address.port or 80)) as connection:
        connection.sendall(
            f"GET {_PATH} HTTP/1.1\r\nHost: {address.netloc}\r\nAccept: {_ARROW}\r\nConnection: close\r\n\r\n".encode()
        )
        with connection.makefile("rb", buffering=1 << 20) as file:
            while file.readline() != b"\r\n":
                pass
            return _counted(_chunks(file))


def _chunks(file: object) -> Iterator[bytes]:
    """Yield the chunks of a body (RFC 9112, section 7.1)."""
    while size := int(file.readline(), 16):  # type: ignore[attr-defined]
        yield file.read(size)  # type: ignore[attr-defined]
        file.readline()  # type: ignore[attr-defined]


def _by_httpx(url: str) -> int:
    with (
        httpx.Client(timeout=None, trust_env=False) as client,  # noqa: S113 - a server under load may take its time
        client.stream("GET", url + _PATH, headers={"Accept": _ARROW}) as answer,
    ):
        return _counted(answer.iter_raw())


class _Body:
    """The chunks of a body as a file."""

    def __init__(self, chunks: Iterator[bytes]) -> None:
        self._chunks = chunks
        self._held = b""
        self.closed = False

    def read(self, size: int) -> bytes:
        parts, left = [], size
        while left and (held := self._held or next(self._chunks, b"")):
            parts.append(held[:left])
            self._held = held[left:]
            left -= len(parts[-1])
        return b"".join(parts)


def _counted(chunks: Iterator[bytes]) -> int:
    with pa.ipc.open_stream(pa.PythonFile(_Body(chunks), mode="r")) as stream:
        return sum(batch.num_rows for batch in stream)


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
