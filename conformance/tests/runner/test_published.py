"""The tables in the README of the suites agree with the capabilities that backends and layouts declare."""

from __future__ import annotations

from pathlib import Path

from topicstore.plugins import registry
from topicstore_conformance.runner.readme_tables import BEGIN, END, capabilities, published
from topicstore_conformance.runner.running import Outcome, Plan, Run
from topicstore_conformance.subjects.pairs import incompatible

README = Path(__file__).parents[2] / "README.md"
BACKENDS = {name for name, spec in registry().backends().items() if spec.target.startswith("topicstore_backends.")}
LAYOUTS = {name for name, spec in registry().layouts().items() if spec.target.startswith("topicstore_layouts.")}


def in_readme() -> str:
    """Return the text between the marker comments in the README."""
    before, _, after = README.read_text().partition(BEGIN)
    assert BEGIN not in after
    assert END not in before
    return after.partition(END)[0].strip()


def test_the_readme_has_what_plugins_declare() -> None:
    """The README's tables list the capabilities that built-in plugins declare.

    The marker comment before the tables names the command that prints them.
    """
    assert "\n\n".join(capabilities(BACKENDS, LAYOUTS)) == "\n\n".join(in_readme().split("\n\n")[:2])


def test_the_readme_has_every_pair() -> None:
    """The README lists every built-in backend, layout and pair as tested, or as refused with the current reason."""
    tables = in_readme().split("\n\n")
    rows = {row.split(" | ")[0].removeprefix("| "): row.split(" | ") for row in tables[2].splitlines()[2:]}
    refused = {f"`{backend}-{layout}`": reason for (backend, layout), reason in incompatible().items()}
    told = dict(row.removeprefix("| ").removesuffix(" |").split(" | ", 1) for row in tables[3].splitlines()[2:])
    pairs = {f"`{backend}-{layout}`" for backend in BACKENDS for layout in LAYOUTS}
    alone = {f"backend `{name}`" for name in BACKENDS} | {f"layout `{name}`" for name in LAYOUTS}
    assert {pair: reason for pair, reason in refused.items() if pair in pairs} == told
    assert (pairs - set(told)) | alone == {row for row in rows if not row.startswith("parts ")}


def outcome(kind: str) -> Outcome:
    """Return a test's result with this outcome."""
    return Outcome(group="g", test="t", promise="p", outcome=kind, seconds=0.4)


def test_results() -> None:
    """The table of results has a row for each run, with its counts, or a note that the run did not end."""
    backend = next(iter(sorted(BACKENDS)))
    ended = tuple(map(outcome, ("passed", "passed", "failed", "skipped")))
    runs = [
        Run(plan=Plan(suite="database", backend="memory", layout="block", mode="full"), outcomes=ended),
        Run(plan=Plan(suite="backend", backend="memory", mode="quick"), outcomes=(), failure="killed"),
    ]
    text = published(runs, {"a-b": "lacks x"})
    assert text.startswith(BEGIN)
    assert text.endswith(END)
    assert "| `memory-block` | full | 2 | 1 | 1 | 2 |" in text
    assert "| backend `memory` | quick | 0 | did not end | 0 | 0 |" in text
    assert "| `a-b` | lacks x |" in text
    assert f"| `{backend}` |" in "\n".join(capabilities({backend}, set()))


def test_seldom_tries_are_reported() -> None:
    """The row of a run on a backend without ``fast_seek`` says that only a quarter of the random examples were run."""
    for name, spec in registry().backends().items():
        run = Run(plan=Plan(suite="backend", backend=name, mode="quick"), outcomes=())
        told = "a quarter of the tries" in published([run], {})
        assert ("fast_seek" not in spec.capabilities) == told
