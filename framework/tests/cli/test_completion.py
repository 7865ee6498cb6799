"""Completion in the shell: commands, options, and the names of backends and layouts that are installed."""

from __future__ import annotations

from pathlib import Path

import pytest
import topicstore as ts
from click.shell_completion import BashComplete
from topicstore.cli import cli
from topicstore.plugins import registry

BACKENDS, LAYOUTS = sorted(registry().backends()), sorted(registry().layouts())


def completed(words: list[str], incomplete: str) -> list[str]:
    found = BashComplete(cli, {}, "topicstore", "_TOPICSTORE_COMPLETE").get_completions(words, incomplete)
    return [item.value for item in found]


@pytest.mark.parametrize(
    "words",
    [
        ["create", "data"],
        ["import", "data"],
        ["recommend", "sample.jsonl"],
        ["conformance"],
    ],
    ids=" ".join,
)
def test_backends(words: list[str]) -> None:
    """The option `--backend` completes to all installed backends, including those of other packages.

    That holds for every command with this option.
    """
    assert BACKENDS == completed([*words, "--backend"], "")
    assert [name for name in BACKENDS if name.startswith("r")] == completed([*words, "--backend"], "r")


@pytest.mark.parametrize(
    "words",
    [
        ["create", "data"],
        ["import", "data"],
        ["generations", "add", "data"],
        ["conformance"],
    ],
    ids=" ".join,
)
def test_layouts(words: list[str]) -> None:
    """For every command with `--layout`, this option completes to all installed layouts."""
    assert LAYOUTS == completed([*words, "--layout"], "")
    assert ["block"] == completed([*words, "--layout"], "bl")
    assert [] == completed([*words, "--layout"], "nothing")


def test_contenders() -> None:
    """`--contender` completes to the contenders whose names begin with the given letters, without wildcards."""
    words = ["bench", "run", "results", "--contender"]
    assert [name for name in completed(words, "") if name.startswith("raw")] == completed(words, "raw") != []


@pytest.mark.parametrize("command", ["replay", "topics", "latest", "explain", "delete"])
def test_topics(tmp_path: Path, command: str) -> None:
    """A filter completes to topics with the same beginning or, if there are many, to filters of the next level."""
    path = str(tmp_path / "db")
    with ts.open(path) as db:
        db.store([ts.Message(topic, b"1") for topic in ("fleet/a/x", "fleet/b", "hall/co2")])
    assert ["fleet/a/x", "fleet/b"] == completed([command, path], "fl")
    assert ["fleet/b"] == completed([command, path], "fleet/b")
    with ts.open(path) as db:
        db.store([ts.Message(f"many/{level % 3}/{level}", b"1") for level in range(120)])
    assert ["many/0/#", "many/1/#", "many/2/#"] == completed([command, path], "many/")
    assert [] == completed([command, path], "fleet/+/") == completed([command, str(tmp_path / "none")], "")


def test_commands_and_options() -> None:
    """Commands and options complete to those that the help lists."""
    assert ["retained", "retention"] == completed([], "ret")
    assert ["--backend"] == completed(["create", "data"], "--b")


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_shells_can_ask_the_program(
    shell: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Completion works through the variables that the shells' scripts set; zsh and fish also get summaries."""
    monkeypatch.setenv("_TOPICSTORE_COMPLETE", f"{shell}_complete")
    monkeypatch.setenv("COMP_WORDS", "topicstore create data --layout skip")
    monkeypatch.setenv("COMP_CWORD", "skip" if shell == "fish" else "4")
    with pytest.raises(SystemExit):
        cli(prog_name="topicstore")
    said = capsys.readouterr()
    assert "skipstream" in said.out
    assert "block" not in said.out.split()
    assert "" == said.err
    if shell != "bash":
        assert registry().layouts()["skipstream"].summary in said.out
