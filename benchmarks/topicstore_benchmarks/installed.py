"""Checks whether the modules that a command needs are installed."""

from __future__ import annotations

import importlib.util

from topicstore.cli.terminal.exits import USAGE, Failure

__all__ = ["ENGINE", "REPORT", "SPARK", "check_installed"]

ENGINE, SPARK, REPORT = ("rocksdict",), ("pyspark",), ("altair", "jinja2", "vl_convert")
"""The modules that are needed for figures, for a run, and for its report."""


def check_installed(*modules: str) -> None:
    """Raise `Failure` if modules are missing, before anything is measured or written."""
    missing = [name for name in modules if importlib.util.find_spec(name) is None]
    if missing:
        raise Failure(f'this needs {", ".join(missing)}: pip install "topicstore[bench]"', USAGE)
