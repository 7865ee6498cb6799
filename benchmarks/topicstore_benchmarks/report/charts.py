"""The plots, as Vega-Lite: dots on a logarithmic axis, one row per contender, the best on top, limits below.

Colours are CSS variables of the page, so that a plot changes between light and dark with it. The median
is written at the end of each row, so that nothing has to be read off an axis.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import altair as alt
import attrs

from topicstore_benchmarks.results import UNITS

from .estimates import spread
from .quantities import bare, quantity, unprefixed
from .questions import QUESTIONS, Entrant, Question, entrants
from .run import Contender, Run

__all__ = ["CONFIG", "ROW_HEIGHT", "Panel", "colour", "panels"]

Row = dict[str, Any]

_FONT = "system-ui, -apple-system, 'Segoe UI', Roboto, 'Noto Sans', sans-serif"
"""The font of the page."""
_INK, _MUTED, _GRID, _PAGE = "var(--ink)", "var(--muted)", "var(--grid)", "var(--page)"
_SHAPES = {"topicstore": "circle", "peer": "diamond", "limit": "square"}
_BACKENDS = ("rocksdb", "leveldb", "duckdb")
"""Backends with a hue of their own in the family. Others share the fourth."""
_PERCENTILES = (("p50", "circle", True), ("p99", "diamond", True), ("p999", "circle", False))
_ROOM = 1.12
"""The factor by which the axis extends beyond the outermost values."""
_LEAST_RANGE = 2
"""The least ratio of the axis' end to its beginning, so that small differences look small."""
_TICKS = ((1, 1.2, 1.4, 1.6, 1.8, 2, 2.5, 3, 3.5, 4, 5, 6, 7, 8, 9), (1, 1.5, 2, 3, 4, 5, 7), (1, 2, 5), (1,))
_MOST_TICKS = 6
ROW_HEIGHT = 22
"""The height of a contender's row in pixels."""

CONFIG: dict[str, Any] = {
    "font": _FONT,
    "background": "transparent",
    "view": {"stroke": None},
    "mark": {"aria": False},
    "axis": {
        "aria": False,
        "labelColor": _INK,
        "labelFontSize": 12,
        "labelLimit": 280,
        "titleColor": _MUTED,
        "titleFontSize": 12,
        "titleFontWeight": "normal",
        "gridColor": _GRID,
        "domain": False,
        "ticks": False,
        "labelPadding": 8,
    },
    "axisX": {"labelColor": _MUTED, "labelOverlap": "greedy", "labelSeparation": 10, "labelFlush": False},
}
"""The configuration of all plots."""


@attrs.frozen(kw_only=True)
class Panel:
    """One plot with its heading, and a description in words."""

    title: str
    note: str
    """Which direction is better, and the meaning of the marks."""
    description: str
    """All figures of the plot as text."""
    rows: int
    specification: dict[str, Any]


def colour(contender: Contender) -> str:
    """Return the CSS variable of a contender's colour: blues for topicstore's, orange for peers, grey for limits."""
    if contender.kind != "topicstore":
        return f"var(--{contender.kind})"
    number = _BACKENDS.index(contender.backend) + 1 if contender.backend in _BACKENDS else len(_BACKENDS) + 1
    return f"var(--topicstore-{number})"


def panels(run: Run, workload: str, durability: str) -> list[Panel]:
    """Return the plots of a workload, one a question; those of ``mixed`` have all percentiles."""
    drawn = (
        (_percentiles if question.phase == "mixed" else _dots)(run, question, workload, durability)
        for question in QUESTIONS
    )
    return [panel for panel in drawn if panel is not None]


def _dots(run: Run, question: Question, workload: str, durability: str) -> Panel | None:
    """Draw the entrants of a question: as stored filled, compacted hollow."""
    taking_part = sorted(
        entrants(run, question, workload, durability, "topicstore", "peer"),
        key=lambda one: one.spread.median,
        reverse=question.more_is_better,
    )
    limits = list(entrants(run, question, workload, durability, "limit"))
    passed = [one for one in limits if taking_part and question.better(taking_part[0], one)]
    everyone = [one for one in (*taking_part, *limits) if one.spread.low > 0]
    if not everyone:
        return None
    unit = UNITS[question.metric]
    crosses = question.more_is_better
    rows = [_dot(question, one) | {"limit": crosses and one in limits and one not in passed} for one in everyone]
    shown = {
        name: _both(question.metric, [one for one in everyone if one.contender.name == name])
        for name in _names(everyone)
    }
    crossing = (
        _base(rows)
        .mark_rule(strokeDash=[3, 3], color="var(--limit)")
        .encode(x=_x(rows, unit))
        .transform_filter("datum.limit")
    )
    tooltip = ["contender:N", "form:N", "median:N", "lowest:N", "highest:N", "repetitions:Q"]
    return _panel(
        question.name,
        f"{_unit(question)}, {'more' if question.more_is_better else 'less'} is better{_of_passed(passed)}",
        [f"{one.label} {quantity(question.metric, one.spread.median)}" for one in everyone],
        len(shown),
        [crossing, *_marks(rows, shown, tooltip, unit)],
    )


def _of_passed(limits: Sequence[Entrant]) -> str:
    """Return in words that contenders were better than limits."""
    return f"; no limit here, because it was passed: {', '.join(_names(limits))}" if limits else ""


def _dot(question: Question, one: Entrant) -> Row:
    found = one.spread
    return {
        "contender": one.contender.name,
        "form": "compacted" if one.compacted else "as stored",
        "colour": colour(one.contender),
        "fill": _PAGE if one.compacted else colour(one.contender),
        "shape": _SHAPES[one.contender.kind],
        "x": found.median,
        "low": found.low,
        "high": found.high,
        "median": quantity(question.metric, found.median),
        "lowest": quantity(question.metric, found.low),
        "highest": quantity(question.metric, found.high),
        "repetitions": found.repetitions,
    }


