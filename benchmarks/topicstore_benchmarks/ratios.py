"""topicstore and the engine below it in turn, in one process, on one core.

Every round measures the engine's put, our store, the engine's scan, our replay and our
replay as Arrow, each into a fresh directory; a ratio is taken within a round, so that it
holds on a machine whose speed drifts, and the median over the rounds is what counts. Every
replay is checked to be complete before its time is used.
"""

from __future__ import annotations

import gc
import statistics
import tempfile
import time
from collections.abc import Callable, Iterable
from pathlib import Path

import attrs
import topicstore
from topicstore import Message

from .cases import Case, batches
from .limits import RawEngine

__all__ = ["Outcome", "Round", "measure"]


@attrs.frozen(kw_only=True)
class Round:
    """Seconds of one round."""

    put: float
    store: float
    scan: float
    replay: float
    arrow: float


@attrs.frozen(kw_only=True)
class Outcome:
    """What a case gave."""

    case: Case
    payload: str
    messages: int
    streams: int
    """As `Database.info` shows."""
    bytes_a_message: float
    """Of values stored."""
    rounds: tuple[Round, ...]

    @property
    def store(self) -> float:
        """Our store rate as a multiple of the engine's put rate."""
        return statistics.median(r.put / r.store for r in self.rounds)

    @property
    def replay(self) -> float:
        """Our replay rate as a multiple of the engine's scan rate."""
        return statistics.median(r.scan / r.replay for r in self.rounds)

    @property
    def arrow(self) -> float:
        """Our Arrow replay rate as a multiple of our replay rate."""
        return statistics.median(r.replay / r.arrow for r in self.rounds)

    def rate(self, phase: str) -> float:
        """Return the median messages a second of a phase."""
        seconds: list[float] = [getattr(r, phase) for r in self.rounds]
        return self.messages / statistics.median(seconds)


def measure(case: Case, payload: str, compression: str, messages: int, rounds: int) -> Outcome:
    """Run a case; the first round warms up and doesn't count."""
    made = batches(case, payload, messages)
    found: list[Round] = []
    streams, size = 0, 0.0
    for number in range(rounds + 1):
        with tempfile.TemporaryDirectory(prefix="topicstore-bench-") as directory:
            one, streams, size = _round(Path(directory), case, compression, made)
        if number:
            found.append(one)
    return Outcome(
        case=case,
        payload=payload,
        messages=messages,
        streams=streams,
        bytes_a_message=size / messages,
        rounds=tuple(found),
    )


def _round(directory: Path, case: Case, compression: str, made: list[list[Message]]) -> tuple[Round, int, float]:
    messages = sum(map(len, made))
    raw = RawEngine(directory / "raw", messages)
    options = {"block": {"thresholds": case.thresholds, "compression": compression}}
    with topicstore.open(directory / "ours", backend="rocksdb", layout="block", options=options) as db:
        gc.collect()
        put = raw.put()
        store = _timed(lambda: _store(db, made))
        scan = raw.scan()
        replay = _timed(lambda: _count(db.replay("#"), messages))
        arrow = _timed(lambda: _count_rows(db, messages))
        info = db.info()
        raw.close()
    return Round(put=put, store=store, scan=scan, replay=replay, arrow=arrow), info.streams, info.live_bytes


def _timed(work: Callable[[], None]) -> float:
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


def _store(db: topicstore.Database, made: list[list[Message]]) -> None:
    for batch in made:
        db.store(batch)


def _count(found: Iterable[Message], wanted: int) -> None:
    count = 0
    for _message in found:
        count += 1
    _check(count, wanted)


def _count_rows(db: topicstore.Database, wanted: int) -> None:
    _check(sum(batch.num_rows for batch in db.replay_arrow("#")), wanted)


def _check(count: int, wanted: int) -> None:
    if count != wanted:
        raise AssertionError(f"a replay returned {count:,} of {wanted:,} messages")
