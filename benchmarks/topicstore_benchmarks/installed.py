"""Whether what a command needs is installed."""

from __future__ import annotations

import importlib.util

from topicstore.cli.terminal.exits import USAGE, Failure

__all__ = ["ENGINE", "REPORT", "SPARK", "check_installed"]

ENGINE, SPARK, REPORT = ("rocksdict",), ("pyspark",), ("altair", "jinja2", "vl_convert")
"""Modules that figures need, a run, and its report."""


def check_installed(*modules: str) -> None:
    """Raise `Failure` if modules are missing, before anything is measured or written."""
    missing = [name for name in modules if importlib.util.find_spec(name) is None]
    if missing:
        raise Failure(f'this needs {", ".join(missing)}: pip install "topicstore[bench]"', USAGE)
