"""``topicstore bench`` where what it needs is not installed."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

WITHOUT = """
import sys
sys.modules.update(dict.fromkeys({missing!r}))
from topicstore.cli import main
sys.argv[1:] = {arguments!r}
main()
"""
"""Modules that are None in ``sys.modules`` can't be imported, as if they were not installed."""


def bench(folder: Path, *arguments: str, missing: list[str]) -> subprocess.CompletedProcess[str]:
    program = WITHOUT.format(missing=missing, arguments=["bench", *arguments])
    return subprocess.run([sys.executable, "-c", program], cwd=folder, capture_output=True, text=True)


@pytest.mark.parametrize(
    ("arguments", "missing"),
    [
        (["run", "results", "--preset", "quick"], ["pyspark"]),
        (["run", "results", "--preset", "quick"], ["altair", "vl_convert"]),
        (["run", "results", "--preset", "quick"], ["pyspark", "altair", "jinja2", "vl_convert"]),
        (["report", "."], ["jinja2"]),
        (["figures", "--json", "figures.json"], ["rocksdict"]),
    ],
)
def test_what_is_missing_is_told_at_once(tmp_path: Path, arguments: list[str], missing: list[str]) -> None:
    """In one line with one command, before anything is measured or written."""
    done = bench(tmp_path, *arguments, missing=missing)
    assert (2, "") == (done.returncode, done.stdout)
    assert f'error: this needs {", ".join(missing)}: pip install "topicstore[bench]"\n' == done.stderr
    assert [] == list(tmp_path.iterdir())


@pytest.mark.parametrize("arguments", [["--help"], ["list"], ["run", "--help"], ["figures", "--help"]])
def test_looking_around_needs_nothing(tmp_path: Path, arguments: list[str]) -> None:
    """What there is to measure can be read where nothing can be measured."""
    done = bench(tmp_path, *arguments, missing=["pyspark", "altair", "jinja2", "vl_convert", "rocksdict", "plyvel"])
    assert (0, "") == (done.returncode, done.stderr)
    assert done.stdout
