"""``topicstore bench compare-commits BASE``: whether any step takes more CPU time than at another commit.

Both commits are measured in turns, in new processes, so that a machine whose speed drifts changes both. CPU time of
all threads is compared, because threads of a process also use cores that other work needs.
"""

from __future__ import annotations

import io
import json
import math
import os
import statistics
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Sequence
from pathlib import Path

import attrs
import click
import topicstore
from topicstore.cli.terminal.display import console, make_table
from topicstore.cli.terminal.exits import DAMAGED, USAGE, Failure

from topicstore_benchmarks.installed import ENGINE, check_installed
from topicstore_benchmarks.timing import progress

from . import steps

__all__ = ["ROUNDS", "Step", "compare_commits", "compare_commits_command", "extracted"]

ROUNDS = 7
_REPEATS = 3
"""The maximum number of times that the rounds are repeated while a step seems slower."""
_CHANCE = 0.05
"""The level of the sign test: the highest probability of a step's result if both commits were equally fast."""
_FEWEST = 5
"""The least number of rounds in which a sign test at this level can find a difference."""
_PACKAGES = ("framework", "layouts", "backends")
"""Folders that hold the measured code."""


@attrs.frozen(kw_only=True)
class Step:
    """The CPU time of a step at both commits, in nanoseconds a message or a call, of each round."""

    name: str
    before: Sequence[float]
    after: Sequence[float]

    @property
    def ratio(self) -> float:
        """The median of the rounds' ratios to the base; above 1 is slower."""
        return statistics.median(self._ratios())

    def slower(self, most: float) -> bool:
        """Return whether the median ratio is over ``most``, and significantly over 1.

        On a busy machine, the ratios of rounds vary by more than ``most``. So a one-sided sign test at the level
        `_CHANCE` must also reject that both commits are equally fast (W. J. Conover, "Practical Nonparametric
        Statistics", section 3.4). With fewer than `_FEWEST` rounds the test can't reject, and only the median counts.
        """
        ratios = self._ratios()
        rounds, over = len(ratios), sum(ratio > 1 for ratio in ratios)
        chance = sum(math.comb(rounds, count) for count in range(over, rounds + 1)) / 2**rounds
        return self.ratio > most and (chance <= _CHANCE or rounds < _FEWEST)

    def _ratios(self) -> list[float]:
        return [now / then for then, now in zip(self.before, self.after, strict=True)]


def compare_commits(base: Path, tree: Path, *, rounds: int = ROUNDS, most: float = 1.03) -> list[Step]:
    """Measure both checkouts in turns; repeat this up to three times while a median ratio of times is above ``most``.

    Raises `subprocess.CalledProcessError` if a measurement fails.
    """
    found = _rounds(base, tree, rounds)
    for _ in range(_REPEATS):
        if not any(step.ratio > most for step in found):
            break
        progress("some steps seem slower: measured again")
        again = {step.name: step for step in _rounds(base, tree, rounds)}
        found = [
            Step(
                name=step.name,
                before=[*step.before, *again[step.name].before],
                after=[*step.after, *again[step.name].after],
            )
            for step in found
        ]
    return found


def _rounds(base: Path, tree: Path, rounds: int) -> list[Step]:
    before: list[dict[str, float]] = []
    after: list[dict[str, float]] = []
    for number in range(rounds):
        progress(f"round {number + 1} of {rounds}")
        sides = [(base, before), (tree, after)]
        for checkout, values in sides if number % 2 else reversed(sides):
            values.append(_measured(checkout))
    names = [name for name in after[0] if name in before[0]]
    return [Step(name=name, before=[r[name] for r in before], after=[r[name] for r in after]) for name in names]


def _measured(checkout: Path) -> dict[str, float]:
    path = os.pathsep.join(str(checkout / package) for package in _PACKAGES)
    with tempfile.TemporaryDirectory(prefix="topicstore-bench-") as directory:
        command = [sys.executable, steps.__file__, directory]
        done = subprocess.run(command, env={**os.environ, "PYTHONPATH": path}, stdout=subprocess.PIPE, check=True)  # noqa: S603
    measured: dict[str, float] = json.loads(done.stdout)
    return measured


def _repository() -> Path:
    """Return the checkout that topicstore is imported from. Raises `Failure` if it is no checkout."""
    root = Path(topicstore.__file__).parents[2]
    if not (root / ".git").exists():
        raise Failure("compare-commits needs a git checkout with topicstore installed from it: make test", USAGE)
    return root


def extracted(repository: Path, commit: str, directory: Path) -> Path:
    """Write the files of a commit into a directory; return it. Raises `Failure` if there is no such commit."""
    command = ["git", "-C", str(repository), "archive", "--end-of-options", commit, *_PACKAGES]
    done = subprocess.run(command, capture_output=True)  # noqa: S603 - a command of ours
    if done.returncode:
        raise Failure(f"{commit} can't be read: {done.stderr.decode(errors='replace').strip()}", USAGE)
    with tarfile.open(fileobj=io.BytesIO(done.stdout)) as packed:
        packed.extractall(directory, filter="data")
    return directory


@click.command("compare-commits")
@click.argument("base")
@click.argument("commit", required=False)
@click.option("--rounds", type=click.IntRange(min=1), default=ROUNDS, show_default=True)
@click.option("--most", type=float, default=3.0, show_default=True, help="Percent more of CPU time that pass.")
@click.option("--json", "as_json", is_flag=True, help="Print the nanoseconds of every round as JSON instead.")
def compare_commits_command(*, base: str, commit: str | None, rounds: int, most: float, as_json: bool) -> None:
    """Measure commit BASE and COMMIT, or the files as they are, in turns; exit with 1 if a step takes more CPU time.

    While a step seems to take more, all steps are measured again, up to three times. On a busy machine, rounds vary:
    a step counts only if a sign test of its rounds shows that it is slower.
    """
    check_installed(*ENGINE)
    repository = _repository()
    with tempfile.TemporaryDirectory(prefix="topicstore-commits-") as name:
        first = extracted(repository, base, Path(name, "base"))
        second = repository if commit is None else extracted(repository, commit, Path(name, "commit"))
        found = compare_commits(first, second, rounds=rounds, most=1 + most / 100)
    slower = [step for step in found if step.slower(1 + most / 100)]
    if as_json:
        click.echo(json.dumps([attrs.asdict(step) | {"ratio": step.ratio} for step in found], indent=2))
    else:
        rows = [
            (
                step.name,
                f"{statistics.median(step.before):,.0f}",
                f"{statistics.median(step.after):,.0f}",
                f"{step.ratio:.3f}",
                "slower" if step in slower else "",
            )
            for step in found
        ]
        console().print(make_table("step~", f"{base}, ns>", f"{commit or 'now'}, ns>", "ratio>", "", rows=rows))
    if slower:
        named = ", ".join(f"{step.name} ({step.ratio:.2f})" for step in slower)
        raise Failure(f"more CPU time than at {base}: {named}", DAMAGED)
