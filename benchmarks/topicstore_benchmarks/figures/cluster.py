"""The section ``cluster``: a database that sites share through a log store, here a directory.

All sites share one core. Batches have 1,000 messages with random payloads of 100 bytes, for one shard. Sites that own
no shard, and the owner that is killed, run in processes of their own.
"""

from __future__ import annotations

import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, closing, contextmanager
from functools import partial
from pathlib import Path
from random import Random
from typing import Any
from unittest import mock

import topicstore as ts
from topicstore.contract.log_store import LogStore
from topicstore.plugins import load_target
from topicstore.replication import log_stores, names

from topicstore_benchmarks.timing import Progress, check, consume, timed

from .figure import Figure, Section, Sheet

__all__ = ["measure_cluster"]

_BATCH, _BYTES = 1_000, 100
_DELAY = 0.05
"""The additional seconds that each PUT takes in the slow store."""
_TAKEOVER_AFTER = 2.0
_POLL = 0.1
"""The seconds between two polls of the idle follower."""
_PATIENCE = 60.0
"""The seconds after which something that should have happened fails the measurement."""

_SITE = """
import sys, warnings
import topicstore as ts

warnings.simplefilter("ignore")
root, name, writes = sys.argv[1:]
cluster = ts.Cluster("file://" + root + "/log")
with ts.open(root + "/" + name, cluster=cluster, site=name) as db:
    print("open", flush=True)
    while writes == "writes":
        db.store([ts.Message("t", b"x", "publisher")])
    sys.stdin.read()
"""

_figure = partial(Figure, subject="cluster")


def measure_cluster(messages: int, seconds: float, rounds: int, progress: Progress) -> Section:
    """Measure all figures, each in a cluster of its own.

    messages: the number of messages that a site receives when it catches up.
    seconds:  the duration of each measurement of a rate.
    rounds:   the number of measurements of each variant of a comparison, of killed owners, and of handovers.
    """
    figures: list[Figure] = []
    for name, part in (
        ("rates of three sites", partial(_three_sites, seconds)),
        ("one site, and one database without a log", partial(_beside_sync, seconds, rounds)),
        ("a slow store", partial(_slow_store, seconds)),
        ("killed owners", partial(_killed, rounds)),
        ("hand-over", partial(_handed_over, rounds)),
        ("catching up", partial(_caught_up, messages)),
        ("an idle follower", partial(_idle, seconds)),
    ):
        progress(f"cluster: {name}")
        figures += part()
    sheet = Sheet.listing(
        "Databases on several sites",
        {"with": "data", "figure": "name", "unit": "unit"},
        figures,
        note="a directory as the log store, all sites on one core; in brackets what a figure should be",
    )
    return Section(name="cluster", figures=figures, sheets=[sheet])


def _cluster(root: Path, **how: Any) -> ts.Cluster:
    return ts.Cluster((root / "log").as_uri(), **how)


def _open(root: Path, name: str, *, auto_compact: bool = True, **how: Any) -> ts.Database:
    return ts.open(root / name, cluster=_cluster(root, **how), site=name, auto_compact=auto_compact)


@contextmanager
def _directory() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="topicstore-bench-") as directory:
        yield Path(directory)


