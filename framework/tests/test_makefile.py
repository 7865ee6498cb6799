"""The packages that `make` installs for each target, determined by dry runs, which install nothing."""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
DEMO, REST = "--editable '.[demo]'", "--editable '.[all]' --group dev"


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """Return a folder with the files that the Makefile depends on."""
    if shutil.which("make") is None:
        pytest.skip("needs make: apt-get install make")
    (tmp_path / ".ci").mkdir()
    for name in ("Makefile", "pyproject.toml", ".ci/constraints.txt"):
        shutil.copy(ROOT / name, tmp_path / name)
    return tmp_path


def planned(checkout: Path, target: str) -> str:
    """Return the commands that make would run for a target."""
    done = subprocess.run(
        ["make", "--dry-run", "--no-print-directory", target], cwd=checkout, capture_output=True, text=True
    )
    assert 0 == done.returncode, done.stderr
    return done.stdout


@pytest.mark.parametrize("name", ["README.md", "CONTRIBUTING.md"])
def test_targets_in_documents_are_there(checkout: Path, name: str) -> None:
    """`make` has each target that the documents name; what the targets run is tested elsewhere."""
    commands = re.findall(r"^make .*?(?= *#|$)", (ROOT / name).read_text(), re.MULTILINE)
    assert len(commands) >= 3
    for _, *arguments in map(shlex.split, commands):
        subprocess.run(["make", "--dry-run", *arguments], cwd=checkout, capture_output=True, check=True)


def test_the_demo_installs_what_it_needs(checkout: Path) -> None:
    """The demo installs neither Spark nor the tests' packages, and first prints the size of its download."""
    commands = planned(checkout, "demo")
    assert DEMO in commands
    assert REST not in commands
    assert commands.index("about 440 MB") < commands.index(DEMO) < commands.index("topicstore.cli demo")


@pytest.mark.parametrize("target", ["test", "lint", "conformance", "bench", "bench-quick", "bench-figures"])
def test_other_targets_install_the_rest_after_it(checkout: Path, target: str) -> None:
    """Other targets install the demo's packages first and then the rest, each only once."""
    commands = planned(checkout, target)
    assert commands.index(DEMO) < commands.index("about 1,400 MB") < commands.index(REST)
    (checkout / ".venv").mkdir()
    (checkout / ".venv" / ".demo-installed").touch()
    assert DEMO not in planned(checkout, target)
    assert REST in planned(checkout, target)
    (checkout / ".venv" / ".all-installed").touch()
    for one in ("demo", target):
        assert "pip install" not in planned(checkout, one)
