"""Test of the example: no subscriber loses a message, and QoS 2 messages are delivered exactly once."""

# ruff: noqa: D103, S101, S603 - a test asserts, and starts the program beside it
from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

MAIN = Path(__file__).with_name("main.py")


@pytest.mark.slow
def test_kills_lose_nothing(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, str(MAIN), str(tmp_path / "data")], capture_output=True, text=True, check=False
    )
    lines = done.stdout.splitlines()
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stderr == ""
    assert lines.count("  killed") == 3
    stored = lines[6].split()[0]
    assert int(stored) > 0
    assert lines[7].startswith(f"display (QoS 1): {stored} delivered, 0 lost")
    assert lines[8].startswith(f"archive (QoS 2): {stored} delivered, 0 lost, 0 came twice")
