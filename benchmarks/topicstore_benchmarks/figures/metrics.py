"""The section ``metrics``: the cost of metrics and their scrapes, with many topics and sessions.

The database has one shard of `block` on RocksDB. Half of the sessions are connected. The server runs on one core, the
scraper on the others. Compaction of layouts is off. Stores are measured by the CPU time of all Python threads, which
excludes other processes and the engine's own compaction threads. Rounds with and without scrapes alternate.
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial

import msgspec
import topicstore as ts
from topicstore.server import Server
from topicstore.shard.writer import Latencies
from topicstore_conformance.mqtt.embedded import serving_http

from topicstore_benchmarks.timing import Progress

from .figure import Figure, Section, Sheet
from .session_clients import connect, database, messages_of

__all__ = ["measure_metrics"]

_BATCH = 1_000

_figure = partial(Figure, subject="server")

_SCRAPE = """
import http.client, json, os, sys, time
if hasattr(os, "sched_setaffinity"):
    os.sched_setaffinity(0, range(1, os.cpu_count()) or [0])
port, times, every = int(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3])
server, took = http.client.HTTPConnection("127.0.0.1", port), []
for number in range(times):
    began = time.perf_counter()
    server.request("GET", "/metrics")
    answer = server.getresponse()
    size = len(answer.read())
    assert answer.status == 200 and size
    took.append(time.perf_counter() - began)
    time.sleep(max(0, every - took[-1]) if number + 1 < times else 0)
print(json.dumps(took))
"""


def measure_metrics(topics: int, sessions: int, rounds: int, seconds: float, progress: Progress) -> Section:
    """Measure scrapes, and the slowdown of stores by scrapes.

    rounds:  the number of times that stores are measured with scrapes, and without.
    seconds: the least duration of one such measurement; the server is scraped once a second.
    """
    figures: list[Figure] = []
    data = f"{topics:,} topics, {sessions:,} sessions"
    with database(auto_compact=False) as db:
        progress(f"metrics: {data} are made")
        _fill(db, topics, sessions)
        with serving_http(db) as server:
            figures += _scrapes(data, server, db, rounds, seconds, progress)
    progress("metrics: the observation of a batch")
    for size in (1, _BATCH):
        data, share = f"batches of {size:,}", _observation(size, rounds * 40) * 100
        figures.append(_figure(data=data, name="observing a batch", value=share, unit="% of storing it", most=1))
    sheet = Sheet.listing(
        "Being watched",
        {"of": "data", "what": "name", "unit": "unit"},
        figures,
        note="Shares are of processor time, rounds of both sides alternate; in brackets what a figure should be",
    )
    return Section(name="metrics", figures=figures, sheets=[sheet])


def _fill(db: ts.Database, topics: int, sessions: int) -> None:
    for session in connect(db, sessions, lambda n: _topic(n, topics))[sessions // 2 :]:
        session.disconnect()
    for first in range(0, topics, _BATCH):
        db.store(messages_of(lambda n: _topic(n, topics), range(first, first + _BATCH)))


def _topic(number: int, topics: int) -> str:
    number %= topics
    return f"site/{number % 100}/device/{number}"


@contextmanager
def _scraping(server: Server, times: int, every: float) -> Iterator[list[float]]:
    """Scrape a server ``times`` times, every ``every`` seconds, from another process, during a ``with`` block.

    Yields a list that holds the seconds of each scrape once the block has ended.
    """
    port = server.urls_of_http[0].rpartition(":")[2]
    command = [sys.executable, "-c", _SCRAPE, port, str(times), str(every)]
    took: list[float] = []
    with subprocess.Popen(command, stdout=subprocess.PIPE) as program:  # noqa: S603 - this program's own code
        yield took
        out, _ = program.communicate()
    if program.returncode:
        raise AssertionError("a scrape has failed")
    took += msgspec.json.decode(out)


def _scrapes(
    data: str, server: Server, db: ts.Database, rounds: int, seconds: float, progress: Progress
) -> Iterator[Figure]:
    progress("metrics: scrapes of an idle server")
    metrics = server.http.context.metrics  # type: ignore[union-attr] # it was asked for
    times = max(2, int(rounds * seconds))
    metrics.stop()
    unwatched = _idle(lambda: time.sleep(times - 1))
    metrics.start()
    with _scraping(server, times, 1.0) as idle:
        share = _idle(lambda: time.sleep(times - 1)) - unwatched
    yield from _times(f"{data}, nothing stored meanwhile", idle)
    name = "one scrape a second, and the samples"
    yield _figure(data=data, name=name, value=share * 100, unit="% of a core", most=1)
    progress("metrics: scrapes while messages are stored")
    took: list[float] = []

    def quiet() -> float:
        metrics.stop()
        return _stored(db, seconds)

    def watched() -> float:
        metrics.start()
        with _scraping(server, max(1, int(seconds)), 1.0) as found:
            stored = _stored(db, seconds)
        took.extend(found)
        return stored

    quiet()
    each: list[float] = []
    for _ in range(rounds):
        without, within = quiet(), watched()
        each += [within / without - 1, watched() / quiet() - 1]
    yield from _times(f"{data}, while messages are stored", took)
    yield _figure(data=data, name="storing is slowed down", value=statistics.median(each) * 100, unit="%", most=1)


def _times(data: str, seconds: Sequence[float]) -> Iterator[Figure]:
    percentiles = statistics.quantiles(seconds, n=100, method="inclusive")
    for percent in (50, 95):
        value = percentiles[percent - 1] * 1e3
        yield _figure(data=data, name=f"a scrape, p{percent}", value=value, unit="ms", most=50)


def _idle(wait: Callable[[], object]) -> float:
    """Return the fraction of a core that this process uses during the call of ``wait``."""
    before, began = time.process_time(), time.perf_counter()
    wait()
    return (time.process_time() - before) / (time.perf_counter() - began)


def _stored(db: ts.Database, seconds: float) -> float:
    """Store for some seconds; return the CPU time of all Python threads per message, in seconds."""
    # Without subscribers: deliveries would take CPU time, too.
    batch = messages_of(lambda n: f"load/{n}", range(_BATCH))
    stored, end, before = 0, time.perf_counter() + seconds, _spent()
    while time.perf_counter() < end:
        stored += db.store(batch).count
    spent = sum(now - before.get(thread, 0.0) for thread, now in _spent().items())
    return spent / stored


def _spent() -> dict[int, float]:
    """Return the CPU time in seconds of each running Python thread, by thread id."""
    threads = [one.ident for one in threading.enumerate() if one.ident is not None]
    return {thread: time.clock_gettime(time.pthread_getcpuclockid(thread)) for thread in threads}


def _observation(size: int, rounds: int) -> float:
    """Return the time to record a batch's latency as a fraction of the time to store the batch.

    Both are measured separately, because recording takes a quarter of a microsecond, and a difference of two store
    times would be lost in noise.
    """
    batch = messages_of(lambda n: f"a/{n % 7}", range(size))
    latencies = Latencies()
    shares: list[float] = []
    with database(auto_compact=False) as db:
        for _ in range(rounds):
            stored, observed = _passed(lambda: db.store(batch), 10), _passed(lambda: latencies.observe(0.0003), 1_000)
            shares.append(observed / stored)
    return statistics.median(shares)


def _passed(work: Callable[[], object], times: int) -> float:
    """Return the mean CPU time of a call in seconds, over ``times`` calls."""
    before = time.thread_time()
    for _ in range(times):
        work()
    return (time.thread_time() - before) / times
