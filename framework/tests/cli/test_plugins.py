"""``topicstore plugins``: warnings about environment variables."""

from __future__ import annotations

import os
import subprocess
import sys

from topicstore_conformance.faults.threads import PATIENCE


def test_variables_about_plugins() -> None:
    """An unknown environment variable and a disabled plugin are each reported in one line, and the command succeeds."""
    variables = {"TOPICSTORE_DISABLE_PLUGINS": "layouts", "TOPICSTORE_DISABLE_PLUGINGS": "layouts"}
    program = [sys.executable, "-m", "topicstore.cli", "plugins", "--json"]
    environment = {**os.environ, **variables}
    done = subprocess.run(program, env=environment, capture_output=True, text=True, timeout=PATIENCE, check=True)
    assert done.stderr.splitlines() == [
        "warning: nothing reads the environment variable TOPICSTORE_DISABLE_PLUGINGS; "
        "is TOPICSTORE_DISABLE_PLUGINS meant?",
        "warning: plugin 'layouts' of topicstore is disabled by TOPICSTORE_DISABLE_PLUGINS",
    ]
