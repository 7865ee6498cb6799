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
from collections.abc import Callable, Generator, Iterable
from pathlib import Path
from typing import Any

import attrs
import pytest
from topicstore_conformance.faults.threads import PATIENCE

HERE = Path(__file__).parent
EVERYTHING = "SABOTAGE_EVERYTHING"
"""Set to something, each saboteur meets its whole suite."""
SHORT = 1.0
"""Seconds of patience with what is known to be stuck."""


@attrs.frozen
class Saboteur:
    """A plugin that is right but for one promise."""

    name: str
    what: str
    """What it does wrong."""
    promise: str
    """The test, as ``Class.function``, that must fail."""
    subject: Callable[[], Any]
    whole: bool = False
    """It meets the whole suite, not only the test that must fail."""
    stuck: str = ""
    """What that test waits for in vain. It never meets more, and is waited for but a moment.

    A moment is too short for others too, now and then, so the test must fail of just this wait.
    """

    @property
    def test(self) -> str:
        """Return the name of the test that must fail."""
        return self.promise.partition(".")[2]

    @property
    def meets_all(self) -> bool:
        """Say whether it meets the whole suite in this run."""
        return self.whole or (bool(os.environ.get(EVERYTHING)) and not self.stuck)


def suites_of(suite: type, saboteurs: Iterable[Saboteur], fixture: str = "subject") -> dict[str, type]:
    """Return a class of tests a saboteur, to be put into a module that pytest collects; ``fixture`` makes it."""
    made = {}
    for saboteur in saboteurs:

        def subject(_: object, saboteur: Saboteur = saboteur) -> Any:
            return saboteur.subject()

        kind = next(kind for kind in suite.__mro__ if kind.__name__ == saboteur.promise.partition(".")[0])
        bases = (suite if saboteur.meets_all else kind,)
        made[f"Test{saboteur.name}"] = type(f"Test{saboteur.name}", bases, {fixture: pytest.fixture(subject)})
    return made


class Collector:
    """Chooses the tests that each saboteur meets, and notes how they ended."""

    def __init__(self, saboteurs: Iterable[Saboteur]) -> None:
        self.saboteurs = {f"Test{saboteur.name}": saboteur for saboteur in saboteurs}
        self.ended: dict[str, dict[str, str]] = {}
        self.mistakes: dict[str, str] = {}

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
        """Note which tests failed of a mistake in the saboteur itself, such as a method that has another name now."""
        report = yield
        if call.excinfo is not None and call.excinfo.errisinstance((AttributeError, NameError, TypeError)):
            raised_in = call.excinfo.traceback[-1].path
            if Path(raised_in).parent == HERE:
                self.mistakes[report.nodeid] = call.excinfo.exconly()
        return report

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Note what a test's setting up or its call came to; of several of one name, the worst."""
        _, name, test = report.nodeid.split("::")
        ended, function = self.ended.setdefault(self.saboteurs[name].name, {}), test.partition("[")[0]
        stuck = self.saboteurs[name].stuck
        if report.failed and report.nodeid in self.mistakes:
            ended[function] = f"the saboteur is mistaken: {self.mistakes[report.nodeid]}"
        elif stuck and report.failed and f"waited {SHORT:.0f} seconds for {stuck}" not in report.longreprtext:
            ended.setdefault(function, f"failed, but not waiting for {stuck}: {report.longreprtext}")
        elif report.failed or (ended.get(function) != "failed" and (report.when == "call" or report.skipped)):
            ended[function] = report.outcome


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