def _both(metric: str, forms: Sequence[Entrant]) -> str:
    """Return the medians of one contender, as it stored and compacted."""
    return " → ".join(bare(metric, one.spread.median) for one in sorted(forms, key=lambda one: one.compacted))


def _percentiles(run: Run, question: Question, workload: str, durability: str) -> Panel | None:
    """Draw latencies of ``mixed``: the median, the 99th percentile and that of a thousand, as far as measured."""
    who = question.metric.partition("_")[0]
    found: dict[Contender, dict[str, float]] = {}
    for contender in run.of_kind("topicstore", "peer"):
        measured = (
            (name, run.of(workload, durability, contender.name, "mixed", f"{who}_{name}_ms"))
            for name, *_ in _PERCENTILES
        )
        points = {name: spread(list(values.values())).median for name, values in measured if values}
        if points and min(points.values()) > 0:
            found[contender] = points
    if not found:
        return None
    rows = [row for contender, points in found.items() for row in _latencies(contender, points, who)]
    shown = {
        contender.name: " · ".join(unprefixed(points[name]) if name in points else "–" for name, *_ in _PERCENTILES)
        for contender, points in sorted(found.items(), key=lambda item: item[1].get("p99", math.inf))
    }
    return _panel(
        f"Mixed, {'stores of a batch' if who == 'store' else 'reads of a device'}",
        "ms, less is better; ● p50, ◆ p99, ○ p99.9",
        [f"{name} {text} ms" for name, text in shown.items()],
        len(shown),
        _marks(rows, shown, ["contender:N", "percentile:N", "median:N"], "ms"),
    )


def _latencies(contender: Contender, points: Mapping[str, float], who: str) -> Iterator[Row]:
    for name, shape, filled in _PERCENTILES:
        if name in points:
            yield {
                "contender": contender.name,
                "percentile": name,
                "x": points[name],
                "low": min(points.values()),
                "high": max(points.values()),
                "median": quantity(f"{who}_{name}_ms", points[name]),
                "colour": colour(contender),
                "fill": colour(contender) if filled else _PAGE,
                "shape": shape,
            }


def _marks(rows: list[Row], shown: dict[str, str], tooltip: list[str], unit: str) -> list[alt.Chart]:
    """Return a line from the lowest to the highest of each row, and the points on it."""
    return [
        _base(rows)
        .mark_rule(strokeWidth=1.5)
        .encode(y=_y(shown), x=_x(rows, unit, "low"), x2="high", color=_raw("colour")),
        _base(rows)
        .mark_point(size=60, strokeWidth=2, opacity=1)
        .encode(
            y=_values(shown),
            x=_x(rows, unit),
            shape=_raw("shape", alt.Shape),
            fill=_raw("fill", alt.Fill),
            stroke=_raw("colour", alt.Stroke),
            tooltip=tooltip,
        ),
    ]


def _panel(title: str, note: str, figures: Sequence[str], rows: int, marks: Sequence[alt.Chart]) -> Panel:
    description = f"{title}, {note}: {'; '.join(figures)}"
    chart = (
        alt.layer(*marks)
        .resolve_axis(y="independent")
        .properties(
            width="container",
            height=ROW_HEIGHT * rows,
            autosize=alt.AutoSizeParams(type="fit-x", contains="padding"),
            description=description,
        )
    )
    return Panel(title=title, note=note, description=description, rows=rows, specification=chart.to_dict())


def _base(rows: list[Row]) -> alt.Chart:
    return alt.Chart(alt.InlineData(values=rows, name="rows"))


def _x(rows: Sequence[Row], unit: str, field: str = "x") -> alt.X:
    low, high = min(row["low"] for row in rows), max(row["high"] for row in rows)
    room = max(_ROOM, math.sqrt(_LEAST_RANGE * low / high))
    low, high = low / room, high * room
    return alt.X(
        f"{field}:Q",
        title=None,
        scale=alt.Scale(type="log", domain=[low, high], nice=False),
        axis=alt.Axis(format="~s" if low >= 1 and unit not in ("ms", "s") else ",~r", values=_ticks(low, high)),
    )


def _ticks(low: float, high: float) -> list[float]:
    """Return the ticks of the axis: the finest steps of a decade that don't give too many."""
    decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    found: list[float] = []
    for steps in _TICKS:
        every = [float(f"{step}e{decade}") for decade in decades for step in steps]
        found = [value for value in every if low <= value <= high]
        if len(found) <= _MOST_TICKS:
            break
    return found


def _y(shown: dict[str, str]) -> alt.Y:
    return alt.Y("contender:N", sort=list(shown), title=None, axis=alt.Axis(grid=True, orient="left"))


def _values(shown: dict[str, str]) -> alt.Y:
    """Return the same rows with their figures at the right."""
    axis = alt.Axis(orient="right", labelExpr=f"({json.dumps(shown)})[datum.label]", labelColor=_MUTED, grid=False)
    return alt.Y("contender:N", sort=list(shown), title=None, axis=axis)


def _raw(field: str, channel: Any = alt.Color) -> Any:
    """Return a channel that uses a field's values without a scale."""
    return channel(f"{field}:N", scale=None, legend=None)


def _names(some: Sequence[Entrant]) -> list[str]:
    return list(dict.fromkeys(one.contender.name for one in some))


def _unit(question: Question) -> str:
    return {
        "messages_per_second": "messages/s",
        "seconds": "seconds",
        "bytes_per_message": "bytes a message",
        "peak_memory": "bytes",
    }[question.metric]
