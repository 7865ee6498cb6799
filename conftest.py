"""Settings of every run of the tests, and a note at its end on the packages to install for the skipped tests."""

from __future__ import annotations

import os
import re
import shutil
import signal
import tempfile
from collections.abc import Generator, Iterator
from multiprocessing import util
from pathlib import Path

import pytest
from hypothesis import settings
from topicstore_conformance.conditions.garbage import pytest_collection_finish  # noqa: F401 - pytest calls it
from topicstore_conformance.conditions.profiles import PROFILE
from xdist.scheduler import LoadFileScheduling

settings.register_profile("topicstore", PROFILE)
settings.load_profile("topicstore")

# Several tests start Spark's Java, which takes half the CPU time if its compiler optimises less.
os.environ.setdefault("JDK_JAVA_OPTIONS", "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC")

# NumPy's linear algebra, which is not used, starts threads in every process: a third of a command's CPU time.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

_TERMINAL = ("COLORTERM", "COLUMNS", "FORCE_COLOR", "LINES", "NO_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE")
"""Environment variables with which a user changes the look of programs' output."""
_MEMORY = Path("/dev/shm")
_MINE = f"topicstore-tests-{os.getuid()}-"
_FOLDER = _MEMORY / f"{_MINE}{os.getpid()}"
_ROOM = 4 << 30
"""Bytes that must be free in memory for tests to keep their files there."""
_SPARK = ("framework/tests/spark/test_spark", "framework/tests/spark/test_tallies")
"""The beginnings of the names of files whose tests start Spark."""
_APART = "framework/tests/test_documents.py"
"""A file whose tests share nothing, and take long."""
_INSTALL = re.compile(r"needs [^:]+: (apt-get|pip) install ([^,]+)")


def pytest_configure(config: pytest.Config) -> None:
    """Keep the tests' files in memory if enough is free, because most of the time would be spent waiting for a disk.

    Ctrl-C ends programs, even where a shell has started the tests in the background, which ignore it.
    """
    if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if hasattr(config, "workerinput") or "TMPDIR" in os.environ or not os.access(_MEMORY, os.W_OK):
        return
    for folder in _MEMORY.glob(f"{_MINE}*"):  # of runs that were killed, or in which a test has failed
        if not Path("/proc", folder.name.removeprefix(_MINE)).exists():
            shutil.rmtree(folder, ignore_errors=True)
    if shutil.disk_usage(_MEMORY).free >= _ROOM:
        _FOLDER.mkdir()
        os.environ["TMPDIR"] = tempfile.tempdir = str(_FOLDER)


def pytest_sessionfinish(exitstatus: int) -> None:
    """Remove the tests' files when this process ends. After a failure they stay, so that they can be inspected."""
    if exitstatus == pytest.ExitCode.OK:
        after_its_own = -200  # multiprocessing removes its directory at -100
        util.Finalize(None, shutil.rmtree, (_FOLDER, True), exitpriority=after_its_own)


def pytest_xdist_auto_num_workers() -> int:
    """Give ``-n auto`` a process for each CPU that this one may use, and one more, because tests wait for servers."""
    return 1 + (len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1)


class ByFile(LoadFileScheduling):
    """Keeps a file's tests in one process, and all files that start Spark, so that it starts once.

    The last file would leave one process alone with all of its tests, so those are distributed one by one.
    """

    def _split_scope(self, nodeid: str) -> str:
        file: str = super()._split_scope(nodeid)
        return "Spark" if file.startswith(_SPARK) else nodeid if file == _APART else file


def pytest_xdist_make_scheduler(config: pytest.Config, log: object) -> LoadFileScheduling | None:
    """Distribute tests by file."""
    return ByFile(config, log) if config.getvalue("dist") == "loadfile" else None


@pytest.fixture(scope="session", autouse=True)
def plain_output() -> Iterator[None]:
    """Programs write plain text, as without any setting about colors."""
    with pytest.MonkeyPatch.context() as patch:
        for name in _TERMINAL:
            patch.delenv(name, raising=False)
        yield


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> Generator[None]:
    """After the list of skipped tests, say in one line what to install to have them run."""
    yield
    wanted: dict[str, set[str]] = {}
    count = 0
    for report in terminalreporter.getreports("skipped"):
        found = _INSTALL.search(report.longrepr[2] if isinstance(report.longrepr, tuple) else "")
        if found is not None:
            wanted.setdefault(found[1], set()).update(found[2].split())
            count += 1
    if wanted:
        commands = "; ".join(f"{tool} install {' '.join(sorted(what))}" for tool, what in sorted(wanted.items()))
        terminalreporter.write_line(f"{count} skipped tests need more tools, and run after: {commands}")
