"""The command ``topicstore conformance``."""

from __future__ import annotations

import importlib.util
import re
from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import click
from topicstore.cli.terminal.completion import backend_names, layout_names
from topicstore.cli.terminal.exits import DAMAGED, USAGE, Failure
from topicstore.cli.terminal.options import json_option

if TYPE_CHECKING:
    from topicstore_conformance.runner.running import Mode, Outcome, Run

__all__ = ["conformance"]

_NEEDS = ("hypothesis", "pytest", "pytest_timeout", "xdist")

_CONTRACTS = {
    "backend": "topicstore.contract.engine",
    "layout": "topicstore.contract.layout",
    "database": "topicstore.Database",
    "parts": "topicstore.Database and topicstore.sessions.Sessions",
    "plugins": "framework/guides/plugins.md and topicstore.contract.hookspecs",
    "broker": "https://docs.oasis-open.org/mqtt/mqtt/v5.0/os/mqtt-v5.0-os.html",
}
"""The objects whose docstrings specify the guarantees that each suite tests."""
_PYTEST = "pytest -p topicstore_conformance.runner.plugin --pyargs topicstore_conformance.installed"


@click.group(invoke_without_command=True, subcommand_metavar="[mqtt HOST:PORT]")
@click.option(
    "--backend",
    metavar="NAME",
    shell_complete=backend_names,
    help="Test this backend, by itself and under each layout that fits.",
)
@click.option(
    "--layout",
    metavar="NAME",
    shell_complete=layout_names,
    help="Test this layout, by itself and on each backend that fits.",
)
@click.option(
    "--plugins",
    metavar="NAMES",
    help="Test these plugins, which transform messages, together: comma-separated, outermost first.",
)
@click.option("--all", "all_", is_flag=True, help="Test everything that is installed, each pair once.")
@click.option("--quick", is_flag=True, help="Try everything less often, and leave out what takes long anyway.")
@click.option("--first-failure", is_flag=True, help="End at the first failed test, and say why it failed.")
@click.option("--markdown", is_flag=True, help="Print tables of capabilities and results in Markdown instead.")
@json_option
@click.pass_context
def conformance(
    ctx: click.Context,
    *,
    backend: str | None,
    layout: str | None,
    plugins: str | None,
    all_: bool,
    quick: bool,
    first_failure: bool,
    markdown: bool,
    as_json: bool,
) -> None:
    """Test whether an installed backend or layout keeps what it promises.

    With both names, only the two are tested, and databases of them. With --plugins, only these plugins are tested, on
    the pairs of the names, by default on rocksdb and block. In the full mode, --all tests each backend and each layout
    fully in one pair, and the other pairs quickly. First each plugin opens, stores, reads and opens again; if that
    fails, the cause is printed and nothing else is tried. The verdict at the end names the tests that were skipped, and
    why. Ends with 1 if a promise was broken.
    """
    if ctx.invoked_subcommand is not None:
        return
    if all_ == bool(backend or layout or plugins):
        raise click.UsageError("give --backend NAME, --layout NAME, --plugins NAMES or several of them, or --all")
    if markdown and as_json:
        raise click.UsageError("--markdown and --json exclude each other")
    _need()
    from topicstore_conformance.runner.running import everything, plans_for, run_all, transform_plans

    mode: Mode = "quick" if quick else "full"
    if plugins:
        plans = transform_plans(plugins.split(","), backend, layout, mode)
    else:
        plans = everything(mode) if all_ else plans_for(backend, layout, mode)
    runs = run_all(plans, _tell, first_failure=first_failure)
    if as_json:
        from topicstore.cli.terminal.display import print_json

        print_json(_document(runs, _left_out(backend, layout)))
    elif markdown:
        from topicstore_conformance.runner.readme_tables import published

        click.echo(published(runs, _refused(backend, layout)))
    else:
        _print(runs, _left_out(backend, layout), brief=all_)
    if not all(run.kept for run in runs):
        ctx.exit(DAMAGED)


@conformance.command()
@click.argument("address", metavar="HOST:PORT")
@click.option("--first-failure", is_flag=True, help="End at the first failed test, and say why it failed.")
@json_option
@click.pass_context
def mqtt(ctx: click.Context, *, address: str, first_failure: bool, as_json: bool) -> None:
    """Test whether a broker, of any vendor, does what MQTT 5 and 3.1.1 demand.

    The broker must accept clients without a password. Each case is printed with the numbers of its statements in the
    standard of MQTT 5. The cases use topics and client ids of their own, and leave nothing behind, so that the broker
    may serve other clients meanwhile. Behaviour that the standard leaves open is not tested, and cases are skipped for
    a version or a feature that the broker doesn't offer. Ends with 1 if a statement was broken.
    """
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal():
        raise click.UsageError(f"{address!r} is no address: HOST:PORT, such as localhost:1883")
    _need()
    from topicstore_conformance.runner.running import Plan, run_all

    runs = run_all([Plan(suite="broker", broker=address, mode="full")], _tell, first_failure=first_failure)
    if as_json:
        from topicstore.cli.terminal.display import print_json

        print_json(_document(runs, {}))
    else:
        _print_cases(runs[0])
        _print_broken(runs[0])
        _print_verdict(runs[0], brief=True)
    if not runs[0].kept:
        ctx.exit(DAMAGED)


