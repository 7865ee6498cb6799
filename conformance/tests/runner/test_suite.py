"""The suites themselves: they pass for a correct plugin, and report the faults of others."""

from __future__ import annotations

import contextlib
import itertools
import os
import re
import subprocess
import sys
import textwrap
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from hypothesis import settings
from hypothesis.stateful import run_state_machine_as_test
from topicstore.contract.engine import DATA
from topicstore_backends.memory import MemoryEngine
from topicstore_conformance import (
    BackendSuite,
    BrokerSuite,
    DatabasePartsSuite,
    DatabaseSuite,
    LayoutSuite,
    PluginSuite,
)
from topicstore_conformance.backend.histories import EngineMachine
from topicstore_conformance.conditions.profiles import MACHINE
from topicstore_conformance.runner import running
from topicstore_conformance.runner.running import Plan, run_all
from topicstore_conformance.subjects.pairs import make_backend, pairs

PACKAGE = Path(running.__file__).parents[1]
SUITES: dict[str, type] = {
    "backend": BackendSuite,
    "layout": LayoutSuite,
    "database": DatabaseSuite,
    "parts": DatabasePartsSuite,
    "plugins": PluginSuite,
    "broker": BrokerSuite,
}


def test_a_good_run() -> None:
    """For a correct layout every test of the suite passes, or is skipped with a reason."""
    layout = min(pairs(), key=lambda pair: ("persistent" in pair.capabilities, pair)).layout
    (run,) = run_all([Plan(suite="layout", layout=layout, mode="quick")])
    assert ("", []) == (run.failure, run.of("failed"))
    assert 0 < len(run.of("passed"))
    assert all(test.reason for test in run.of("skipped"))
    assert all(test.seconds >= 0 for test in run.outcomes)
    assert run.kept
    assert sorted(written("layout")) == sorted({(test.group, test.test.partition("[")[0]) for test in run.outcomes})


def written(suite: str) -> list[tuple[str, str]]:
    """Return the module and name of every test in the source of a suite's modules."""
    modules = sorted((PACKAGE / suite).glob("*.py"))
    return [
        (each.stem, name) for each in modules for name in re.findall(r"^    def (test_\w+)", each.read_text(), re.M)
    ]


def promises(suite: str) -> dict[tuple[str, str], str]:
    """Return the first paragraph of the docstring of every test of a suite's class, by module and name."""
    found = {name: getattr(SUITES[suite], name) for name in dir(SUITES[suite]) if name.startswith("test_")}
    return {
        (test.__module__.rpartition(".")[2], name): " ".join((test.__doc__ or "").partition("\n\n")[0].split())
        for name, test in found.items()
    }


@pytest.mark.parametrize("suite", SUITES)
def test_every_test_is_run(suite: str) -> None:
    """A suite's class contains every test of its modules, and no test hides another one of the same name."""
    assert sorted(written(suite)) == sorted(promises(suite))


@pytest.mark.parametrize("suite", SUITES)
def test_every_promise_is_a_sentence(suite: str) -> None:
    """The docstring of each test of a suite begins with a paragraph of one sentence, which no other test has."""
    said = promises(suite)
    assert [] == [name for name, promise in said.items() if not re.fullmatch(r"\S.*[^.]\.", promise)]
    assert [] == [name for name, promise in said.items() if ". " in promise]
    assert len(said) == len(set(said.values()))


# --- the engine's state machine ----------------------------------------------------------------------


class GoesOn:
    """A snapshot in memory whose scans continue after it was closed, which the contract allows."""

    def __init__(self, engine: MemoryEngine) -> None:
        self.inner = engine.snapshot()

    def scan(self, *arguments: Any, **how: Any) -> Any:
        return self.inner.scan(*arguments, **how)

    def close(self) -> None:
        pass


class StopsShort(GoesOn):
    """A faulty snapshot whose scans end early without an error when it is closed."""

    def scan(self, *arguments: Any, **how: Any) -> Any:
        return itertools.takewhile(lambda _: not self.closed, super().scan(*arguments, **how))

    closed = False

    def close(self) -> None:
        self.closed = True


@pytest.mark.parametrize(("kind", "right"), [(MemoryEngine.snapshot, True), (GoesOn, True), (StopsShort, False)])
def test_the_rest_of_a_scan_whose_snapshot_was_closed(kind: Any, right: bool) -> None:
    """A scan whose snapshot was closed may raise or continue, but the suite fails if it ends early without an error."""
    machine: Any = type("Machine", (EngineMachine,), {"backend": make_backend("memory"), "capabilities": ()})()
    machine.start(([(DATA, [(0, 0, number) for number in range(500)], list(range(500)))], []))
    held = machine.hold(kind(machine.engine))
    scan = machine.begin_scan_of_snapshot(held, (DATA, None, None), reverse=False)
    machine.close_snapshot(held)
    with contextlib.nullcontext() if right else pytest.raises(AssertionError):
        machine.end_scan(scan)
    machine.teardown()


# --- plugins that crash, hang or exit --------------------------------------------------------------


def install(folder: Path, code: str) -> dict[str, str]:
    """Install a distribution with a backend ``bad`` in a folder; return an environment that includes the folder."""
    information = folder / "bad-1.dist-info"
    information.mkdir(parents=True)
    (information / "METADATA").write_text("Metadata-Version: 2.1\nName: bad\nVersion: 1\n")
    (information / "entry_points.txt").write_text("[topicstore]\nbad = bad_plugin\n")
    (folder / "bad_plugin.py").write_text(textwrap.dedent(HEAD) + textwrap.dedent(code))
    path = os.pathsep.join([str(folder), *filter(None, [os.environ.get("PYTHONPATH")])])
    return {**os.environ, "PYTHONPATH": path}


