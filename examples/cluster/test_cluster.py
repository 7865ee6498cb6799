"""Test of the example, which prints the output that its README shows."""

# ruff: noqa: D103, S101, S603 - a test asserts, and starts the program beside it
from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest
from topicstore_conformance.faults.threads import PATIENCE

HERE = Path(__file__).parent


def test_what_a_killed_server_has_acknowledged_is_read_from_another(tmp_path: Path) -> None:
    for module, package in (("paho", "paho-mqtt"), ("rocksdict", "rocksdict")):
        if importlib.util.find_spec(module) is None:
            pytest.skip(f"needs {package}: pip install {package}")
    command = [sys.executable, str(HERE / "cluster.py"), str(tmp_path / "data")]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=PATIENCE)
    assert done.returncode == 0, done.stderr
    shown = (HERE / "README.md").read_text().partition("cluster-data\n")[2].partition("```")[0]
    assert shown == done.stdout