def _need() -> None:
    """Raise `Failure` if packages that the suites need are missing."""
    missing = [name for name in _NEEDS if importlib.util.find_spec(name) is None]
    if missing:
        raise Failure(f'the suite needs {" and ".join(missing)}: pip install "topicstore[conformance]"', USAGE)


def _tell(run: Run) -> None:
    """Print the result of a finished run to standard error."""
    click.echo(f"{_name(run)}, {run.plan.mode}: {_result(run)}, {run.seconds:.0f} s", err=True)


def _name(run: Run) -> str:
    return str(run.plan) if run.plan.suite == "database" else f"{run.plan.suite} {run.plan}"


def _result(run: Run) -> str:
    if run.failure:
        return f"failed: {run.failure.partition(chr(10))[0]}"
    counts = {"kept": run.of("passed"), "broken": run.of("failed"), "skipped": run.of("skipped")}
    return ", ".join(f"{len(tests)} {what}" for what, tests in counts.items() if tests) or "nothing to test"


def _left_out(backend: str | None, layout: str | None) -> dict[str, str]:
    """Return the pairs and the plugins that are not tested, each with the reason."""
    from topicstore_conformance.subjects.pairs import absent

    return _refused(backend, layout) | absent()


def _refused(backend: str | None, layout: str | None) -> dict[str, str]:
    """Return the incompatible pairs, each with the reason."""
    from topicstore_conformance.subjects.pairs import incompatible

    return {
        f"{names[0]}-{names[1]}": reason
        for names, reason in incompatible().items()
        if backend in (None, names[0]) and layout in (None, names[1])
    }


# --- for programs -----------------------------------------------------------------------------


def _document(runs: Sequence[Run], left_out: dict[str, str]) -> dict[str, Any]:
    return {
        "kept": all(run.kept for run in runs),
        "runs": [
            {
                "suite": run.plan.suite,
                "backend": run.plan.backend or None,
                "layout": run.plan.layout or None,
                "plugins": list(run.plan.plugins),
                "broker": run.plan.broker or None,
                "mode": run.plan.mode,
                "capabilities": run.plan.capabilities,
                "kept": run.kept,
                "failure": run.failure,
                "seconds": round(run.seconds, 3),
                "tests": run.outcomes,
                "not_tried": _not_tried(run),
            }
            for run in runs
        ],
        "left_out": left_out,
    }


# --- for people -------------------------------------------------------------------------------


def _print(runs: Sequence[Run], left_out: dict[str, str], *, brief: bool) -> None:
    from topicstore.cli.terminal.display import console, fields, make_table

    out = console()
    if brief:
        headers = ("suite", "of", "mode", "kept>", "broken>", "skipped>", "seconds>", "capabilities~")
        out.print(make_table(*headers, rows=map(_row, runs)))
        if any(run.plan.seldom for run in runs):
            out.print("¼: a quarter of the random tries, because without fast_seek each read takes milliseconds")
        out.print()
    for run in () if brief else runs:
        out.print(fields([(_name(run), ", ".join(run.plan.capabilities) or "no capabilities")]))
        columns = ("promises of", "kept>", "broken>", "skipped>", "seconds>", "why skipped~")
        out.print(make_table(*columns, rows=_groups(run)))
        out.print()
    if left_out:
        out.print(make_table("not tested", "why~", rows=sorted(left_out.items())))
        out.print()
    for run in runs:
        _print_broken(run)
    for run in runs:
        _print_verdict(run, brief=brief)


def _row(run: Run) -> tuple[Any, ...]:
    """Return the table row of a run; a database's row has no capabilities, because its parts' rows list them."""
    declared = "" if run.plan.suite in ("database", "parts") else ", ".join(run.plan.capabilities) or None
    return run.plan.suite, str(run.plan), _mode(run), *_counts(run.outcomes, run.seconds), declared


def _mode(run: Run) -> str:
    return run.plan.mode + " ¼" * run.plan.seldom


def _counts(tests: Sequence[Outcome], seconds: float) -> tuple[int | None, int | None, int | None, str]:
    found = Counter(test.outcome for test in tests)
    return found["passed"], found["failed"] or None, found["skipped"] or None, f"{seconds:.1f}"


