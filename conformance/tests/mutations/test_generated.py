"""Generated mutations: each changes one place, and a process that imports a mutated file has the mutation."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parent))  # the modules beside this file belong to no package

from generated import REACHED, VARIABLE, changed, places

SOURCE = """
LIMIT = 7

def taken(given, lock):
    with lock:
        given.sort()
        return given[0] if len(given) > 1 or not given else None
"""


def test_each_place_has_a_change_of_its_own() -> None:
    """Every changeable place within functions has one mutation, which removes a statement or changes an expression."""
    told = [changed(SOURCE, number)[1].split(": ", 1)[1] for number, _ in enumerate(places(ast.parse(SOURCE)))]
    assert sorted(told) == [
        "0  →  1",
        "1  →  2",
        "given.sort()  →  pass",
        "len(given) > 1  →  len(given) >= 1",
        "len(given) > 1 or not given  →  len(given) > 1 and (not given)",
        "not given  →  given",
        "with lock:  →  given.sort(); return given[0] if len(given) > 1 or not given else None",
    ]


def test_a_process_runs_its_mutation_and_records_that_it_was_reached(tmp_path: Path) -> None:
    """A process runs the mutated code and records that it was reached, and the source file is not changed."""
    file, reached = tmp_path / "some.py", tmp_path / "reached"
    file.write_text("def one():\n    return 1\n")
    path = os.pathsep.join([str(tmp_path), str(Path(__file__).parent)])
    environment = {**os.environ, VARIABLE: f"0 {file}", REACHED: str(reached), "PYTHONPATH": path}
    command = [sys.executable, "-c", "import some; print(some.one())"]
    assert "2\n" == subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout
    assert reached.exists()
    assert "def one():\n    return 1\n" == file.read_text()
