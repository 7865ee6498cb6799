"""Runs the suites for installed plugins in processes of pytest-xdist, and collects the result of every promise.

A test that hangs or takes its process down is a broken promise like any other: it is named, and another process goes on
with the others.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, redirect_stdout
from pathlib import Path
from typing import Literal

import attrs
import msgspec
import pytest
from topicstore.plugins import load_target, registry

from topicstore_conformance.backend.suite import BackendSuite
from topicstore_conformance.conditions.directories import quick_directory
from topicstore_conformance.conditions.modes import VARIABLE
from topicstore_conformance.database.suite import DatabaseSuite
from topicstore_conformance.faults.threads import PATIENCE
from topicstore_conformance.layout.suite import LayoutSuite
from topicstore_conformance.subjects.pairs import (
    Pair,
    backend_for,
    backends_under,
    covering,
    layouts_on,
    pair_of,
    pairs,
)

__all__ = ["LIMIT", "SUITES", "Mode", "Outcome", "Plan", "Run", "everything", "plans_for", "run_all"]

LIMIT = 3 * PATIENCE
"""The seconds after which a test is taken for stuck: more than any test waits by itself."""
_CRASHES = 2
"""How many processes that died or were stuck are replaced."""
_INI = Path(__file__).parents[1] / "installed" / "pytest.ini"
_LONGEST = 500
"""The longest reason, in characters: compared values may be large."""
_TEST = re.compile(r"test_(?P<suite>\w+)\.py::\w+::(?P<test>(?P<name>\w+)\[(?P<case>.*)\])$", re.DOTALL)

Suite = Literal["backend", "layout", "database"]
Mode = Literal["quick", "full"]
SUITES: dict[Suite, type] = {"backend": BackendSuite, "layout": LayoutSuite, "database": DatabaseSuite}


@attrs.frozen(kw_only=True)
class Plan:
    """One suite to run."""

    suite: Suite
    backend: str = ""
    layout: str = ""
    mode: Mode

    def __str__(self) -> str:
        return "-".join(name for name in (self.backend, self.layout) if name)

    @property
    def capabilities(self) -> list[str]:
        """The capabilities that the tested plugins declare."""
        declared: frozenset[str] = frozenset()
        if self.backend:
            declared |= registry().backend(self.backend).capabilities
        if self.layout:
            declared |= registry().layout(self.layout).capabilities
        return sorted(declared)

    @property
    def seldom(self) -> bool:
        """Whether tests whose data differ with every try make fewer tries: see `profiles.tries`."""
        backend = self.backend or backend_for(self.layout)
        return "fast_seek" not in registry().backend(backend).capabilities


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """The result of a promise."""

    group: str
    """The module that the promise is from, such as ``cursors``."""
    test: str
    """The name of the test, with the case in brackets."""
    promise: str
    """The docstring of the test."""
    outcome: str
    """The result: ``passed``, ``failed`` or ``skipped``."""
    reason: str = ""
    """The reason why the test was skipped, or in one line how it failed."""
    where: str = ""
    """The file and line of the failure."""
    seconds: float


@attrs.frozen(kw_only=True)
class Run:
    """The result of a plan."""

    plan: Plan
    outcomes: tuple[Outcome, ...]
    failure: str = ""
    """The reason why the run didn't come to its end, if it didn't."""

    @property
    def seconds(self) -> float:
        """The seconds that its tests took together, in whatever processes."""
        return sum(outcome.seconds for outcome in self.outcomes)

    def of(self, outcome: str) -> list[Outcome]:
        """Return the tests that ``passed``, ``failed`` or were ``skipped``."""
        return [one for one in self.outcomes if one.outcome == outcome]

    @property
    def kept(self) -> bool:
        """Whether no promise was broken."""
        return not self.failure and not self.of("failed")


# --- what to run --------------------------------------------------------------------------------


def plans_for(backend: str | None, layout: str | None, mode: Mode) -> list[Plan]:
    """Return the suites of a backend, of a layout, and of databases of both; a missing name stands for all that fit.

    Raises `UnknownPluginError`, `IncompatibleError`, `BackendUnavailableError` or `PluginError`.
    """
    if backend is not None:
        load_target(registry().backend(backend))
    if layout is not None:
        load_target(registry().layout(layout))
    if backend is not None and layout is not None:
        together = [pair_of(backend, layout)]
    elif backend is not None:
        together = [pair_of(backend, name) for name in layouts_on(backend)]
    else:
        together = [pair_of(name, str(layout)) for name in backends_under(str(layout))]
    plans = [_database(pair, mode) for pair in together]
    if backend is not None:
        plans.append(Plan(suite="backend", backend=backend, mode=mode))
    if layout is not None:
        plans.append(Plan(suite="layout", layout=layout, mode=mode))
    return plans


def everything(mode: Mode) -> list[Plan]:
    """Return all suites of all that is installed.

    In the full mode each backend and each layout is tested fully once, in as few pairs as that takes,
    and every other pair quickly.
    """
    every = pairs()
    whole = covering() if mode == "full" else []
    plans = [_database(pair, "full" if pair in whole else "quick") for pair in every]
    plans += [Plan(suite="backend", backend=name, mode=mode) for name in sorted({pair.backend for pair in every})]
    plans += [Plan(suite="layout", layout=name, mode=mode) for name in sorted({pair.layout for pair in every})]
    return plans


def _database(pair: Pair, mode: Mode) -> Plan:
    return Plan(suite="database", backend=pair.backend, layout=pair.layout, mode=mode)


# --- running it ---------------------------------------------------------------------------------


def run_all(plans: Iterable[Plan], done: Callable[[Run], object] = lambda _: None) -> list[Run]:
    """Run all plans, those of one mode in one run of pytest; return the runs in the order of their plans.

    done: called with each run as soon as it is over.
    """
    wanted = list(plans)
    runs: dict[Plan, Run] = {}
    for mode in ("full", "quick"):
        some = [plan for plan in wanted if plan.mode == mode]
        if some:
            runs.update(_run(some, done))
    return [runs[plan] for plan in wanted]


class _Collector:
    """The pytest plugin that collects the results of all processes."""

    def __init__(self, plans: Sequence[Plan], done: Callable[[Run], object]) -> None:
        self._plans = {(plan.suite, str(plan)): plan for plan in plans}
        self._done = done
        self._reports: dict[str, list[pytest.TestReport]] = {}
        self.left: dict[Plan, set[str]] = {}
        """The tests that are not over."""
        self.outcomes: dict[Plan, list[Outcome]] = {plan: [] for plan in plans}
        self.failure = ""

    def pytest_xdist_node_collection_finished(self, ids: Sequence[str]) -> None:
        """Note which tests there are; every process finds the same."""
        for test in () if self.left else ids:
            plan = self._plan_of(test)
            if plan is not None:
                self.left.setdefault(plan, set()).add(test)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        """Note why the tests could not be collected."""
        if report.failed:
            self.failure = str(report.longrepr)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Keep the results of setup, call and teardown. If a process died, there is one report, of a failure."""
        self._reports.setdefault(report.nodeid, []).append(report)
        if report.when in ("setup", "call"):
            return
        plan, reports = self._plan_of(report.nodeid), self._reports.pop(report.nodeid)
        if plan is not None:
            self.outcomes[plan].append(_outcome(plan, report.nodeid, reports))
            left = self.left.get(plan, set())
            left.discard(report.nodeid)
            if not left:
                self._done(Run(plan=plan, outcomes=tuple(self.outcomes[plan])))

    def _plan_of(self, test: str) -> Plan | None:
        """Return the plan of a test: the one with the longest name that its case begins with."""
        found = _TEST.search(test)
        if found is None:
            return None
        names = (f"{name}-" for (suite, name) in self._plans if suite == found["suite"])
        longest = max((name for name in names if f"{found['case']}-".startswith(name)), key=len, default="")
        return self._plans.get((found["suite"], longest.removesuffix("-")))  # type: ignore[arg-type]


def _run(plans: Sequence[Plan], done: Callable[[Run], object]) -> Iterator[tuple[Plan, Run]]:
    """Run suites of one mode, and yield their results."""
    collector = _Collector(plans, done)
    with quick_directory() as directory, _environment(plans[0].mode, directory), _silence():
        code = pytest.main([*_arguments(plans), f"--basetemp={directory}/pytest"], plugins=[collector])
    whole = code in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED)
    failure = collector.failure or ("" if whole else f"pytest ended with code {int(code)}")
    for plan, outcomes in collector.outcomes.items():
        left = len(collector.left.get(plan, ()))
        short = "" if outcomes and not left else f"{left or 'all'} tests were not run"
        yield plan, Run(plan=plan, outcomes=tuple(outcomes), failure=failure or short)


def _arguments(plans: Sequence[Plan]) -> list[str]:
    modules = sorted({f"topicstore_conformance.installed.test_{plan.suite}" for plan in plans})
    names = {suite: ",".join(str(plan) for plan in plans if plan.suite == suite) for suite in SUITES}
    return [
        *("-c", str(_INI), "-p", "topicstore_conformance.runner.plugin"),
        *("-p", "xdist.plugin", "-p", "pytest_timeout", "--tb=line"),
        *("-n", str(_cores()), "--dist=worksteal", f"--max-worker-restart={_CRASHES}"),
        *(f"--timeout={LIMIT}", "--timeout-method=thread"),
        *(f"--only-{suite}={some}" for suite, some in names.items() if some),
        *("--pyargs", *modules),
    ]


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@contextmanager
def _environment(mode: Mode, directory: str) -> Iterator[None]:
    """Let the processes have a mode, and their temporary files in a directory that is removed with all it has."""
    with pytest.MonkeyPatch.context() as patch:
        for name in [name for name in os.environ if name.startswith("PYTEST_")]:
            patch.delenv(name)
        patch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
        patch.setenv("OPENBLAS_NUM_THREADS", "1")  # threads of NumPy that nothing uses
        patch.setenv(VARIABLE, mode)
        patch.setenv("TMPDIR", directory)
        patch.setenv("HYPOTHESIS_STORAGE_DIRECTORY", f"{directory}/hypothesis")
        yield


@contextmanager
def _silence() -> Iterator[None]:
    """Drop what pytest prints: all that matters of it is collected."""
    with Path(os.devnull).open("w") as nowhere, redirect_stdout(nowhere):
        yield


def _outcome(plan: Plan, nodeid: str, reports: Sequence[pytest.TestReport]) -> Outcome:
    worst = min(reports, key=lambda report: ("failed", "skipped", "passed").index(report.outcome))
    reason, where = _reason(worst)
    found = _TEST.search(nodeid)
    assert found is not None
    function = getattr(SUITES[plan.suite], found["name"])
    return Outcome(
        group=function.__module__.rpartition(".")[2],
        test=found["test"],
        promise=" ".join((function.__doc__ or found["name"]).split()),
        outcome=worst.outcome,
        reason=reason.encode(errors="backslashreplace").decode(),
        where=where,
        seconds=sum(report.duration for report in reports),
    )


def _reason(report: pytest.TestReport) -> tuple[str, str]:
    """Return in one line why a test was skipped or failed, and where."""
    if report.outcome == "passed":
        return "", ""
    if isinstance(report.longrepr, tuple):
        return report.longrepr[2].removeprefix("Skipped: "), ""
    crash = getattr(report.longrepr, "reprcrash", None)
    if crash is None:
        lines = str(report.longrepr).strip().splitlines()
        return (lines[-1] if lines else "it failed without a word"), ""
    return crash.message.strip().partition("\n")[0][:_LONGEST], f"{crash.path}:{crash.lineno}"
