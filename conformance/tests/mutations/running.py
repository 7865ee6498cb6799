"""Runs a suite's tests, each with a mutation that it must find, and records the outcomes.

As a program, ``python running.py TABLE RESULTS`` runs the mutations of a table, a module beside this one, and writes
the outcomes as JSON. It uses one pytest process, because starting one takes longer than most tests.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import json
import os
import subprocess
import sys
import traceback
from collections.abc import Callable, Generator, Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import attrs
import pytest
import topicstore_conformance
from changes import Change
from topicstore_conformance.faults.threads import PATIENCE

HERE = Path(__file__).parent
SUITES = Path(topicstore_conformance.__file__).parent
VARIABLE = "MUTATION"
"""The environment variable that names the mutation of child processes."""
SHORT = 1.0
"""The timeout, in seconds, of waits that are expected to time out."""
WORSE = {"skipped": 0, "passed": 1, "failed": 3}
"""The outcomes by rank; an error that is not the suite's ranks 2."""


@attrs.frozen
class M:
    """A mutation: a description, the test that must find it, and the change of each method, by ``Class.method``.

    A row without changes is a control: every test that the subject's other rows name must pass for the control.
    """

    what: str
    promise: str
    changes: dict[str, Change]
    on: str = "memory"
    """The name of the subject whose methods are changed."""
    declares: str = ""
    """Capabilities that the subject falsely declares."""
    waits: str = ""
    """The event, as named in the test's error message, whose wait times out; its timeout is `SHORT`."""
    brief: bool = False
    """Whether the test, once it has failed, waits until a timeout, which is therefore `SHORT`."""
    raises: type[Exception] | tuple[type[Exception], ...] = ()
    """Errors of the mutation with which the test may fail, besides assertions, because its guarantee excludes them."""


# --- changing methods ------------------------------------------------------------------------


def changed(function: Callable[..., Any], change: Change, *, method: bool) -> Callable[..., Any]:
    """Return a function with a change applied; ``method`` says whether its first argument is the object."""
    signature = inspect.signature(function)

    @functools.wraps(function)
    def instead(*arguments: Any, **named: Any) -> Any:
        bound = signature.bind(*arguments, **named)
        bound.apply_defaults()
        given = dict(bound.arguments)
        me = given.pop(next(iter(given))) if method else None

        def call(**others: Any) -> Any:
            again = signature.bind(*arguments, **named)
            again.apply_defaults()
            again.arguments.update(others)
            return function(*again.args, **again.kwargs)

        return change(call, me, given)

    @functools.wraps(function)
    def generating(*arguments: Any, **named: Any) -> Any:
        return (yield from instead(*arguments, **named))

    hook = hasattr(function, "topicstore_impl") and inspect.isgeneratorfunction(function)
    return generating if hook else instead  # pluggy accepts only a generator function as a wrapper


def mutate(patch: pytest.MonkeyPatch, table: ModuleType, row: M) -> None:
    """Apply a row's changes to the methods that it names."""
    for target, change in row.changes.items():
        owner, name = target.split(".")
        owners = getattr(table, owner)
        for kind in owners if isinstance(owners, tuple) else (owners,):
            found = inspect.getattr_static(kind, name)
            made = changed(getattr(found, "__func__", found), change, method=inspect.isclass(kind))
            patch.setattr(kind, name, classmethod(made) if isinstance(found, classmethod) else made)


def begin_mutated(name: str) -> None:
    """Apply the mutation ``TABLE NUMBER`` in this process permanently, after the table's function ``prepare``, if any."""
    module, _, number = name.partition(" ")
    table = importlib.import_module(module)
    if hasattr(table, "prepare"):
        table.prepare()
    mutate(pytest.MonkeyPatch(), table, table.ROWS[int(number)])


def forwarding(contract: type, **own: Any) -> type:
    """Return an implementation of a contract that forwards all calls to another one, ``inner``."""

    def forward(name: str) -> Callable[..., Any]:
        @functools.wraps(getattr(contract, name))
        def method(me: Any, *arguments: Any, **named: Any) -> Any:
            return getattr(me.inner, name)(*arguments, **named)

        vars(method).pop("__isabstractmethod__", None)
        return method

    def init(me: Any, inner: Any, **more: Any) -> None:
        vars(me).update(inner=inner, **more)

    methods = [name for name, _ in inspect.getmembers(contract, inspect.isfunction) if not name.startswith("_")]
    return type(
        f"Forwarding{contract.__name__}", (contract,), {"__init__": init, **{m: forward(m) for m in methods}, **own}
    )


# --- the tests of a run ----------------------------------------------------------------------


