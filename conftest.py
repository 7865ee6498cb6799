"""What holds for every run of the tests, in whatever surroundings, and what to install for those skipped."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Generator, Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

# Spark's Java, which starts in several tests, costs half the CPU time where it compiles quickly instead of well.
os.environ.setdefault("JDK_JAVA_OPTIONS", "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC")

# How long an example takes, and how often drawing one succeeds, says something about the machine and about luck.
settings.register_profile(
    "any machine",
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much],
)
settings.load_profile("any machine")

_TERMINAL = ("COLORTERM", "COLUMNS", "FORCE_COLOR", "LINES", "NO_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE")
"""Variables by which a person says what programs' output looks like."""
_MEMORY = Path("/dev/shm")
_ROOM = 4 << 30
"""Bytes that must be free in memory for tests to keep their files there."""
_INSTALL = re.compile(r"needs [^:]+: (apt-get|pip) install (.+)")


def pytest_configure() -> None:
    """Keep the tests' files in memory where there is room: most of the time would go by in waiting for a disk."""
    if os.access(_MEMORY, os.W_OK) and shutil.disk_usage(_MEMORY).free >= _ROOM:
        os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", str(_MEMORY))


def pytest_xdist_auto_num_workers() -> int:
    """Give ``-n auto`` a process for each CPU that this one may use, not for each that is there."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@pytest.fixture(scope="session", autouse=True)
def plain_output() -> Iterator[None]:
    """Programs write as they do where nobody has said how."""
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
