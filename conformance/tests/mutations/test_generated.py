"""Generated mutations: each changes one place, and a process that imports a mutated file has the mutation."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parent))  # the modules beside this file belong to no package

import reaching
from generated import VARIABLE, changed, mutations

SOURCE = """
LIMIT = 7

def taken(given, lock, other):
    with lock:
        given.sort()
    while True:
        if len(given) > 1 and other:
            raise ValueError('a text of 2 numbers')
        break
    return print(given[0] - 1, 1000), given.pop(), min(LIMIT, other), given[0] if given else None
"""


def test_every_kind_of_mutation_is_made() -> None:
    """Operators, constants, calls, arguments, conditions and statements within functions each have their mutations."""
    numbers = range(len(list(mutations(ast.parse(SOURCE)))))
    described = [changed(SOURCE, number)[-1] for number in numbers]
    assert [
        "0  →  -1",
        "0  →  -1",
        "0  →  1",
        "0  →  1",
        "1  →  0",
        "1  →  0",
        "1  →  2",
        "1  →  2",
        "1000  →  1001",
        "1000  →  999",
        "break  →  continue",
        "given.pop()  →  given",
        "given.sort()  →  given",
        "given.sort()  →  pass",
        "given[0] - 1  →  given[0] + 1",
        "given[0] if given else None  →  None if given else given[0]",
        "if len(given) > 1 and other:  →  if not (len(given) > 1 and other):",
        "len(given)  →  given",
        "len(given) > 1  →  len(given) >= 1",
        "len(given) > 1 and other  →  len(given) > 1 or other",
        "print(given[0] - 1, 1000)  →  print(1000, given[0] - 1)",
        "raise ValueError('a text of 2 numbers')  →  pass",
        "while True:  →  while not True:",
        "with lock:  →  given.sort()",
    ] == sorted(described)


def test_a_process_runs_its_mutation(tmp_path: Path) -> None:
    """A process that a test starts runs the mutated code, and the source file is not changed."""
    file = tmp_path / "some.py"
    file.write_text("def one():\n    return 1\n")
    assert "2\n" == printed("import some; print(some.one())", tmp_path, **{VARIABLE: f"0 {file}"})
    assert "def one():\n    return 1\n" == file.read_text()


def test_reached_lines_are_recorded(tmp_path: Path) -> None:
    """The lines that each test reaches are recorded, even in a process that the test kills."""
    file = tmp_path / "some.py"
    file.write_text("import os\ndef one(last):\n    if last:\n        os.kill(os.getpid(), 9)\n    return 1\n")
    tests = tmp_path / "test_some.py"
    tests.write_text(
        "import subprocess, sys, some\n"
        "def test_here():\n    some.one(False)\n"
        "def test_there():\n    subprocess.run([sys.executable, '-c', 'import some; some.one(True)'])\n"
    )
    reaching.prepare(tmp_path, [file])
    arguments = ["-c", "/dev/null", "-q", "-p", "reaching", "-p", "no:cacheprovider", str(tests)]
    printed(
        f"import pytest; raise SystemExit(pytest.main({arguments}))", tmp_path, **{reaching.VARIABLE: str(tmp_path)}
    )
    lines = {test.rpartition("::")[2]: places for test, (_, places) in reaching.read(tmp_path).items()}
    assert {"test_here": [(str(file), 3), (str(file), 5)], "test_there": [(str(file), 3), (str(file), 4)]} == lines


def printed(program: str, beside: Path, **variables: str) -> str:
    """Run a program that can import modules beside it and the modules of this folder; return its output."""
    path = os.pathsep.join([str(beside), str(Path(__file__).parent)])
    command = [sys.executable, "-c", program]
    environment = {**os.environ, **variables, "PYTHONPATH": path}
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout
