"""Runs the suites for installed plugins in processes of pytest-xdist, and collects the result of every test.

A test that hangs or crashes its process counts as failed, and another process continues with the remaining tests.
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
from topicstore_conformance.broker.suite import BrokerSuite
from topicstore_conformance.conditions.directories import quick_directory
from topicstore_conformance.conditions.modes import VARIABLE
from topicstore_conformance.database.suite import DatabaseSuite
from topicstore_conformance.faults.threads import PATIENCE
from topicstore_conformance.layout.suite import LayoutSuite
from topicstore_conformance.mqtt.statements import statements_of
from topicstore_conformance.parts.suite import DatabasePartsSuite
from topicstore_conformance.plugins.suite import PluginSuite
from topicstore_conformance.runner.smoke import first_causes
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
"""The timeout of a test in seconds, which is longer than any wait within a test."""
_CRASHES = 2
"""The number of crashed or hung processes that are replaced before the run ends."""
_ENDED_EARLY = "it ended at the first failure"
_INI = Path(__file__).parents[1] / "installed" / "pytest.ini"
_LONGEST = 500
"""The maximum length of a reason in characters, because it may show large values."""
_LINES = 40
"""The maximum number of lines of a history."""
_EXAMPLE = re.compile("(Falsifying example|Failing test case):")
"""The words with which Hypothesis, in its several versions, begins the smallest example."""
_TEST = re.compile(r"test_(?P<suite>\w+)\.py::\w+::(?P<test>(?P<name>\w+)\[(?P<case>.*)\])$", re.DOTALL)

Suite = Literal["backend", "layout", "database", "parts", "plugins", "broker"]
Mode = Literal["quick", "full"]
SUITES: dict[Suite, type] = {
    "backend": BackendSuite,
    "layout": LayoutSuite,
    "database": DatabaseSuite,
    "parts": DatabasePartsSuite,
    "plugins": PluginSuite,
    "broker": BrokerSuite,
}


@attrs.frozen(kw_only=True)
class Plan:
    """One suite to run."""

    suite: Suite
    backend: str = ""
    layout: str = ""
    plugins: tuple[str, ...] = ()
    """The plugins to test, outermost first."""
    broker: str = ""
    """The address of a broker, as ``HOST:PORT``, of the suite ``broker``."""
    mode: Mode

    def __str__(self) -> str:
        if self.broker:
            return self.broker
        return "+".join(("-".join(name for name in (self.backend, self.layout) if name), *self.plugins))

    @property
    def capabilities(self) -> list[str]:
        """Return the capabilities that the tested plugins declare, sorted."""
        declared: frozenset[str] = frozenset()
        if self.backend:
            declared |= registry().backend(self.backend).capabilities
        if self.layout:
            declared |= registry().layout(self.layout).capabilities
        return sorted(declared)

    @property
    def seldom(self) -> bool:
        """Whether tests with random data try fewer examples, because the backend lacks ``fast_seek``.

        See `conditions.tries`.
        """
        if self.broker:
            return False
        backend = self.backend or backend_for(self.layout)
        return "fast_seek" not in registry().backend(backend).capabilities


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """The result of a test."""

    group: str
    """The module of the test, such as ``compaction``."""
    test: str
    """The name of the test, with the case in brackets."""
    promise: str
    """The docstring of the test, which states the guarantee that it tests."""
    statements: tuple[str, ...] = ()
    """The numbers of the statements of MQTT that it tests, such as ``3.1.0-1``."""
    outcome: str
    """The result: ``passed``, ``failed`` or ``skipped``."""
    reason: str = ""
    """The reason why the test was skipped, or in one line how it failed."""
    where: str = ""
    """The file and line of the failure."""
    history: str = ""
    """The smallest history, or the smallest example, with which a test with random data failed; several lines."""
    seconds: float


@attrs.frozen(kw_only=True)
class Run:
    """The result of a plan."""

    plan: Plan
    outcomes: tuple[Outcome, ...]
    failure: str = ""
    """The reason why the run is incomplete, or an empty text."""
    first: str = ""
    """The step and the cause of a failure before the tests, or an empty text."""

    @property
    def seconds(self) -> float:
        """Return the total duration of the run's tests in seconds, over all processes."""
        return sum(outcome.seconds for outcome in self.outcomes)

    def of(self, outcome: str) -> list[Outcome]:
        """Return the tests that ``passed``, ``failed`` or were ``skipped``."""
        return [one for one in self.outcomes if one.outcome == outcome]

    @property
    def kept(self) -> bool:
        """Whether the run is complete and no test failed."""
        return not self.failure and not self.of("failed")


# --- what to run --------------------------------------------------------------------------------


