"""The command ``topicstore bench figures``: all sections or one of them, as tables, as Markdown, and as JSON."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

pytest.importorskip("rocksdict", reason='needs rocksdict: pip install "topicstore[bench]"')

from topicstore_benchmarks import timing
from topicstore_benchmarks.figures import command as program
from topicstore_benchmarks.figures import limits
from topicstore_benchmarks.figures.figure import Cell, Figure, Sheet, shown
from topicstore_conformance.faults.threads import PATIENCE

SMALL = ["--messages", "2000", "--rounds", "1"]


@pytest.fixture(autouse=True)
def all_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep the command from binding the tests' process to one core."""
    monkeypatch.setattr(timing.os, "sched_setaffinity", lambda *_: None, raising=False)


def run(*arguments: str) -> Result:
    return CliRunner().invoke(program.figures, list(arguments), catch_exceptions=False)


def test_limits_prints_tables() -> None:
    """The section ``limits`` prints tables with a line for each bound that shows the value and the bound."""
    result = run("limits", *SMALL, "--workload", "one-topic-random")
    assert 0 == result.exit_code
    assert "one-topic-random: 2,000 messages, 1 topics" in result.stdout
    lines = [line for line in result.stdout.splitlines() if "rocksdb-block" in line and "store, times" in line]
    assert 1 == len(lines)
    assert "(≥ 1.2)" in lines[0]
    assert "figures are as they should be" in result.stdout


def test_layouts_writes_markdown_and_json(tmp_path: Path) -> None:
    """The JSON file has every figure, with its bounds and whether they hold, and Markdown tables are printed."""
    file = tmp_path / "figures.json"
    result = run("--markdown", "--json", str(file), "layouts", *SMALL, "--workload", "fleet")
    assert 0 == result.exit_code
    assert "| Store, messages/s |" in result.stdout
    assert "fleet-commit-1: replay all" in result.stderr
    document = json.loads(file.read_bytes())
    assert document["machine"].startswith("Python 3")
    found = {(f["subject"], f["name"]): f for f in document["figures"]}
    assert {"layouts"} == {f["section"] for f in document["figures"]}
    assert found["sqlite", "store"]["value"] > 0
    metric = found["rocksdb-block, compacted", "one metric, times the rate of all"]
    assert (metric["value"] >= metric["least"]) == metric["held"]


def test_what_is_absent_is_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A workload whose data is not installed is left out, and the reason is reported."""
    monkeypatch.setenv("TOPICSTORE_DATA", str(tmp_path))
    result = run("layouts", *SMALL, "--workload", "bus")
    assert "layouts: bus is left out: there is no bus.parquet in " in result.stderr
    assert "0 of 0 figures are as they should be" in result.stdout


def test_without_a_name_all_sections_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a section's name the command runs all sections in order."""
    ran: list[str] = []
    for name, command in program.figures.commands.items():
        monkeypatch.setattr(command, "callback", lambda name=name, **_: ran.append(name) or [])
        monkeypatch.setattr(command, "params", [])
    assert "0 of 0 figures are as they should be" in run().stdout
    assert list(program.figures.commands) == ran


def test_the_command_refuses_what_it_does_not_know() -> None:
    """An unknown workload is rejected with a list of the known ones."""
    result = run("limits", "--workload", "two-topics")
    assert 2 == result.exit_code
    assert limits.WORKLOADS[1] in result.output


def test_python_runs_the_package() -> None:
    """``python -m topicstore_benchmarks`` runs the command."""
    command = [sys.executable, "-m", "topicstore_benchmarks", "--help"]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=PATIENCE)
    assert "Measure topicstore" in done.stdout
    assert "" == done.stderr


@pytest.mark.parametrize(
    ("bounds", "text", "mark"),
    [
        ({}, "1.50", ""),
        ({"least": 1.5}, "1.50 (≥ 1.5)", "good"),
        ({"least": 2}, "1.50 (≥ 2)", "bad"),
        ({"most": 1.5}, "1.50 (≤ 1.5)", "good"),
        ({"most": 1.3}, "1.50 (≤ 1.3)", "bad"),
    ],
)
def test_a_figure_shows_what_it_should_be(bounds: dict[str, float], text: str, mark: str) -> None:
    """A figure's cell shows its value and its bound, and is marked by whether the bound holds."""
    assert Cell(text, mark) == Figure(data="bus", subject="block", name="store", value=1.5, **bounds).cell()


def test_a_sheet_for_a_readme() -> None:
    """In Markdown a sheet aligns texts left and values right, and shows best and bad values in bold."""
    rows = [
        ["block", Cell("2.00", "best"), Cell("0.10 (≥ 1)", "bad")],
        ["reference", Cell("1.00"), Cell("2.00 (≥ 1)", "good")],
    ]
    sheet = Sheet(title="Title", columns=["layout", "rate", "ratio"], rows=rows, note="note")
    assert [
        "Title:",
        "",
        "| layout | rate | ratio |",
        "| --- | ---: | ---: |",
        "| block | **2.00** | **0.10 (≥ 1)** |",
        "| reference | 1.00 | 2.00 (≥ 1) |",
        "",
        "note",
    ] == sheet.markdown().splitlines()


def test_values_have_three_digits() -> None:
    """Values are shown with two or three significant digits, and all digits before the decimal point."""
    assert ["0.03", "1.20", "12.3", "-12.3", "123", "1,234"] == list(
        map(shown, [0.031, 1.2, 12.31, -12.31, 123.1, 1_234])
    )


def test_every_replay_is_counted() -> None:
    """`timing.check` raises AssertionError if a replay has fewer messages than expected."""
    timing.check(timing.consume(iter([])), 0)
    with pytest.raises(AssertionError, match="0 of 1"):
        timing.check(timing.consume(iter([])), 1)
