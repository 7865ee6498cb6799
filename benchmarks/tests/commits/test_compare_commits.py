"""``topicstore bench compare-commits``: a commit that takes more CPU time is found, by the name of its step."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import topicstore
from click.testing import CliRunner
from topicstore_benchmarks.cli import bench
from topicstore_benchmarks.commits.command import Step, compare_commits

ROOT = Path(topicstore.__file__).parents[2]
BASELINE = "27feabc"
"""The commit that no step may be slower than. A commit that makes a step quicker moves it forward."""
needs_history = pytest.mark.skipif(not (ROOT / ".git").exists(), reason="needs a git checkout")


def copied(directory: Path) -> Path:
    """Copy the packages that are measured; return the directory."""
    for package in ("framework", "layouts", "backends"):
        shutil.copytree(ROOT / package, directory / package, ignore=shutil.ignore_patterns("__pycache__", "tests"))
    return directory


@needs_history
def test_an_unknown_commit_is_named() -> None:
    """An unknown commit, or an option in the position of a commit, ends the command with exit code 2 and is named."""
    for base in ("no-such-commit", "--output=x"):
        ended = CliRunner().invoke(bench, ["compare-commits", "--", base])
        assert 2 == ended.exit_code
        assert base in ended.output


@pytest.mark.parametrize(
    ("ratios", "slower"),
    [
        ([1.04] * 7, True),
        ([1.02] * 7, False),
        ([0.9, 0.95, 0.97, 1.05, 1.06, 1.3, 1.4], False),
        ([0.9, 0.95] + [1.05] * 12, True),
        ([1.04], True),
    ],
)
def test_a_step_is_slower_beyond_chance(ratios: list[float], slower: bool) -> None:
    """A step is slower if its median ratio is over the limit, and more rounds are over 1 than chance explains."""
    assert slower is Step(name="step", before=[100.0] * len(ratios), after=[100 * one for one in ratios]).slower(1.03)


@pytest.mark.slow
def test_what_became_slower_is_found_by_name(tmp_path: Path) -> None:
    """A checkout whose `Database.store` does its work twice is slower in storing, and in no step that only reads."""
    slower = copied(tmp_path / "slower")
    module = slower / "framework" / "topicstore" / "database.py"
    module.write_text(module.read_text() + _TWICE)
    found = {step.name: step.ratio for step in compare_commits(copied(tmp_path / "base"), slower, rounds=1, most=9)}
    assert found["store by 1"] > 1.5
    assert found["store by 1,000"] > 1.5
    assert found["replay"] < 1.5


_TWICE = """

_store = Database.store


def _twice(self, messages, *args, **kwargs):
    messages = list(messages)
    for message in messages:
        for _ in range(20):
            hash((message.topic, message.payload, message.client_id))
    if len(messages) == 1:
        sum(range(20_000))
    return _store(self, messages, *args, **kwargs)


Database.store = _twice
"""


@pytest.mark.slow
@needs_history
def test_no_step_is_slower_than_at_the_baseline() -> None:
    """In the median of the rounds, no step takes over 3 % more CPU time than in the baseline commit."""
    ended = CliRunner().invoke(bench, ["compare-commits", BASELINE])
    if "can't be read" in ended.output:
        pytest.skip(f"the repository's history lacks {BASELINE}")
    assert 0 == ended.exit_code, ended.output