def plans_for(backend: str | None, layout: str | None, mode: Mode) -> list[Plan]:
    """Return the plans for a backend, a layout, and databases made of both.

    If one name is missing, databases are made with all compatible plugins of that kind.

    Raises `UnknownPluginError`, `IncompatibleError`, `BackendUnavailableError` or `PluginError`.
    """
    plans = [plan for pair in _pairs_of(backend, layout) for plan in _databases(pair, mode)]
    if backend is not None:
        plans.append(Plan(suite="backend", backend=backend, mode=mode))
    if layout is not None:
        plans.append(Plan(suite="layout", layout=layout, mode=mode))
    return plans


def transform_plans(plugins: Sequence[str], backend: str | None, layout: str | None, mode: Mode) -> list[Plan]:
    """Return the plans for plugins that transform messages, which are used together, outermost first.

    They are tested on the pairs of the named backend and layout, by default on the pair that `topicstore.open` uses.

    Raises the errors of `plans_for`, and `UnknownPluginError` for an unknown plugin.
    """
    chosen = [pair_of("rocksdb", "block")] if backend is None and layout is None else _pairs_of(backend, layout)
    names = tuple(plugins)
    return [
        Plan(suite="plugins", backend=pair.backend, layout=pair.layout, plugins=names, mode=mode)
        for pair in (pair_of(pair.backend, pair.layout, plugins=names) for pair in chosen)
    ]


def _pairs_of(backend: str | None, layout: str | None) -> list[Pair]:
    """Return the pair of two names, or all pairs with one name. Raises the errors of `plans_for`."""
    if backend is not None:
        load_target(registry().backend(backend))
    if layout is not None:
        load_target(registry().layout(layout))
    if backend is not None and layout is not None:
        return [pair_of(backend, layout)]
    if backend is not None:
        return [pair_of(backend, name) for name in layouts_on(backend)]
    return [pair_of(name, str(layout)) for name in backends_under(str(layout))]


def everything(mode: Mode) -> list[Plan]:
    """Return the plans for all installed plugins and compatible pairs.

    In the full mode a minimal set of pairs that covers every backend and layout is tested fully, all others quickly.
    """
    every = pairs()
    whole = covering() if mode == "full" else []
    plans = [plan for pair in every for plan in _databases(pair, "full" if pair in whole else "quick")]
    plans += [Plan(suite="backend", backend=name, mode=mode) for name in sorted({pair.backend for pair in every})]
    plans += [Plan(suite="layout", layout=name, mode=mode) for name in sorted({pair.layout for pair in every})]
    return plans


def _databases(pair: Pair, mode: Mode) -> list[Plan]:
    """Return the plans for databases of a pair, and for the parts of such databases."""
    suites: tuple[Suite, ...] = ("database", "parts")
    return [Plan(suite=suite, backend=pair.backend, layout=pair.layout, mode=mode) for suite in suites]


# --- running it ---------------------------------------------------------------------------------


def run_all(
    plans: Iterable[Plan], done: Callable[[Run], object] = lambda _: None, *, first_failure: bool = False
) -> list[Run]:
    """Run all plans, the plans of each mode in one run of pytest; return the runs in the order of the plans.

    A plan whose plugins fail the first step of `smoke` has no tests. All plans for plugins must have the same plugins.

    done: a function called with each run as soon as its tests have ended.
    first_failure: whether the run ends at the first failed test.
    """
    wanted = list(plans)
    causes = first_causes([_named(plan) for plan in wanted], LIMIT)
    runs: dict[Plan, Run] = {}
    for plan in wanted:
        if cause := causes[_named(plan)]:
            runs[plan] = Run(plan=plan, outcomes=(), failure=f"its first step failed: {cause}", first=cause)
            done(runs[plan])
    for mode in ("full", "quick"):
        some = [plan for plan in wanted if plan.mode == mode and plan not in runs]
        if some and not (first_failure and not all(run.kept for run in runs.values())):
            runs.update(_run(some, done, first_failure=first_failure))
    return [runs.get(plan) or Run(plan=plan, outcomes=(), failure=_ENDED_EARLY) for plan in wanted]


def _named(plan: Plan) -> str:
    """Return a plan's name as `smoke` reads it."""
    return f"{plan.suite}:{plan.broker or f'{plan.backend}:{plan.layout}'}"


class _Collector:
    """A pytest plugin that collects the results of all processes."""

    def __init__(self, plans: Sequence[Plan], done: Callable[[Run], object]) -> None:
        self._plans = {(plan.suite, str(plan)): plan for plan in plans}
        self._done = done
        self._reports: dict[str, list[pytest.TestReport]] = {}
        self.left: dict[Plan, set[str]] = {}
        """The tests that have not ended, by plan."""
        self.outcomes: dict[Plan, list[Outcome]] = {plan: [] for plan in plans}
        self.failure = ""

    def pytest_xdist_node_collection_finished(self, ids: Sequence[str]) -> None:
        """Record the collected tests of the first process; all processes collect the same."""
        for test in () if self.left else ids:
            plan = self._plan_of(test)
            if plan is not None:
                self.left.setdefault(plan, set()).add(test)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        """Record the error if the tests could not be collected."""
        if report.failed:
            self.failure = str(report.longrepr)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Collect a test's reports of setup, call and teardown; a crashed process yields a single failure report."""
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
        """Return the plan of a test: the one with the longest name that is a prefix of the test's case."""
        found = _TEST.search(test)
        if found is None:
            return None
        names = (f"{name}-" for (suite, name) in self._plans if suite == found["suite"])
        longest = max((name for name in names if f"{found['case']}-".startswith(name)), key=len, default="")
        return self._plans.get((found["suite"], longest.removesuffix("-")))  # type: ignore[arg-type]


