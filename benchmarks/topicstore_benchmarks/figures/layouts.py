"""The section ``layouts``: the best layout for each task, and the bounds of each.

`comparison` measures times and `growth` memory; this module turns them into figures.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

import attrs
from topicstore.plugins import registry

from .comparison import ENGINE, MERGE, MERGED, SQLITE, STORE, Comparison, Round
from .figure import Cell, Figure, Section, Sheet, shown
from .growth import Growth
from .message_sets import ALL, MessageSet

__all__ = ["PROMISES", "Promise", "View", "compared_layouts", "layouts_section"]

_REFERENCE = "reference"
"""Not compared with ``fleet``: it reads everything for every filter, which ``bus`` shows in a third of the time."""
_SEARCHING = ("block", MERGED, "skipstream", "wildcard_optimized")
_BLOCKS = ("block", MERGED)
_SKIP = ("skipstream",)
_KEYED = (*_SKIP, "wildcard_optimized")
_ON_DISK, _EARLY, _LATE = "on disk", "memory, early", "memory, late"


@attrs.frozen
class View:
    """One round from the point of view of one side."""

    data: MessageSet
    round: Round
    side: str

    def took(self, task: str, side: str = "") -> float:
        """Return the seconds of a task, on another side if one is named."""
        return self.round.seconds[side or self.side, task]

    def share(self, task: str) -> float:
        """Return the seconds that a full replay takes for as many messages as the task returns."""
        return self.took(ALL) * self.data.task(task).messages / self.data.messages


Value = Callable[[View], float]


def _faster(other: str, task: str) -> Value:
    """Return the value: how many times as fast as another side."""
    return lambda view: view.took(task, other) / view.took(task)


def _smaller() -> Value:
    """Return the value: how many times as many bytes SQLite takes on disk."""
    return lambda view: view.round.disk_bytes[SQLITE] / view.round.disk_bytes[view.side]


def _quicker_than_all(task: str) -> Value:
    """Return the value: how many times as long a full replay takes."""
    return lambda view: view.took(ALL) / view.took(task)


def _of_share(task: str) -> Value:
    """Return the value: how many times as long as the same number of messages takes in a full replay."""
    return lambda view: view.took(task) / view.share(task)


def _beyond_share(task: str) -> Value:
    """Return the value: milliseconds more than the same number of messages takes in a full replay."""
    return lambda view: (view.took(task) - view.share(task)) * 1_000


def _milliseconds(task: str) -> Value:
    return lambda view: view.took(task) * 1_000


def _of_allowance(task: str) -> Value:
    """Return the value: how many times as long as twice SQLite's time plus 3 ms."""
    return lambda view: view.took(task) / (2 * view.took(task, SQLITE) + 0.003)


@attrs.frozen
class Promise:
    """A figure with a bound for some sides."""

    data: str
    subjects: tuple[str, ...]
    name: str
    value: Value
    least: float | None = None
    most: float | None = None

    def figures(self, found: Comparison) -> Iterator[Figure]:
        """Yield the figure, a median over the rounds, for each subject that is installed."""
        for subject in self.subjects:
            if self.data == found.data.name and subject in found.sides:
                yield Figure(
                    data=self.data,
                    subject=subject,
                    name=self.name,
                    value=found.median(lambda one, side=subject: self.value(View(found.data, one, side))),  # type: ignore[misc]
                    least=self.least,
                    most=self.most,
                )


def _of_every_set(data: str, every: tuple[str, ...]) -> tuple[Promise, ...]:
    return (
        Promise(data, _KEYED, "store, times SQLite", _faster(SQLITE, STORE), least=2.5),
        Promise(data, _KEYED, "replay all, times the engine's scan", _faster(ENGINE, ALL), least=0.4),
        Promise(data, every, "last minute, ms beyond what it returns", _beyond_share("last minute"), most=10),
    )


PROMISES = (
    Promise("bus", ("block",), "store, times SQLite", _faster(SQLITE, STORE), least=8),
    Promise("bus", ("block",), "replay all, times SQLite", _faster(SQLITE, ALL), least=2.5),
    Promise("bus", (MERGED,), "replay all, times SQLite", _faster(SQLITE, ALL), least=2),
    Promise("bus", _BLOCKS, "one route, times SQLite", _faster(SQLITE, "one route"), least=1.5),
    Promise("bus", _BLOCKS, "one vehicle, times SQLite", _faster(SQLITE, "one vehicle"), least=1.5),
    Promise("bus", _BLOCKS, "bytes on disk, times fewer than SQLite", _smaller(), least=8),
    Promise("bus", (MERGED,), "median topic, times as quick as all", _quicker_than_all("median topic"), least=50),
    Promise("bus", (MERGED,), "busiest topic, times as quick as all", _quicker_than_all("busiest topic"), least=15),
    Promise("bus", _SKIP, "median topic, times (2 × SQLite + 3 ms)", _of_allowance("median topic"), most=1),
    Promise("bus", _SKIP, "busiest topic, times (2 × SQLite + 3 ms)", _of_allowance("busiest topic"), most=1),
    *_of_every_set("bus", (_REFERENCE, *_SEARCHING)),
    Promise("fleet", _SEARCHING, "one metric, times a fifth of all", _of_share("one metric"), most=1.3),
    Promise("fleet", _SKIP, "one device, ms", _milliseconds("one device"), most=20),
    Promise("fleet", (MERGED,), "one device, ms", _milliseconds("one device"), most=60),
    Promise("fleet", ("block",), "store, times the engine's put", _faster(ENGINE, STORE), least=0.25),
    *_of_every_set("fleet", _SEARCHING),
)


