"""``topicstore plugins``."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from typing import Any

from click.testing import Result
from topicstore_conformance.faults.threads import PATIENCE

Run = Callable[..., Result]
Document = Callable[..., dict[str, Any]]


def test_a_plugin_that_is_disabled() -> None:
    environment = {**os.environ, "TOPICSTORE_DISABLE_PLUGINS": "layouts"}
    program = [sys.executable, "-m", "topicstore.cli", "plugins"]
    done = subprocess.run(program, env=environment, capture_output=True, text=True, timeout=PATIENCE, check=True)
    assert "warning: plugin 'layouts' of topicstore is disabled by TOPICSTORE_DISABLE_PLUGINS\n" == done.stderr


def test_a_variable_that_nothing_reads() -> None:
    """It is told in one line, and the command does its work."""
    environment = {**os.environ, "TOPICSTORE_DISABLE_PLUGINGS": "layouts"}
    program = [sys.executable, "-m", "topicstore.cli", "plugins", "--json"]
    done = subprocess.run(program, env=environment, capture_output=True, text=True, timeout=PATIENCE, check=True)
    warning = "nothing reads the environment variable TOPICSTORE_DISABLE_PLUGINGS; is TOPICSTORE_DISABLE_PLUGINS meant?"
    assert f"warning: {warning}\n" == done.stderr