def _run(plans: Sequence[Plan], done: Callable[[Run], object], *, first_failure: bool) -> Iterator[tuple[Plan, Run]]:
    """Run suites of one mode, and yield their results."""
    collector = _Collector(plans, done)
    with quick_directory() as directory, _environment(plans[0].mode, directory), _silence():
        code = pytest.main(
            [*_arguments(plans), *["--maxfail=1"] * first_failure, f"--basetemp={directory}/pytest"],
            plugins=[collector],
        )
    early = first_failure and any(one.outcome == "failed" for some in collector.outcomes.values() for one in some)
    whole = early or code in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED)
    failure = collector.failure or ("" if whole else f"pytest ended with code {int(code)}")
    for plan, outcomes in collector.outcomes.items():
        left = len(collector.left.get(plan, ()))
        short = "" if outcomes and not left else f"{left or 'all'} tests were not run"
        short = f"{_ENDED_EARLY}: {short}" if short and early else short
        yield plan, Run(plan=plan, outcomes=tuple(outcomes), failure=failure or short)


def _arguments(plans: Sequence[Plan]) -> list[str]:
    modules = sorted({f"topicstore_conformance.installed.test_{plan.suite}" for plan in plans})
    names = {suite: ",".join(str(plan) for plan in plans if plan.suite == suite) for suite in SUITES}
    return [
        *("-c", str(_INI), "-p", "topicstore_conformance.runner.plugin"),
        *("-p", "xdist.plugin", "-p", "pytest_timeout", "--tb=line"),
        # The cases of a broker are tried one after the other, so that a fault in one doesn't affect the others.
        *("-n", "1" if any(plan.broker for plan in plans) else str(_cores())),
        *("--dist=worksteal", f"--max-worker-restart={_CRASHES}"),
        *(f"--timeout={LIMIT}", "--timeout-method=thread"),
        *(f"--only-{suite}={some}" for suite, some in names.items() if some),
        *(f"--plugins={','.join(plugins)}" for plugins in {plan.plugins for plan in plans} if plugins),
        *("--pyargs", *modules),
    ]


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@contextmanager
def _environment(mode: Mode, directory: str) -> Iterator[None]:
    """Set the environment of the test processes: the mode, temporary files in ``directory``, and no other plugins."""
    with pytest.MonkeyPatch.context() as patch:
        for name in [name for name in os.environ if name.startswith("PYTEST_")]:
            patch.delenv(name)
        patch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
        patch.setenv("OPENBLAS_NUM_THREADS", "1")  # avoids NumPy threads that no test uses
        patch.setenv(VARIABLE, mode)
        patch.setenv("TMPDIR", directory)
        patch.setenv("HYPOTHESIS_STORAGE_DIRECTORY", f"{directory}/hypothesis")
        yield


@contextmanager
def _silence() -> Iterator[None]:
    """Discard pytest's output, because the collector has the results."""
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
        statements=statements_of(function),
        outcome=worst.outcome,
        reason=reason.encode(errors="backslashreplace").decode(),
        where=where,
        history=_history(worst) if worst.outcome == "failed" else "",
        seconds=sum(report.duration for report in reports),
    )


def _reason(report: pytest.TestReport) -> tuple[str, str]:
    """Return one line that says why a test was skipped or failed, and the file and line of the failure."""
    if report.outcome == "passed":
        return "", ""
    if isinstance(report.longrepr, tuple):
        return report.longrepr[2].removeprefix("Skipped: "), ""
    crash = getattr(report.longrepr, "reprcrash", None)
    if crash is None:
        lines = str(report.longrepr).strip().splitlines()
        return (lines[-1] if lines else "it failed without a word"), ""
    return crash.message.strip().partition("\n")[0][:_LONGEST], f"{crash.path}:{crash.lineno}"


def _history(report: pytest.TestReport) -> str:
    """Return the smallest example that Hypothesis found and printed, or an empty text."""
    lines = report.longreprtext.splitlines()
    first = next((at for at, line in enumerate(lines) if _EXAMPLE.search(line)), len(lines))
    told = [line.removeprefix("E").strip(" ") for line in lines[first + 1 :]]
    ends = [at for at, line in enumerate(told) if not line or line.startswith("You can reproduce")]
    shown = [line[:_LONGEST] for line in told[: ends[0] if ends else None]]
    return "\n".join(shown[:_LINES] + ["…"] * (len(shown) > _LINES))
