"""Test of the example, which computes the speeds of the generated positions."""

# ruff: noqa: D103, S101, S603 - a test asserts, and starts the program beside it
from __future__ import annotations

import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

pytest.importorskip("pyspark", reason='needs pyspark: pip install "topicstore[spark]"')

MAIN = Path(__file__).with_name("main.py")


def test_it_answers(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, str(MAIN), str(tmp_path / "data")], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    lines = done.stdout.splitlines()
    assert lines[0].startswith("100,000 positions; ")
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if line.startswith("|")]
    assert rows[0] == ["route", "night", "morning", "midday", "afternoon", "evening"]
    assert [row[0] for row in rows[1:]] == ["10", "20", "30", "40", "50"]
    speeds = [[float(cell) for cell in row[1:]] for row in rows[1:]]
    for slower, quicker in pairwise(speeds):
        assert [round(b - a) for a, b in zip(slower, quicker, strict=True)] == [1] * 5
    assert all(min(row) == row[2] for row in speeds)