def _groups(run: Run) -> list[tuple[Any, ...]]:
    """Return a row for each module of the suite, and one for all."""
    groups: dict[str, list[Outcome]] = {}
    for test in run.outcomes:
        groups.setdefault(test.group, []).append(test)
    rows: list[tuple[Any, ...]] = []
    for name, tests in groups.items():
        reasons = Counter(test.reason for test in tests if test.outcome == "skipped")
        why = "; ".join(f"{reason} ({count})" for reason, count in reasons.items())
        rows.append((name, *_counts(tests, sum(test.seconds for test in tests)), why or None))
    return [*rows, ("all", *_counts(run.outcomes, run.seconds), None)]


def _print_broken(run: Run) -> None:
    """Print each failed promise with its failed cases, equal failures once, and the command that repeats a test."""
    from topicstore.cli.terminal.display import visible

    for tests in _equal(run.of("failed")):
        first = tests[0]
        numbers = "".join(f" [MQTT-{number}]" for number in first.statements)
        click.echo(f"{_name(run)} broke: {visible(first.promise)}{numbers}")
        for promise in dict.fromkeys(test.promise for test in tests if test.promise != first.promise):
            click.echo(f"    and with the same failure: {visible(promise)}")
        cause = first.reason + (f" ({first.where})" if first.where else "")
        click.echo(visible(f"    {first.test}: {cause}"))
        if len(tests) > 1:
            click.echo(visible(f"    equal failures: {', '.join(test.test for test in tests[1:])}"))
        for line in first.history.splitlines():
            click.echo(visible(f"        {line}"))
        click.echo(f"    contract: {_CONTRACTS[run.plan.suite]}; repeat: {_repetition(run, first)}")
    if run.failure:
        click.echo(f"{_name(run)} did not come to its end: " + "\n    ".join(map(visible, run.failure.split("\n"))))


def _print_cases(run: Run) -> None:
    """Print each case with its result and the numbers of its statements."""
    from topicstore.cli.terminal.display import console, make_table

    words = {"passed": "kept", "failed": "broken", "skipped": "skipped"}
    cases: dict[tuple[str, ...], Counter[str]] = {}
    for test in run.outcomes:
        cases.setdefault((test.promise, *test.statements), Counter())[words[test.outcome]] += 1
    rows = [
        (", ".join(f"{count} {word}" for word, count in found.items()), promise, " ".join(numbers))
        for (promise, *numbers), found in cases.items()
    ]
    console().print(make_table("cases", "what is tried~", "MQTT-~", rows=rows))
    click.echo()


_VARYING = re.compile(r"0x[0-9a-f]+|\d+|'[^']*'|\"[^\"]*\"")
"""The parts of a reason that may differ between equal failures: numbers and quoted texts."""


def _equal(tests: Sequence[Outcome]) -> list[list[Outcome]]:
    """Return failed tests in groups of equal failures: those of one cause at one place, or of one test."""
    groups: dict[tuple[str, str], list[Outcome]] = {}
    for test in tests:
        own = test.promise, ""
        cause = (test.where, _VARYING.sub("…", test.reason)) if not test.statements else own
        known = next(
            (key for key, some in groups.items() if key == cause or any(o.promise == own[0] for o in some)), None
        )
        groups.setdefault(known or cause, []).append(test)
    return list(groups.values())


def _not_tried(run: Run) -> dict[str, list[str]]:
    """Return the promises of a run's skipped tests, by the reason."""
    found: dict[str, list[str]] = {}
    for test in run.of("skipped"):
        promises = found.setdefault(test.reason, [])
        if test.promise not in promises:
            promises.append(test.promise)
    return found


def _print_verdict(run: Run, *, brief: bool) -> None:
    """Print whether a run's promises were kept, and which were not tried, and why; briefly only how many."""
    from topicstore.cli.terminal.display import visible

    if run.kept:
        verdict = f"kept all {len(run.of('passed'))} promises that were tried"
    else:
        verdict = f"NOT kept: {_result(run)}" if run.of("failed") or run.first else f"not finished: {_result(run)}"
    click.echo(f"{_name(run)}: {verdict}")
    if run.plan.mode == "quick":
        click.echo("    tried less often, and with smaller sizes: without --quick more is tried")
    for reason, promises in _not_tried(run).items():
        click.echo(visible(f"    not tried: {reason}" + (f" ({len(promises)})" if brief else "")))
        for promise in () if brief else promises:
            click.echo(visible(f"        {promise}"))


def _repetition(run: Run, test: Outcome) -> str:
    """Return the command that repeats a test."""
    chosen = [f"--only-{run.plan.suite} {run.plan}", *["--quick"] * (run.plan.mode == "quick")]
    if run.plan.plugins:
        chosen.append(f"--plugins {','.join(run.plan.plugins)}")
    name = test.test.partition("[")[0]
    return f"{_PYTEST}.test_{run.plan.suite} {' '.join(chosen)} -k {name}"