@contextmanager
def _site(root: Path, name: str, *, writes: bool = False) -> Iterator[subprocess.Popen[str]]:
    """Run a site in a process, until the end of the block; yield when it is open."""
    command = [sys.executable, "-c", _SITE, str(root), name, "writes" if writes else ""]
    with subprocess.Popen(  # noqa: S603 - this program's own code
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        try:
            if process.stdout is None or process.stdout.readline() != "open\n":
                raise AssertionError(f"site {name} was not opened")
            yield process
        finally:
            if writes:
                process.kill()
            elif process.stdin is not None:
                process.stdin.close()  # at the end of its input, the site closes in order


def _wait(condition: Callable[[], bool], what: str) -> None:
    end = time.monotonic() + _PATIENCE
    while not condition():
        if time.monotonic() > end:
            raise AssertionError(f"there is no {what} after {_PATIENCE:g} s")
        time.sleep(0.001)


def _has_replicas(db: ts.Database, count: int) -> bool:
    return db.cluster is not None and all(len(shard.replicas) == count for shard in db.cluster.info().shards)


# --- writing ---


def _batches(writers: int) -> list[list[ts.Message]]:
    """Return a batch for each of some writers, of one publisher each."""
    random = Random(0)  # noqa: S311 - payloads that don't compress
    return [
        [ts.Message(f"site/{n % 50}", random.randbytes(_BYTES), f"publisher-{writer}", 1) for n in range(_BATCH)]
        for writer in range(writers)
    ]


def _written(db: ts.Database, writers: int, seconds: float) -> tuple[float, list[float]]:
    """Store with some threads; return the acknowledged messages a second, and the seconds of each store."""
    took: list[float] = []
    end = time.perf_counter() + seconds

    def write(batch: list[ts.Message]) -> None:
        while time.perf_counter() < end:
            took.append(timed(lambda: db.store(batch)))

    threads = [threading.Thread(target=write, args=(batch,)) for batch in _batches(writers)]
    began = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return len(took) * _BATCH / (time.perf_counter() - began), took


def _three_sites(seconds: float) -> Iterator[Figure]:
    with _directory() as root, _open(root, "a") as db, _site(root, "b"), _site(root, "c"):
        _wait(lambda: _has_replicas(db, 3), "copy on each site")
        for writers, least in ((8, 200_000), (1, None)):
            _written(db, writers, seconds / 5)
            rate, took = _written(db, writers, seconds)
            data = f"three sites, {writers} writer{'s' * (writers > 1)}"
            yield _figure(data=data, name="acknowledged messages", value=rate, unit="/s", least=least)
            yield _figure(data=data, name="store of 1,000, median", value=statistics.median(took) * 1e3, unit="ms")


def _beside_sync(seconds: float, rounds: int) -> Iterator[Figure]:
    """Yield the ratios of one site's rates to the rates of a database without a log; both are measured in turns.

    Nothing is compacted: a database compacts while its writers pause, and that is when the other one is measured.
    """
    with ExitStack() as opened:
        root = opened.enter_context(_directory())
        alone = opened.enter_context(ts.open(root / "alone", durability="sync", auto_compact=False))
        shared = opened.enter_context(_open(root, "a", auto_compact=False))
        for writers, least in ((8, 0.7), (1, 0.5)):
            ratios = []
            for _ in range(rounds + 1):
                without, _ = _written(alone, writers, seconds / 2)
                within, _ = _written(shared, writers, seconds / 2)
                ratios.append(within / without)
            yield _figure(
                data=f"one site, {writers} writer{'s' * (writers > 1)}",
                name="messages a second, times those of durability='sync'",
                value=statistics.median(ratios[1:]),
                least=least,
            )


# --- a log store that is slow, and counts ---


class _Measured(LogStore):
    """A log store whose creations take longer, and which counts the requests for objects of shards."""

    of: type[LogStore]
    """The class of the store that is measured."""
    delay = 0.0
    """The additional seconds that each creation of an object takes."""
    requests = 0

    def __init__(self, store: LogStore) -> None:
        self._store = store

    @classmethod
    def open(cls, url: str, options: Mapping[str, Any]) -> LogStore:
        """Open the store that is measured."""
        return cls(cls.of.open(url, options))

    @property
    def place(self) -> str:
        """The URL or directory of the measured store."""
        return self._store.place

    def create(self, name: str, data: bytes) -> None:
        """Wait for the configured delay, and create an object."""
        time.sleep(self.delay)
        self._store.create(name, data)

    def get(self, name: str) -> bytes:
        """Return an object, and count the request."""
        type(self).requests += name.startswith("shards/")
        return self._store.get(name)

    def names(self, prefix: str, after: str = "") -> Iterator[list[str]]:
        """Yield names, and count the request."""
        type(self).requests += prefix.startswith("shards/")
        return self._store.names(prefix, after)

    def delete(self, name: str) -> None:
        """Delete an object."""
        self._store.delete(name)

    def close(self) -> None:
        """Close the store."""
        self._store.close()


@contextmanager
def _measured() -> Iterator[type[_Measured]]:
    """Measure the log stores that are opened within the block: yield their class, with its delay and its count."""

    class Found(_Measured):
        """The log stores of one ``with`` block, so that each block has its own delay and its own count of requests."""

    def load(spec: Any) -> type[LogStore]:
        Found.of = load_target(spec)
        return Found

    with mock.patch.object(log_stores, "load_target", load):
        yield Found


def _slow_store(seconds: float) -> Iterator[Figure]:
    with _directory() as root, _measured() as store, _open(root, "a") as db:
        store.delay = _DELAY
        data = f"a PUT takes {_DELAY * 1e3:g} ms longer"
        _, took = _written(db, 1, seconds)
        name, value = "store of 1,000 by one writer, median", statistics.median(took) * 1e3
        yield _figure(data=data, name=name, value=value, unit="ms", most=_DELAY * 1e3 + 5)
        rate, _ = _written(db, 32, seconds)
        name = "acknowledged messages of 32 writers, one shard"
        yield _figure(data=data, name=name, value=rate, unit="/s", least=150_000)
        store.delay = 0.0


# --- owners that end ---


def _first_stored(db: ts.Database) -> float:
    """Store as soon as this site owns the shard; return the time (`time.perf_counter`) of the acknowledgement."""
    end = time.monotonic() + _PATIENCE
    while True:
        try:
            db.store([ts.Message("t", b"y", "publisher")])
        except (ts.ShardElsewhereError, ts.ShardMovedError):
            if time.monotonic() > end:
                raise
            time.sleep(0.001)
        else:
            return time.perf_counter()


def _killed(rounds: int) -> Iterator[Figure]:
    gaps = []
    for _ in range(rounds):
        with _directory() as root, _site(root, "a", writes=True) as owner, _open(root, "b") as db:
            _wait(lambda db=db: _has_replicas(db, 2), "second copy")  # type: ignore[misc]
            began = time.perf_counter()
            owner.kill()
            gaps.append(_first_stored(db) - began)
    data = f"owner killed, takeover_after={_TAKEOVER_AFTER:g}"
    yield _figure(data=data, name="longest time to the next acknowledgement", value=max(gaps), unit="s", most=3)


def _handed_over(rounds: int) -> Iterator[Figure]:
    gaps = []
    for _ in range(rounds):
        with _directory() as root, closing(_open(root, "a")) as owner, _open(root, "b") as db:
            _wait(lambda db=db: _has_replicas(db, 2), "second copy")  # type: ignore[misc]
            owner.store(_batches(1)[0])
            closer = threading.Thread(target=owner.close)
            began = time.perf_counter()
            closer.start()
            gaps.append(_first_stored(db) - began)
            closer.join()
    yield _figure(
        data="owner closed",
        name="longest time from the close to the next acknowledgement",
        value=max(gaps),
        unit="s",
        most=0.5,
    )


# --- followers ---


def _caught_up(messages: int) -> Iterator[Figure]:
    messages -= messages % _BATCH
    with _directory() as root, _open(root, "a", log_retention=0) as db:
        (batch,) = _batches(1)
        for _ in range(messages // _BATCH):
            db.store(batch)
        for name, source in (("b", "log"), ("c", "base")):
            if source == "base":
                db.add_generation()
                _wait(lambda: _cut(db) > 1, "cut of the log")
            with ExitStack() as opened:
                taken = timed(lambda name=name: opened.enter_context(_open(root, name)))  # type: ignore[misc]
                copy = opened.pop_all()
            with copy, ts.open(root / name, mode="r") as reader:
                check(consume(reader.replay("#")), messages)
            shutil.rmtree(root / name)
            data = f"{messages:,} messages in the {source}"
            yield _figure(data=data, name="catching up", value=messages / taken, unit="/s", least=300_000)


def _cut(db: ts.Database) -> int:
    """Return the index below which the log of shard 0 was truncated, 0 if it wasn't."""
    if db.cluster is None:
        return 0
    found = [names.number_of(name) for chunk in db.cluster.store.names(names.cuts(0)) for name in chunk]
    return max(found, default=0)


def _idle(seconds: float) -> Iterator[Figure]:
    with _directory() as root, _open(root, "a") as owner, _measured() as store, _open(root, "b", poll_interval=_POLL):
        _wait(lambda: _has_replicas(owner, 2), "second copy")
        time.sleep(2 * _POLL)
        before, began = store.requests, time.perf_counter()
        time.sleep(max(seconds, 10 * _POLL))
        polls = (time.perf_counter() - began) / _POLL
        value = (store.requests - before) / polls
    yield _figure(data="an idle follower", name="requests a poll, of one shard", value=value, most=1.1)
