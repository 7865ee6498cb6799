"""The charts of a report, as static SVG: one for each workload, a row for each contender, a logarithmic axis.

The charts of a criterion are as narrow as a phone's screen and have the same axis, and the page puts as many of them
side by side as fit.

Colours are CSS variables of the page, so that charts follow its light or dark mode. The medians are written beside the
dots, so that readers don't have to read them off the axis.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import altair as alt
import attrs
import vl_convert

from topicstore_benchmarks.results import UNITS

from .quantities import bare
from .run import Contender, Run
from .verdict import Criterion, Result, criteria, results

__all__ = ["Picture", "colour", "pictures"]

_BACKENDS = ("rocksdb", "leveldb", "duckdb")
"""The backends with a colour of their own. All others share a fourth one."""
_SHAPES = {"topicstore": "circle", "peer": "diamond", "limit": "square"}
_WIDTH, _ROW = 290, 36
"""The width of a plot, and the height of a contender's row in it, in pixels."""
_NAME = 195
"""The maximum width of a contender's name, in pixels. The medians stand to its right."""
_ABOVE, _BELOW = -9, 8
"""The distances of the text and of the marks of a row from its middle, in pixels."""
_CONFIG: dict[str, Any] = {
    "font": "system-ui, sans-serif",
    "background": "transparent",
    "padding": {"left": 4, "right": 4, "top": 4, "bottom": 4},
    "view": {"stroke": None},
    "axis": {
        "labelColor": "var(--ink)",
        "labelFontSize": 12,
        "gridColor": "var(--grid)",
        "domain": False,
        "ticks": False,
        "labelPadding": 8,
    },
    "axisX": {"labelColor": "var(--muted)", "labelOverlap": "greedy", "labelSeparation": 12},
    "title": {"color": "var(--muted)", "fontSize": 12, "fontWeight": "normal", "anchor": "start"},
}


@attrs.frozen(kw_only=True)
class Picture:
    """The charts of the results for one criterion."""

    criterion: Criterion
    note: str
    """A text with the unit, the better direction, and the meaning of hollow marks."""
    plots: list[str]
    """An SVG for each workload, all with the same axis."""


def colour(contender: Contender) -> str:
    """Return the CSS variable of a contender's colour, which depends on its kind and, for topicstore, its backend."""
    if contender.kind != "topicstore":
        return f"var(--{contender.kind})"
    number = _BACKENDS.index(contender.backend) + 1 if contender.backend in _BACKENDS else len(_BACKENDS) + 1
    return f"var(--topicstore-{number})"


def pictures(run: Run) -> Iterator[Picture]:
    """Yield a chart for each criterion that has results, in order."""
    for criterion in criteria(run):
        rows = list(_rows(run, criterion))
        if rows:
            better = "more" if criterion.more_is_better else "less"
            hollow = f"; hollow: {'sync' if criterion.compacted is None else 'after compact'}"
            note = f"{_unit(criterion)}, {better} is better{hollow if any(row['hollow'] for row in rows) else ''}"
            yield Picture(criterion=criterion, note=note, plots=_plots(run, criterion, rows))


def _rows(run: Run, criterion: Criterion) -> Iterator[dict[str, Any]]:
    """Yield the data of a chart's marks, for the first durability.

    Marks are hollow for compacted contenders and, in the phase ``store``, for the other durabilities.
    """
    for workload in run.workloads:
        found = results(run, criterion, workload, run.durabilities[0])
        marks = [(one, one.compacted) for one in found]
        if criterion.phase == "store" and criterion.compacted is None:
            marks += [
                (one, True)
                for durability in run.durabilities[1:]
                for one in results(run, criterion, workload, durability)
            ]
        for one, hollow in marks:
            if min(one.values.values()) > 0:
                yield _mark(criterion, workload, one, hollow=hollow)


def _mark(criterion: Criterion, workload: str, one: Result, *, hollow: bool) -> dict[str, Any]:
    values, paint = one.values.values(), colour(one.contender)
    return {
        "workload": workload,
        "contender": one.contender.name,
        "low": min(values),
        "median": one.median,
        "high": max(values),
        "hollow": hollow,
        "text": bare(criterion.metric, one.median),
        "colour": paint,
        "fill": "var(--page)" if hollow else paint,
        "shape": _SHAPES[one.contender.kind],
    }


def _plots(run: Run, criterion: Criterion, rows: list[dict[str, Any]]) -> list[str]:
    low, high = min(row["low"] for row in rows) / 1.1, max(row["high"] for row in rows) * 1.1
    scale = alt.Scale(type="log", domain=[low, high], range=[0, _WIDTH], nice=False)
    labels = "~s" if low >= 1 and UNITS[criterion.metric] not in ("ms", "s") else ",~r"
    axis = alt.Axis(format=labels, tickCount=3)
    workloads = [name for name in run.workloads if any(row["workload"] == name for row in rows)]
    return [_plot(run, [row for row in rows if row["workload"] == name], name, scale, axis) for name in workloads]


def _plot(run: Run, rows: list[dict[str, Any]], workload: str, scale: alt.Scale, axis: alt.Axis) -> str:
    """Return the chart of a workload: for each contender its name and medians, and below them its marks."""
    names = [name for name in run.contenders if any(row["contender"] == name for row in rows)]
    base = alt.Chart().encode(y=alt.Y("contender:N", sort=names, title=None, axis=None))
    grid = base.mark_rule(color="var(--grid)", yOffset=_BELOW, y2Offset=_BELOW).encode(
        x=alt.value(0), x2=alt.value(_WIDTH)
    )
    lines = base.mark_rule(strokeWidth=1.5, yOffset=_BELOW, y2Offset=_BELOW).encode(
        x=alt.X("low:Q", scale=scale, axis=axis, title=None), x2="high:Q", color=_raw("colour", alt.Color)
    )
    points = base.mark_point(size=60, strokeWidth=2, opacity=1, yOffset=_BELOW).encode(
        x=alt.X("median:Q", scale=scale, axis=axis, title=None),
        shape=_raw("shape", alt.Shape),
        fill=_raw("fill", alt.Fill),
        stroke=_raw("colour", alt.Stroke),
    )
    texts = base.transform_aggregate(texts="values(text)", groupby=["contender"]).transform_calculate(
        medians="join(pluck(datum.texts, 'text'), ' → ')"
    )
    labels = texts.mark_text(align="left", fontSize=12, color="var(--ink)", dy=_ABOVE, limit=_NAME).encode(
        x=alt.value(0), text="contender:N"
    )
    values = texts.mark_text(align="right", fontSize=12, color="var(--ink)", dy=_ABOVE).encode(
        x=alt.value(_WIDTH), text="medians:N"
    )
    chart = (
        alt.layer(grid, lines, points, labels, values, data=alt.InlineData(values=rows))
        .properties(width=_WIDTH, height=_ROW * len(names), title=workload)
        .configure(**_CONFIG)
    )
    version = ".".join(alt.SCHEMA_VERSION.removeprefix("v").split(".")[:2])
    svg: str = vl_convert.vegalite_to_svg(chart.to_dict(), vl_version=version)
    return svg


def _raw(field: str, channel: Any) -> Any:
    """Return a channel that uses a field's values without a scale."""
    return channel(f"{field}:N", scale=None, legend=None)


def _unit(criterion: Criterion) -> str:
    return {
        "messages_per_second": "messages a second",
        "seconds": "seconds",
        "bytes_per_message": "bytes",
        "peak_memory": "bytes",
    }.get(criterion.metric, "milliseconds")
