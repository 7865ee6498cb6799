"""``topicstore bench`` without its optional dependencies."""

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
"""A program in which modules can't be imported, because they are None in ``sys.modules``, that runs the command."""


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
def test_what_is_missing_is_reported_at_once(tmp_path: Path, arguments: list[str], missing: list[str]) -> None:
    """Missing modules are reported in one line with the command that installs them, before anything is written."""
    done = bench(tmp_path, *arguments, missing=missing)
    assert (2, "") == (done.returncode, done.stdout)
    assert f'error: this needs {", ".join(missing)}: pip install "topicstore[bench]"\n' == done.stderr
    assert [] == list(tmp_path.iterdir())


@pytest.mark.parametrize("arguments", [["--help"], ["list"], ["run", "--help"], ["figures", "--help"]])
def test_looking_around_needs_nothing(tmp_path: Path, arguments: list[str]) -> None:
    """The help and the list of workloads and contenders need no optional dependency."""
    done = bench(tmp_path, *arguments, missing=["pyspark", "altair", "jinja2", "vl_convert", "rocksdict", "plyvel"])
    assert (0, "") == (done.returncode, done.stderr)
    assert done.stdout
