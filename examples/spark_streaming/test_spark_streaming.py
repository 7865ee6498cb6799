"""Test of the example: every alert is stored exactly once although the query is killed."""

# ruff: noqa: D103, S101, S603 - a test asserts, and starts the program beside it
from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

pytest.importorskip("pyspark", reason='needs pyspark: pip install "topicstore[spark]"')

MAIN = Path(__file__).with_name("main.py")


def test_each_alert_is_stored_once(tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, str(MAIN), str(tmp_path)], capture_output=True, text=True, check=False)
    lines = done.stdout.splitlines()
    assert done.returncode == 0, done.stdout + done.stderr
    assert "  killed" in lines
    assert lines[-2:] == ["240 positions of standing buses, 240 alerts", "each once"]
