"""The pytest plugin that reports the result of every promise to `running` while the tests run."""

from __future__ import annotations

import os
from collections.abc import Generator

import msgspec
import pytest

from .outcomes import Begun, Outcome, Record

__all__ = ["Reporter", "pytest_addoption", "pytest_configure"]

_LONGEST = 500
"""The longest reason, in characters: compared values may be large."""


class Reporter:
    """Writes one line for each record to a file descriptor."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._reports: list[pytest.TestReport] = []

    def _write(self, record: Record) -> None:
        line = msgspec.json.encode(record) + b"\n"
        while line:
            line = line[os.write(self._descriptor, line) :]

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Generator[None, object, object]:
        """Report that a test begins, and how it ended."""
        self._write(Begun(item.name))
        self._reports = []
        result = yield
        self._write(_outcome(item, self._reports))
        return result

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Keep the results of setup, call and teardown."""
        self._reports.append(report)


def _outcome(item: pytest.Item, reports: list[pytest.TestReport]) -> Outcome:
    worst = min(reports, key=lambda report: ("failed", "skipped", "passed").index(report.outcome))
    reason, where = _reason(worst)
    function = getattr(item, "function", None)
    return Outcome(
        group=getattr(function, "__module__", "").rpartition(".")[2],
        test=item.name,
        promise=" ".join((getattr(function, "__doc__", None) or item.name).split()),
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


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the option that `running` uses."""
    parser.addoption("--report-to", type=int, metavar="DESCRIPTOR", help="write records to this file descriptor")


def pytest_configure(config: pytest.Config) -> None:
    """Begin to report, if the option was given."""
    descriptor = config.getoption("--report-to")
    if descriptor is not None:
        config.pluginmanager.register(Reporter(descriptor))