def suites_of(
    table: str, suite: type, rows: Sequence[M], subject: Callable[[M], Any], fixture: str = "subject"
) -> dict[str, type]:
    """Return a test class for each row, by name; the caller puts them into a module that pytest collects."""
    made = {}
    for number, row in enumerate(rows):

        def mutated(me: object, number: int = number, row: M = row) -> Iterator[Any]:
            with pytest.MonkeyPatch.context() as patch:
                patch.setenv(VARIABLE, f"{table} {number}")
                mutate(patch, importlib.import_module(table), row)
                yield subject(row)

        defined = getattr(suite, row.promise).__qualname__.partition(".")[0] if row.promise else ""
        kind = next((kind for kind in suite.__mro__ if kind.__name__ == defined), suite)
        made[f"Test{number}"] = type(f"Test{number}", (kind,), {fixture: pytest.fixture(mutated)})
    return made


def asserted(error: BaseException) -> bool:
    """Return whether an error comes from the suite itself: an assertion, or a missing expected error."""
    if isinstance(error, BaseExceptionGroup):
        return any(map(asserted, error.exceptions))
    files = [frame.f_code.co_filename for frame, _ in traceback.walk_tb(error.__traceback__)]
    own = [file for file in files if "_pytest" not in Path(file).parts]
    return isinstance(error, AssertionError | pytest.fail.Exception) and Path(own[-1]).is_relative_to(SUITES)


class Collector:
    """A pytest plugin that selects the tests to run for each mutation, and records their outcomes."""

    def __init__(self, rows: Sequence[M]) -> None:
        self.rows = rows
        self.ended: dict[int, dict[str, str]] = {}
        self.strangers: dict[str, str] = {}

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        """Remove tests that are not to be run for their mutation."""
        items[:] = [item for item in items if self._meets(*self._parts(item.nodeid))]

    def _parts(self, nodeid: str) -> tuple[int, str]:
        _, name, test = nodeid.split("::")
        return int(name.removeprefix("Test")), test.partition("[")[0]

    def _meets(self, number: int, test: str) -> bool:
        row = self.rows[number]
        return test == row.promise or (not row.promise and any((test, row.on) == (m.promise, m.on) for m in self.rows))

    def pytest_runtest_setup(self, item: pytest.Item) -> None:
        """Set a short timeout for tests that are known to hang with their mutation."""
        row = self.rows[self._parts(item.nodeid)[0]]
        patience = SHORT if row.waits or row.brief else PATIENCE
        for name, module in list(sys.modules.items()):
            if name.startswith("topicstore_conformance.") and hasattr(module, "PATIENCE"):
                vars(module)["PATIENCE"] = patience

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(
        self, item: pytest.Item, call: pytest.CallInfo[None]
    ) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        """Record tests that failed with an error that neither comes from the suite nor is allowed for this mutation."""
        report = yield
        raises = self.rows[self._parts(item.nodeid)[0]].raises
        if call.excinfo is not None and not (asserted(call.excinfo.value) or isinstance(call.excinfo.value, raises)):
            self.strangers[report.nodeid] = f"{call.excinfo.exconly()} {call.excinfo.traceback[-1]}"
        return report

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Record the outcome of a test's setup and call; if a test has several cases, record the worst outcome."""
        number, test = self._parts(report.nodeid)
        ended, waits, outcome = self.ended.setdefault(number, {}), self.rows[number].waits, str(report.outcome)
        if report.failed and report.nodeid in self.strangers:
            outcome = f"failed, but not of an assertion: {self.strangers[report.nodeid]}"
        elif waits and report.failed and waits not in report.longreprtext:
            outcome = f"failed, but not waiting for {waits}: {report.longreprtext}"
        if report.when == "call" or outcome != "passed":
            ended[test] = max(ended.get(test, "skipped"), outcome, key=lambda how: WORSE.get(how, 2))


def run(table: str, directory: Path) -> list[dict[str, str]]:
    """Run a table's mutations in a child process; return the outcomes by test for each row."""
    results = directory / "results.json"
    path = os.pathsep.join([str(HERE), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = {**os.environ, "TOPICSTORE_CONFORMANCE": "quick", "PYTHONPATH": path}
    environment.pop("TOPICSTORE_HYPOTHESIS", None)  # with few random examples, outcomes would vary between runs
    command = [sys.executable, str(HERE / "running.py"), table, str(results)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert results.is_file(), done.stdout[-3000:] + done.stderr[-3000:]
    ended: list[dict[str, str]] = json.loads(results.read_text())
    return ended


def main(table: str, results: str) -> None:
    """Run a table's mutations in this child process, and write the outcomes."""
    rows = importlib.import_module(table).ROWS
    collector = Collector(rows)
    options = ["-q", "--tb=no", "-p", "no:cacheprovider", "-p", "no:randomly", "-W", "ignore", "-o", "addopts="]
    pytest.main([*options, "--import-mode=prepend", str(HERE / f"{table}.py")], plugins=[collector])
    Path(results).write_text(json.dumps([collector.ended.get(number, {}) for number in range(len(rows))]))
    sys.stdout.flush()
    os._exit(0)  # ends the process without waiting for threads that hang


if __name__ == "__main__":
    main(*sys.argv[1:])
