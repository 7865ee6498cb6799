"""The suites in other projects' runs of pytest: options only on request, fixtures, readable assertions."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from topicstore_conformance.subjects.pairs import pairs

PAIR = pairs()[0]
INSTALLED = ["-p", "topicstore_conformance.runner.plugin", "--pyargs", "topicstore_conformance.installed"]


def run_pytest(directory: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run pytest in another project's directory, with all installed pytest plugins."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST")}
    environment |= {"PY_COLORS": "0", "COLUMNS": "200"}
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider"]
    options = ["--strict-markers", f"--rootdir={directory}", *arguments]
    return subprocess.run([*command, *options], cwd=directory, env=environment, capture_output=True, text=True)


def collected(directory: Path, *options: str) -> list[str]:
    """Return the ids of the suites' tests that pytest collects for installed plugins with these options."""
    done = run_pytest(directory, "--collect-only", "-q", *INSTALLED, *options)
    assert 0 == done.returncode, done.stdout + done.stderr
    return [line for line in done.stdout.splitlines() if "::" in line]


def test_options_choose(tmp_path: Path) -> None:
    """With both names pytest collects the backend's suite, the layout's suite and that of their pair, and no other."""
    tests = collected(tmp_path, f"--backend={PAIR.backend}", f"--layout={PAIR.layout}", "--quick")
    classes = {
        "TestBackend": PAIR.backend,
        "TestLayout": PAIR.layout,
        "TestDatabase": str(PAIR),
        "TestParts": str(PAIR),
    }
    for name, of in classes.items():
        mine = [test for test in tests if f"::{name}::" in test]
        assert mine
        assert all(f"[{of}" in test for test in mine)
    assert all(any(f"::{name}::" in test for name in classes) for test in tests)


def test_a_backend_brings_its_layouts(tmp_path: Path) -> None:
    """With only a backend pytest collects its own suite, and the database suite with each compatible layout."""
    tests = collected(tmp_path, f"--backend={PAIR.backend}")
    assert not [test for test in tests if "::TestLayout::" in test and "NOTSET" not in test]
    for pair in (pair for pair in pairs() if pair.backend == PAIR.backend):
        assert [test for test in tests if f"[{pair}" in test]


def test_wrong_names_are_wrong_usage(tmp_path: Path) -> None:
    """An unknown name ends the run before any test, with a list of the registered names."""
    done = run_pytest(tmp_path, *INSTALLED, "--backend=no-such")
    assert 0 != done.returncode
    assert "there is no backend 'no-such'; there are: " in done.stdout + done.stderr


def test_options_are_only_where_they_are_asked_for(tmp_path: Path) -> None:
    """Projects that don't load the plugin can define command-line options of the same names."""
    (tmp_path / "conftest.py").write_text(
        "def pytest_addoption(parser):\n    parser.addoption('--backend')\n    parser.addoption('--quick')\n"
    )
    (tmp_path / "test_it.py").write_text("def test_it(request):\n    assert '7' == request.config.option.backend\n")
    done = run_pytest(tmp_path, "--backend=7", "test_it.py")
    assert 0 == done.returncode, done.stdout + done.stderr


def test_runs_that_do_not_load_the_plugin_are_unaffected(tmp_path: Path) -> None:
    """A run that doesn't load the plugin has none of its marks and options, and imports no topicstore module."""
    (tmp_path / "test_it.py").write_text(
        "import sys\ndef test_it():\n    assert not [name for name in sys.modules if name.startswith('topicstore')]\n"
    )
    done = run_pytest(tmp_path, "test_it.py")
    assert 0 == done.returncode, done.stdout + done.stderr
    for option in ("--markers", "--help", "--trace-config"):
        assert "topicstore_conformance" not in run_pytest(tmp_path, option).stdout


def test_a_suite_of_ones_own(tmp_path: Path) -> None:
    """A suite's subclass with its one fixture runs, and skips tests of undeclared capabilities.

    A subclass without the fixture fails with an error that names the fixture.
    """
    (tmp_path / "test_mine.py").write_text(
        "import pytest\n"
        "from topicstore_conformance import DatabaseSuite, Pair, pair_of\n"
        "class TestMine(DatabaseSuite):\n"
        "    @pytest.fixture\n"
        f"    def pair(self): return Pair({PAIR.backend!r}, {PAIR.layout!r}, frozenset())\n"
        "class TestForgetful(DatabaseSuite): pass\n"
    )
    done = run_pytest(tmp_path, "-rA", "-k", "test_close_beside_a_compaction or test_checkpoints", "test_mine.py")
    assert "PASSED test_mine.py::TestMine::test_close_beside_a_compaction" in done.stdout
    assert "needs checkpoint" in done.stdout
    assert "override the fixture `pair`" in done.stdout
    assert "ERROR test_mine.py::TestForgetful::test_close_beside_a_compaction" in done.stdout


def test_assertions_show_what_was_compared(tmp_path: Path) -> None:
    """A failing assertion within the package shows the compared values, like one in a test module."""
    (tmp_path / "test_mine.py").write_text(
        "from topicstore import Message, MessageId\n"
        "from topicstore_conformance.oracle.checks import check_publishers\n"
        "def test_it():\n"
        "    check_publishers([(MessageId(0, 22), Message('a', b'')), (MessageId(0, 11), Message('a', b''))])\n"
    )
    done = run_pytest(tmp_path, "test_mine.py")
    assert 1 == done.returncode
    assert "22 < 11" in done.stdout


@pytest.mark.parametrize("mode", ["", "slow"])
def test_modes(mode: str) -> None:
    """An unknown mode is reported with the valid ones, and the default mode is ``full``."""
    command = [sys.executable, "-c", "from topicstore_conformance.conditions.tries import MODE; print(MODE)"]
    done = subprocess.run(command, env={**os.environ, "TOPICSTORE_CONFORMANCE": mode}, capture_output=True, text=True)
    assert ("full" if mode == "" else "") == done.stdout.strip()
    assert mode == "" or "must be one of quick, full, thorough, not 'slow'" in done.stderr
