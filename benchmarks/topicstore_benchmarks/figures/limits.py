"""The section ``limits``: `block` on an engine against that engine's own put and scan.

Every round measures for each engine in turn its put, topicstore's store, its scan, topicstore's replay and
replay as Arrow, each into a fresh directory, with messages of the shapes in `cases`.
"""

from __future__ import annotations

import gc
import statistics
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import attrs
import topicstore
from topicstore import Message

from topicstore_benchmarks.contenders.raw_engine import RAW_ENGINES
from topicstore_benchmarks.timing import check, consume, timed

from .cases import Case, batches
from .figure import Cell, Figure, Section, Sheet, shown

__all__ = ["Outcome", "Round", "limits_section", "measure"]

_RATIOS = ("store / put", "replay / scan", "Arrow / objects")
_PHASES = ("put", "store", "scan", "replay", "arrow")


@attrs.frozen(kw_only=True)
class Round:
    """The seconds of each phase of one round."""

    put: float
    store: float
    scan: float
    replay: float
    arrow: float


@attrs.frozen(kw_only=True)
class Outcome:
    """The results of a case."""

    case: Case
    backend: str
    payload: str
    messages: int
    streams: int
    """The number of streams that `Database.info` shows."""
    bytes_a_message: float
    """The stored bytes of values per message."""
    rounds: tuple[Round, ...]

    @property
    def store(self) -> float:
        """The store rate as a multiple of the engine's put rate."""
        return statistics.median(r.put / r.store for r in self.rounds)

    @property
    def replay(self) -> float:
        """The replay rate as a multiple of the engine's scan rate."""
        return statistics.median(r.scan / r.replay for r in self.rounds)

    @property
    def arrow(self) -> float:
        """The Arrow replay rate as a multiple of the replay rate."""
        return statistics.median(r.replay / r.arrow for r in self.rounds)

    def rate(self, phase: str) -> float:
        """Return the median messages a second of a phase."""
        seconds: list[float] = [getattr(r, phase) for r in self.rounds]
        return self.messages / statistics.median(seconds)


def measure(
    case: Case, payload: str, compression: str, messages: int, rounds: int, backends: Sequence[str]
) -> list[Outcome]:
    """Run a case; the first round warms up and doesn't count. Returns one outcome per backend."""
    made = batches(case, payload, messages)
    found: dict[str, list[Round]] = {backend: [] for backend in backends}
    sizes: dict[str, tuple[int, float]] = {}
    for number in range(rounds + 1):
        for backend in backends:
            with tempfile.TemporaryDirectory(prefix="topicstore-bench-") as directory:
                one, streams, size = _round(Path(directory), case, compression, made, backend)
            if number:
                found[backend].append(one)
                sizes[backend] = streams, size / messages
    return [
        Outcome(
            case=case,
            backend=backend,
            payload=payload,
            messages=messages,
            streams=sizes[backend][0],
            bytes_a_message=sizes[backend][1],
            rounds=tuple(found[backend]),
        )
        for backend in backends
    ]


def _round(
    directory: Path, case: Case, compression: str, made: list[list[Message]], backend: str
) -> tuple[Round, int, float]:
    messages = sum(map(len, made))
    raw = RAW_ENGINES[backend](directory / "raw", messages)
    options = {"block": {"thresholds": case.thresholds, "compression": compression}}
    with topicstore.open(
        directory / "ours", backend=backend, layout="block", options=options, auto_compact=False
    ) as db:
        gc.collect()
        put = raw.put()
        store = timed(lambda: _store(db, made))
        scan = raw.scan()
        replay = timed(lambda: check(consume(db.replay("#", order="any")), messages))
        arrow = timed(lambda: check(sum(batch.num_rows for batch in db.replay_arrow("#", order="any")), messages))
        info = db.info()
        raw.close()
    return Round(put=put, store=store, scan=scan, replay=replay, arrow=arrow), info.streams, info.live_bytes


def _store(db: topicstore.Database, made: list[list[Message]]) -> None:
    for batch in made:
        db.store(batch)


def limits_section(outcomes: Sequence[Outcome], compression: str) -> Section:
    """Return the figures of all cases."""
    first = outcomes[0]
    return Section(
        name="limits",
        figures=[figure for outcome in outcomes for figure in _figures(outcome)],
        sheets=[
            Sheet(
                title=f"block ({compression}) against the engine under it, {first.messages:,} messages of 128 bytes",
                columns=[
                    "case",
                    "engine",
                    "payload",
                    "streams",
                    "bytes/msg",
                    *_PHASES[:2],
                    _RATIOS[0],
                    *_PHASES[2:4],
                    *_RATIOS[1:],
                ],
                rows=[_row(outcome) for outcome in outcomes],
                note=f"1,000 messages/s; medians of {len(first.rounds)} rounds; in brackets what a ratio should be",
            )
        ],
    )


def _figures(o: Outcome) -> Iterator[Figure]:
    data = f"{o.case.name}, {o.payload}, {o.backend}"
    yield from _ratios(o)
    yield Figure(data=data, subject="block", name="streams", value=o.streams)
    yield Figure(data=data, subject="block", name="bytes a message", value=o.bytes_a_message, unit="bytes")
    for phase in _PHASES:
        subject = "engine" if phase in ("put", "scan") else "block"
        yield Figure(data=data, subject=subject, name=phase, value=o.rate(phase), unit="messages/s")


def _ratios(o: Outcome) -> list[Figure]:
    least = o.case.least.get(o.backend, (None, None))
    values = zip(_RATIOS, (o.store, o.replay, o.arrow), (*least, 1.0), strict=True)
    data = f"{o.case.name}, {o.payload}, {o.backend}"
    return [Figure(data=data, subject="block", name=name, value=value, least=least) for name, value, least in values]


def _row(o: Outcome) -> list[str | Cell]:
    store, replay, arrow = (figure.cell() for figure in _ratios(o))
    put, stored, scan, replayed = (Cell(shown(o.rate(phase) / 1_000)) for phase in _PHASES[:4])
    sizes = (Cell(str(o.streams)), Cell(shown(o.bytes_a_message)))
    return [o.case.name, o.backend, o.payload, *sizes, put, stored, store, scan, replayed, replay, arrow]
