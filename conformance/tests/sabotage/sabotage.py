"""Runs a suite against saboteurs, each of which breaks one promise, and tells which tests failed.

A program: ``python sabotage.py MODULE RESULTS`` runs the saboteurs of a module beside this one in
one process of pytest, because beginning one takes longer than most runs, and writes JSON.
"""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
import traceback
from collections.abc import Callable, Generator, Iterable
from pathlib import Path
from typing import Any

import attrs
import pytest
import topicstore_conformance
from topicstore_conformance.faults.threads import PATIENCE

HERE = Path(__file__).parent
SUITES = Path(topicstore_conformance.__file__).parent
EVERYTHING = "SABOTAGE_EVERYTHING"
"""Set to something, each saboteur meets its whole suite."""
WORSE = {"skipped": 0, "passed": 1, "failed": 3}
"""How bad an outcome is; an error that is not the suite's comes between the last two."""
SHORT = 1.0
"""Seconds of patience with what is known to be stuck."""


@attrs.frozen
class Saboteur:
    """A plugin that is right but for one promise."""

    name: str
    what: str
    """What it does wrong."""
    promise: str
    """The test, as ``Class.function``, that must fail. Of a control, which breaks nothing, it is empty."""
    subject: Callable[[], Any]
    whole: bool = False
    """It meets the whole suite, not only the test that must fail."""
    stuck: str = ""
    """What that test waits for in vain. It never meets more, and is waited for but a moment.

    A moment is too short for others too, now and then, so the test must fail of just this wait.
    """
    raises: tuple[type[Exception], ...] = ()
    """Errors that the promise rules out: raised by the saboteur, they are how the test must fail."""

    @property
    def test(self) -> str:
        """Return the name of the test that must fail."""
        return self.promise.partition(".")[2]

    @property
    def meets_all(self) -> bool:
        """Say whether it meets the whole suite in this run."""
        return not self.promise or self.whole or (bool(os.environ.get(EVERYTHING)) and not self.stuck)


def asserted(error: BaseException) -> bool:
    """Return whether the suite raised an error: by an assertion, or because something else was not raised."""
    if isinstance(error, BaseExceptionGroup):
        return any(map(asserted, error.exceptions))
    files = [frame.f_code.co_filename for frame, _ in traceback.walk_tb(error.__traceback__)]
    own = [file for file in files if "_pytest" not in Path(file).parts]
    return isinstance(error, AssertionError | pytest.fail.Exception) and Path(own[-1]).is_relative_to(SUITES)


def suites_of(suite: type, saboteurs: Iterable[Saboteur], fixture: str = "subject") -> dict[str, type]:
    """Return a class of tests a saboteur, to be put into a module that pytest collects; ``fixture`` makes it."""
    made = {}
    for saboteur in saboteurs:

        def subject(_: object, saboteur: Saboteur = saboteur) -> Any:
            return saboteur.subject()

        bases = tuple(
            kind for kind in suite.__mro__ if saboteur.meets_all or kind.__name__ == saboteur.promise.partition(".")[0]
        )[:1]
        made[f"Test{saboteur.name}"] = type(f"Test{saboteur.name}", bases, {fixture: pytest.fixture(subject)})
    return made


class Collector:
    """Chooses the tests that each saboteur meets, and notes how they ended."""

    def __init__(self, saboteurs: Iterable[Saboteur]) -> None:
        self.saboteurs = {f"Test{saboteur.name}": saboteur for saboteur in saboteurs}
        self.ended: dict[str, dict[str, str]] = {}
        self.strangers: dict[str, str] = {}

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        """Leave out what a saboteur is not to meet."""
        items[:] = [item for item in items if self._chosen(*item.nodeid.split("::")[1:])]

    def _chosen(self, name: str, test: str) -> bool:
        saboteur = self.saboteurs[name]
        return saboteur.meets_all or test.partition("[")[0] == saboteur.test

    def pytest_runtest_setup(self, item: pytest.Item) -> None:
        """Wait only a moment for what is known to be stuck."""
        patience = SHORT if self.saboteurs[item.nodeid.split("::")[1]].stuck else PATIENCE
        for name, module in list(sys.modules.items()):
            if name.startswith("topicstore_conformance.") and hasattr(module, "PATIENCE"):
                vars(module)["PATIENCE"] = patience

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(
        self, item: pytest.Item, call: pytest.CallInfo[None]
    ) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        """Note which tests failed of an error that is neither the suite's own nor one that the promise rules out."""
        report = yield
        raises = self.saboteurs[item.nodeid.split("::")[1]].raises
        if call.excinfo is not None and not (asserted(call.excinfo.value) or isinstance(call.excinfo.value, raises)):
            self.strangers[report.nodeid] = call.excinfo.exconly()
        return report

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Note what a test's setting up or its call came to; of several of one name, the worst."""
        _, name, test = report.nodeid.split("::")
        ended, function = self.ended.setdefault(self.saboteurs[name].name, {}), test.partition("[")[0]
        stuck, outcome = self.saboteurs[name].stuck, str(report.outcome)
        if report.failed and report.nodeid in self.strangers:
            outcome = f"failed, but not of an assertion: {self.strangers[report.nodeid]}"
        elif stuck and report.failed and f"waited {SHORT:.0f} seconds for {stuck}" not in report.longreprtext:
            outcome = f"failed, but not waiting for {stuck}: {report.longreprtext}"
        if report.when == "call" or outcome != "passed":
            ended[function] = max(ended.get(function, "skipped"), outcome, key=lambda how: WORSE.get(how, 2))


def run(module: str, directory: Path) -> dict[str, dict[str, str]]:
    """Run a module's saboteurs in a child process; return how each test of each ended."""
    results = directory / "results.json"
    path = os.pathsep.join([str(HERE), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = {**os.environ, "TOPICSTORE_CONFORMANCE": "quick", "PYTHONPATH": path}
    environment.pop("TOPICSTORE_HYPOTHESIS", None)  # with few random examples, luck would decide what is found
    command = [sys.executable, str(HERE / "sabotage.py"), module, str(results)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert results.is_file(), done.stdout[-3000:] + done.stderr[-3000:]
    ended: dict[str, dict[str, str]] = json.loads(results.read_text())
    return ended


def main(arguments: list[str]) -> None:
    """Be the child."""
    module, results = arguments
    collector = Collector(importlib.import_module(module).SABOTEURS)
    options = ["-q", "--tb=no", "-p", "no:cacheprovider", "-p", "no:randomly", "-W", "ignore", "-o", "addopts="]
    pytest.main([*options, "--import-mode=prepend", str(HERE / f"{module}.py")], plugins=[collector])
    Path(results).write_text(json.dumps(collector.ended))
    sys.stdout.flush()
    os._exit(0)  # threads that are stuck keep nobody waiting


if __name__ == "__main__":
    main(sys.argv[1:])
