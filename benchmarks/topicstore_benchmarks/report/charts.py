"""The charts of a report, as static SVG: a row for each contender, a column for each workload, a logarithmic axis.

Colours are CSS variables of the page, so that charts follow its light or dark mode. The medians are written beside the
dots, so that readers don't have to read them off the axis.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
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
_PAGE, _COLUMN, _ROW = 1_224, 265, 20
"""The width of the page, the least width of a column, and the height of a row, in pixels."""
_VALUES = 125
"""The width of the values beside a column's plot, in pixels."""
_LETTER, _LABEL, _SPACING = 7.2, 260, 8
"""The width of a letter of a name, the most of a name, and the space between columns, in pixels."""
_BESIDE = 4
"""The maximum number of columns side by side."""
_CONFIG: dict[str, Any] = {
    "font": "system-ui, sans-serif",
    "background": "transparent",
    "padding": {"left": 40, "right": 5, "top": 5, "bottom": 5},  # a viewer's font may be wider than the one measured
    "view": {"stroke": None},
    "axis": {
        "labelColor": "var(--ink)",
        "labelFontSize": 12,
        "labelLimit": _LABEL,
        "gridColor": "var(--grid)",
        "domain": False,
        "ticks": False,
        "labelPadding": 8,
    },
    "axisX": {"labelColor": "var(--muted)", "labelOverlap": "greedy", "labelSeparation": 12},
    "header": {"labelColor": "var(--muted)", "labelFontSize": 12, "labelAnchor": "start", "title": None},
}


@attrs.frozen(kw_only=True)
class Picture:
    """A chart of the results for one criterion."""

    criterion: Criterion
    note: str
    """A text with the unit, the better direction, and the meaning of hollow marks."""
    svg: str


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
            yield Picture(criterion=criterion, note=note, svg=_svg(run, criterion, rows))


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


def _svg(run: Run, criterion: Criterion, rows: list[dict[str, Any]]) -> str:
    names = [name for name in run.contenders if any(row["contender"] == name for row in rows)]
    low, high = min(row["low"] for row in rows) / 1.1, max(row["high"] for row in rows) * 1.1
    column = _column(names, len({row["workload"] for row in rows}))
    scale = alt.Scale(type="log", domain=[low, high], range=[0, column - _VALUES], nice=False)
    axis = alt.Axis(format="~s" if low >= 1 and UNITS[criterion.metric] not in ("ms", "s") else ",~r", tickCount=3)
    y = alt.Y("contender:N", sort=names, title=None, axis=alt.Axis(grid=True))
    base = alt.Chart().encode(y=y)
    lines = base.mark_rule(strokeWidth=1.5).encode(
        x=alt.X("low:Q", scale=scale, axis=axis, title=None), x2="high:Q", color=_raw("colour", alt.Color)
    )
    points = base.mark_point(size=60, strokeWidth=2, opacity=1).encode(
        x=alt.X("median:Q", scale=scale, axis=axis, title=None),
        shape=_raw("shape", alt.Shape),
        fill=_raw("fill", alt.Fill),
        stroke=_raw("colour", alt.Stroke),
    )
    texts = (
        alt.Chart()
        .transform_aggregate(texts="values(text)", groupby=["contender", "workload"])
        .transform_calculate(shown="join(pluck(datum.texts, 'text'), ' → ')")
        .mark_text(align="right", fontSize=12, color="var(--ink)")
        .encode(y=y, x=alt.value(column - 12), text="shown:N")
    )
    chart = (
        alt.layer(lines, points, texts, data=alt.InlineData(values=rows))
        .properties(width=column, height=_ROW * len(names))
        .facet(alt.Facet("workload:N", sort=list(run.workloads), title=None), columns=_BESIDE, spacing=_SPACING)
        .configure(**_CONFIG)
    )
    version = ".".join(alt.SCHEMA_VERSION.removeprefix("v").split(".")[:2])
    svg: str = vl_convert.vegalite_to_svg(chart.to_dict(), vl_version=version)
    return svg


def _column(names: Sequence[str], workloads: int) -> float:
    """Return the width of a column in pixels, so that the columns fill the page beside the names."""
    beside = min(workloads, _BESIDE)
    padding: float = _CONFIG["padding"]["left"] + _CONFIG["padding"]["right"] + _CONFIG["axis"]["labelPadding"]
    labels = min(max(map(len, names)) * _LETTER, _LABEL)
    return max(_COLUMN, (_PAGE - padding - labels - _SPACING * (beside - 1)) / beside)


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