HEAD = """
    import os, sys, threading
    from topicstore import hookimpl
    from topicstore.contract.plugin_specs import BackendSpec
    from topicstore_backends.memory import MemoryBackend

    @hookimpl
    def topicstore_backends():
        return [BackendSpec(name="bad", target="bad_plugin:Bad", summary="bad", capabilities={"fast_seek"})]

"""
RUN = """
import json, sys
from topicstore_conformance.conditions.profiles import MACHINE
from topicstore_conformance.runner import running

running.LIMIT = float(sys.argv[1])
suite, first_failure = sys.argv[2], sys.argv[3] == "True"
layout = "reference" if suite == "database" else ""
plan = running.Plan(suite=suite, backend="bad", layout=layout, mode="quick")
(run,) = running.run_all([plan], first_failure=first_failure)
print(json.dumps({"failure": run.failure, "failed": [[t.promise, t.reason, t.where] for t in run.of("failed")],
                  "tests": len(run.outcomes), "kept": run.kept}))
"""


class Told(msgspec.Struct):
    """The result of a run in a child process."""

    failure: str
    failed: list[tuple[str, str, str]]
    tests: int
    kept: bool


def told(
    environment: dict[str, str], limit: float = running.LIMIT, *, suite: str = "database", first_failure: bool = False
) -> Told:
    """Run a suite with the backend ``bad`` in a child process; return the result."""
    command = [sys.executable, "-c", RUN, str(limit), suite, str(first_failure)]
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, check=True)
    return msgspec.json.decode(done.stdout, type=Told)


def test_a_process_that_dies(tmp_path: Path) -> None:
    """A test whose engine crashes the process counts as failed, and after a few crashes the run ends."""
    code = """
        class Bad(MemoryBackend):
            def open_shard(self, path, keyspaces, *, create):
                if "xdist" in sys.modules:
                    os.kill(os.getpid(), 11)
                return super().open_shard(path, keyspaces, create=create)
    """
    result = told(install(tmp_path, code))
    assert not result.kept
    assert result.failure
    assert all("crashed while running" in reason for _, reason, _ in result.failed)
    assert 1 <= len(result.failed) < 20


def test_a_process_that_hangs(tmp_path: Path) -> None:
    """A test that exceeds the time limit counts as failed, and its process is ended."""
    code = """
        class Bad(MemoryBackend):
            def open_shard(self, path, keyspaces, *, create):
                if "xdist" in sys.modules:
                    threading.Event().wait()
                return super().open_shard(path, keyspaces, create=create)
    """
    result = told(install(tmp_path, code), 5.0)
    assert not result.kept
    assert all("crashed while running" in reason for _, reason, _ in result.failed)
    assert 1 <= len(result.failed) < 20


FIRST = {
    "raises": ("raise KeyError('of all things')", "open a new database: KeyError: 'of all things' ("),
    "dies": ("os.kill(os.getpid(), 11)", "open a new database: the process ended with code -11"),
}


@pytest.mark.parametrize(("act", "cause"), FIRST.values(), ids=list(FIRST))
def test_the_first_step_names_the_first_cause(tmp_path: Path, act: str, cause: str) -> None:
    """A plugin that can't open a shard is not tested any further; the run names the failed step and the reason."""
    code = f"""
        class Bad(MemoryBackend):
            def open_shard(self, path, keyspaces, *, create):
                {act}
    """
    result = told(install(tmp_path, code))
    assert (0, False) == (result.tests, result.kept)
    assert result.failure.startswith(f"its first step failed: {cause}")


def test_the_run_ends_at_the_first_failure(tmp_path: Path) -> None:
    """With ``first_failure`` the run ends at the first failed test, and counts as incomplete."""
    code = """
        class Bad(MemoryBackend):
            def open_shard(self, path, keyspaces, *, create):
                if "xdist" in sys.modules:
                    raise KeyError("of all things")
                return super().open_shard(path, keyspaces, create=create)
    """
    result = told(install(tmp_path, code), first_failure=True)
    assert not result.kept
    assert 1 <= len(result.failed) <= 8
    assert result.failure.startswith("it ended at the first failure")


def test_a_random_history_names_its_promise(monkeypatch: pytest.MonkeyPatch) -> None:
    """A failed test with random data names the promise that its history broke, and shows the smallest history."""
    scan = MemoryEngine.scan
    monkeypatch.setattr(
        MemoryEngine, "scan", lambda *given, **how: (chunk[1:] or chunk for chunk in scan(*given, **how))
    )
    machine = type("Machine", (EngineMachine,), {"backend": make_backend("memory"), "capabilities": ()})
    with pytest.raises(AssertionError) as failed:
        run_state_machine_as_test(machine, settings=settings(MACHINE, max_examples=20, stateful_step_count=5))
    assert re.match(r"[A-Z][^.]* (scan|pair|stored|snapshot|written)[^.]*\.\n", str(failed.value))
    shown = running._history(SimpleNamespace(longreprtext=str(failed.getrepr())))  # type: ignore[arg-type]
    assert shown.startswith("state = Machine()\nstate.start(")
    assert shown.endswith("state.teardown()")
    assert len(shown.splitlines()) < 10


def test_a_plugin_that_leaves_in_a_hurry(tmp_path: Path) -> None:
    """If the plugin ends the process while tests are collected, the run has no results and counts as failed."""
    code = """
        class Bad(MemoryBackend):
            pass
        if "pytest" in sys.modules:
            os._exit(3)
    """
    result = told(install(tmp_path, code))
    assert (0, False) == (result.tests, result.kept)
    assert result.failure
