"""Test of the example, which prints the output that its README shows."""

# ruff: noqa: D103, S101, S603 - a test asserts, and starts the program beside it
from __future__ import annotations

import subprocess
import sys
from pathlib import Path

MAIN = Path(__file__).with_name("main.py")


def test_it_runs_twice(tmp_path: Path) -> None:
    for stored in (60, 120):
        done = subprocess.run(
            [sys.executable, str(MAIN), str(tmp_path / "data")], capture_output=True, text=True, check=True
        )
        lines = done.stdout.splitlines()
        assert lines[0] == f"the consumer saw {stored // 2 - 15} temperatures and left"
        assert lines[1] == "the consumer is back and gets the 15 temperatures it missed:"
        assert sorted(lines[2:-1]) == sorted(
            f"  home/{room}/temperature {20 + number / 10:.1f}"
            for room in ("kitchen", "office", "hall")
            for number in range(5, 10)
        )
        assert lines[-1].endswith(f"; {stored} in all")
        assert done.stderr == ""
