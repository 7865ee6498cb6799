"""Runs the suites for installed plugins, each in a process of its own, and collects the result of every promise.

A backend or a layout that hangs or takes its process down is a broken promise like any other: the
others are run, and the one under way is named.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import IO, Literal

import attrs
from topicstore.plugins import load_target, registry

from topicstore_conformance.conditions.directories import quick_directory
from topicstore_conformance.conditions.modes import VARIABLE
from topicstore_conformance.faults.threads import PATIENCE
from topicstore_conformance.subjects.pairs import (
    Pair,
    backend_for,
    backends_under,
    covering,
    layouts_on,
    pair_of,
    pairs,
)

from .outcomes import Outcome, Record, decode

__all__ = ["LIMIT", "Mode", "Plan", "Run", "everything", "plans_for", "run_all"]

LIMIT = 3 * PATIENCE
"""The seconds of silence after which a process is taken for stuck: more than any test waits by itself."""
CORES = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
SIDE_BY_SIDE = min(4, CORES)
"""The number of processes that run at a time: each needs one of the cores that this process may use."""
_INI = Path(__file__).parents[1] / "installed" / "pytest.ini"
_LAST_LINES = 15

Suite = Literal["backend", "layout", "database"]
Mode = Literal["quick", "full"]


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


@attrs.frozen(kw_only=True)
class Run:
    """The result of a plan."""

    plan: Plan
    outcomes: tuple[Outcome, ...]
    seconds: float
    failure: str = ""
    """The reason why the run didn't come to its end, if it didn't."""

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
    """Run all plans, some in parallel, the longest first; return the runs in the order of their plans."""
    wanted = list(plans)
    stop, waking = os.pipe()
    runs: dict[Plan, Run] = {}
    try:
        with ThreadPoolExecutor(SIDE_BY_SIDE) as threads:
            begun = [threads.submit(_run, plan, stop) for plan in sorted(wanted, key=_shortness)]
            try:
                for future in as_completed(begun):
                    runs[future.result().plan] = future.result()
                    done(future.result())
            except BaseException:
                os.write(waking, b"x")  # the byte is never read: it wakes all that wait
                for future in begun:
                    future.cancel()
                raise
    finally:
        os.close(stop)
        os.close(waking)
    return [runs[plan] for plan in wanted]


def _shortness(plan: Plan) -> tuple[bool, bool, bool, bool]:
    persistent = "persistent" in plan.capabilities
    return plan.mode != "full", not plan.seldom, plan.suite != "database", not persistent


def _run(plan: Plan, stop: int) -> Run:
    """Run one suite; end it if it is silent too long, or when ``stop`` becomes readable."""
    began = time.monotonic()
    reading, writing = os.pipe()
    with quick_directory() as directory, Path(directory, "output").open("w+b") as output:
        child = _start(plan, writing, Path(directory), output)
        os.close(writing)
        records: list[Record] = []
        finished = False
        try:
            finished = _listen(reading, stop, records)
        finally:
            os.close(reading)
            _end(child, PATIENCE if finished else 0)
        outcomes = tuple(record for record in records if isinstance(record, Outcome))
        failure = _failure(child.returncode, finished, records, output)
    return Run(plan=plan, outcomes=outcomes, seconds=time.monotonic() - began, failure=failure)


def _start(plan: Plan, descriptor: int, directory: Path, output: IO[bytes]) -> subprocess.Popen[bytes]:
    command = [
        sys.executable,
        "-P",
        "-m",
        "pytest",
        "--tb=line",
        "-c",
        str(_INI),
        "-p",
        "topicstore_conformance.runner.plugin",
    ]
    command += [
        "-p",
        "topicstore_conformance.runner.reporting",
        f"--report-to={descriptor}",
        f"--basetemp={directory}/pytest",
    ]
    command += ["--pyargs", f"topicstore_conformance.installed.test_{plan.suite}"]
    command += [f"--backend={plan.backend}"] if plan.backend else []
    command += [f"--layout={plan.layout}"] if plan.layout else []
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    environment |= {
        VARIABLE: plan.mode,
        "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
        "TMPDIR": str(directory),  # the temporary files of a killed process are removed with its directory
        "HYPOTHESIS_STORAGE_DIRECTORY": str(directory / "hypothesis"),
    }
    return subprocess.Popen(
        command,
        cwd=directory,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=subprocess.STDOUT,
        pass_fds=[descriptor],
        start_new_session=True,
    )


def _listen(reading: int, stop: int, records: list[Record]) -> bool:
    """Collect a process's records; return whether it came to its end before it was silent too long or to be stopped."""
    heard = b""
    with selectors.DefaultSelector() as selector:
        selector.register(reading, selectors.EVENT_READ)
        selector.register(stop, selectors.EVENT_READ)
        while ready := selector.select(LIMIT):
            if any(key.fd == stop for key, _ in ready):
                return False
            data = os.read(reading, 65_536)
            if not data:
                return True
            *lines, heard = (heard + data).split(b"\n")
            records += map(decode, lines)
    return False


def _end(child: subprocess.Popen[bytes], patience: float) -> None:
    """Give a process that has reported everything a moment to end; kill the rest, its children too."""
    with contextlib.suppress(subprocess.TimeoutExpired):
        child.wait(patience)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child.pid, signal.SIGKILL)
    child.wait()


def _failure(code: int, finished: bool, records: Sequence[Record], output: IO[bytes]) -> str:
    """Return why a process didn't come to its end, or an empty text if it ran its tests, passed or failed."""
    if code in (0, 1) and records:
        return ""
    under_way = f", in {records[-1].test}" if records and not isinstance(records[-1], Outcome) else ""
    if not finished:
        return f"nothing was heard for {LIMIT:.0f} seconds{under_way}"
    if code < 0:
        return f"the process was killed by signal {-code}{under_way}"
    output.seek(0)
    last = output.read().decode(errors="replace").strip().splitlines()[-_LAST_LINES:]
    return "\n".join([f"pytest ended with code {code}{under_way}", *last])