def compared_layouts(data: str) -> list[str]:
    """Return the layouts to compare with a set: those that are installed and work on RocksDB."""
    layouts = [pair.layout.name for pair in registry().pairs() if pair.backend.name == "rocksdb" and pair.works]
    return [layout for layout in layouts if (data, layout) != ("fleet", _REFERENCE)]


def layouts_section(comparisons: Sequence[Comparison], growth: Mapping[str, Growth]) -> Section:
    """Return the figures of comparisons with different sets; ``growth`` is by layout, with ``fleet``."""
    measured = [figure for found in comparisons for figure in _measured(found)]
    measured += [figure for layout, grown in growth.items() for figure in _grown(layout, grown)]
    held = [figure for found in comparisons for promise in PROMISES for figure in promise.figures(found)]
    sheets = [_overview(found.data, measured) for found in comparisons]
    return Section(name="layouts", figures=[*measured, *held], sheets=[*sheets, _promised(held)] if held else sheets)


def _measured(found: Comparison) -> Iterator[Figure]:
    """Yield the medians of the measured values themselves."""
    for side, task in found.rounds[0].seconds:
        seconds = found.median(lambda one, key=(side, task): one.seconds[key])  # type: ignore[misc]
        yield Figure(data=found.data.name, subject=side, name=task, value=seconds, unit="s")
    for side in found.sides:
        size = found.median(lambda one, side=side: one.disk_bytes[side])  # type: ignore[misc]
        yield Figure(data=found.data.name, subject=side, name=_ON_DISK, value=size, unit="bytes")


def _grown(layout: str, grown: Growth) -> Iterator[Figure]:
    for name, value in ((_EARLY, grown.early), (_LATE, grown.late)):
        yield Figure(data="fleet", subject=layout, name=name, value=value, unit="bytes")


@attrs.frozen
class _Row:
    """A row of an overview."""

    name: str
    """The name of its figures."""
    label: str
    value: Callable[[float], float]
    best: Callable[[Sequence[float]], float]


def _rows(data: MessageSet) -> list[_Row]:
    def rate(seconds: float) -> float:
        return data.messages / seconds / 1_000

    return [
        _Row(STORE, "store, 1,000 messages/s", rate, max),
        _Row(MERGE, "merge, 1,000 messages/s", rate, max),
        _Row(ALL, "replay all, 1,000 messages/s", rate, max),
        *(
            _Row(
                task.name,
                f"{task.name}, `{task.answers[0].topic_filter}`: {task.messages:,} messages, ms",
                lambda seconds: seconds * 1_000,
                min,
            )
            for task in data.tasks
            if task.name != ALL
        ),
        _Row(_ON_DISK, "on disk, bytes a message", lambda size: size / data.messages, min),
        _Row(_EARLY, "memory for the first messages of all topics, MB", lambda size: size / 1e6, min),
        _Row(_LATE, "memory for three times as many more, MB", lambda size: size / 1e6, min),
    ]


def _overview(data: MessageSet, figures: Sequence[Figure]) -> Sheet:
    """Return a sheet with one column per side and one row per task, with the best layout of each row marked."""
    values = {(figure.name, figure.subject): figure.value for figure in figures if figure.data == data.name}
    sides = list(dict.fromkeys([ENGINE, SQLITE, *(subject for _, subject in values)]))
    rows: list[list[str | Cell]] = []
    for row in _rows(data):
        found = {side: row.value(values[row.name, side]) for side in sides if (row.name, side) in values}
        layouts = [value for side, value in found.items() if side not in (ENGINE, SQLITE)]
        best = row.best(layouts) if len(layouts) > 1 else None
        if found:
            rows.append([row.label, *(_cell(found.get(side), best) for side in sides)])
    return Sheet(
        title=f"{data.name}: {data.messages:,} messages, {data.topics:,} topics",
        columns=["", *sides],
        rows=rows,
        note="bold: the best layout",
    )


def _cell(value: float | None, best: float | None) -> Cell:
    return Cell("") if value is None else Cell(shown(value), "best" if value == best else "")


def _promised(figures: Sequence[Figure]) -> Sheet:
    return Sheet.listing(
        "What we hold the layouts to",
        {"data": "data", "layout": "subject", "figure": "name"},
        figures,
        note="medians of ratios within a round",
    )
