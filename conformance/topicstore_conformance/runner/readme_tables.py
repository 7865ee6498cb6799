"""Markdown tables for a README: the capabilities that plugins declare, and the results of the suites.

They are placed between two marks, so that a test can compare the published tables with the declared capabilities.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from topicstore.contract.engine import CAPABILITIES
from topicstore.plugins import registry

from .running import Run

__all__ = ["BEGIN", "END", "capabilities", "published", "results"]

BEGIN, END = "<!-- printed by: topicstore conformance --all --markdown -->", "<!-- end of what was printed -->"

Row = Sequence[str]


def published(runs: Sequence[Run], refused: Mapping[str, str]) -> str:
    """Return all tables of the tested plugins, between the marks."""
    backends = {run.plan.backend for run in runs} - {""}
    layouts = {run.plan.layout for run in runs} - {""}
    return "\n\n".join((BEGIN, *capabilities(backends, layouts), *results(runs, refused), END))


def capabilities(backends: set[str], layouts: set[str]) -> Iterator[str]:
    """Yield a table of the capabilities that backends declare, and a table of those that layouts declare and need."""
    known = {name: registry().backend(name) for name in sorted(backends)}
    if known:
        names = sorted(CAPABILITIES | frozenset[str]().union(*(spec.capabilities for spec in known.values())))
        rows = [
            (f"`{name}`", *("yes" if each in spec.capabilities else "" for each in names))
            for name, spec in known.items()
        ]
        yield _table(("backend", *names), rows)
    specs = {name: registry().layout(name) for name in sorted(layouts)}
    if specs:
        rows = [(f"`{name}`", _listed(spec.capabilities), _listed(spec.requires)) for name, spec in specs.items()]
        yield _table(("layout", "declares", "needs of a backend"), rows)


def results(runs: Sequence[Run], refused: Mapping[str, str]) -> Iterator[str]:
    """Yield a table of the numbers of passed and failed tests, and one of the incompatible pairs."""
    headers = ("tested", "how", "kept", "broken", "skipped", "seconds")
    yield _table(headers, [_result(run) for run in runs])
    if refused:
        yield _table(("refused", "why"), [(f"`{pair}`", reason) for pair, reason in sorted(refused.items())])


def _result(run: Run) -> Row:
    what = f"`{run.plan}`" if run.plan.suite == "database" else f"{run.plan.suite} `{run.plan}`"
    how = run.plan.mode + ", a quarter of the tries" * run.plan.seldom
    broken = "did not end" if run.failure else str(len(run.of("failed")))
    return what, how, str(len(run.of("passed"))), broken, str(len(run.of("skipped"))), f"{run.seconds:.0f}"


def _listed(names: frozenset[str]) -> str:
    return ", ".join(sorted(names)) or "nothing"


def _table(headers: Row, rows: Sequence[Row]) -> str:
    return "\n".join(f"| {' | '.join(row)} |" for row in (headers, ["---"] * len(headers), *rows))
