"""Records which lines of source files each test reaches, also in the processes that the test starts.

Each statement within a function is preceded by a probe, which sets the byte of its line in a file that all processes
map into their memory: a process that is killed has recorded its lines, too. `pytest` loads this module as a plugin,
which reads the bytes after each test (PYTEST_DONT_REWRITE: it is imported before).
"""

from __future__ import annotations

import ast
import builtins
import json
import mmap
import os
import time
from collections.abc import Generator, Sequence
from importlib.machinery import SourceFileLoader
from pathlib import Path
from typing import Any

import pytest

VARIABLE = "REACHED"
"""The environment variable that names the directory of the records."""
_PROBED = "__reached__"
"""The name of the mapped bytes in the probed code."""


def prepare(directory: Path, files: Sequence[Path]) -> None:
    """Create the empty records of these files in a directory."""
    starts, size = {}, 0
    for file in files:
        starts[str(file)] = size
        size += len(file.read_text().splitlines()) + 1
    Path(directory, "starts.json").write_text(json.dumps(starts))
    Path(directory, "bytes").write_bytes(bytes(size))


def read(directory: Path) -> dict[str, tuple[float, list[tuple[str, int]]]]:
    """Return, for each passed test, its seconds, and the file and line of each statement that the test reached."""
    starts = json.loads(Path(directory, "starts.json").read_text())
    found = {}
    for line in Path(directory, "tests").read_text().splitlines():
        test, seconds, places = json.loads(line)
        names = sorted(starts, key=starts.__getitem__, reverse=True)
        found[test] = (
            seconds,
            [next((name, place - starts[name]) for name in names if starts[name] <= place) for place in places],
        )
    return found


def _mapped() -> mmap.mmap:
    with Path(os.environ[VARIABLE], "bytes").open("r+b") as file:
        return mmap.mmap(file.fileno(), 0)


def probed(source: str, start: int) -> ast.Module:
    """Return a source's syntax tree with a probe before each statement within functions."""
    tree = ast.parse(source)
    for function in ast.walk(tree):
        if isinstance(function, ast.FunctionDef):
            _probe(function.body, start, first=1 if ast.get_docstring(function, clean=False) is not None else 0)
    return ast.fix_missing_locations(tree)


def _probe(body: list[ast.stmt], start: int, first: int = 0) -> None:
    for index in range(len(body) - 1, first - 1, -1):
        statement = body[index]
        if not isinstance(statement, ast.FunctionDef | ast.ClassDef):
            holders = [statement, *getattr(statement, "handlers", []), *getattr(statement, "cases", [])]
            for inner in (getattr(each, name, []) for each in holders for name in ("body", "orelse", "finalbody")):
                if inner:
                    _probe(inner, start)
        probe = ast.parse(f"{_PROBED}[{start + statement.lineno}] = 1").body[0]
        for node in ast.walk(probe):
            ast.copy_location(node, statement)
        body.insert(index, probe)


def install() -> None:
    """Make this process import the recorded files with their probes."""
    starts = json.loads(Path(os.environ[VARIABLE], "starts.json").read_text())
    vars(builtins)[_PROBED] = _mapped()
    load = SourceFileLoader.get_code

    def get_code(loader: SourceFileLoader, name: str) -> object:
        if loader.path not in starts:
            return load(loader, name)
        return compile(probed(Path(loader.path).read_text(), starts[loader.path]), loader.path, "exec")

    SourceFileLoader.get_code = get_code


class _Recorder:
    """A pytest plugin that writes each passed test's seconds and bytes to the file ``tests``."""

    def __init__(self, directory: Path) -> None:
        self._bytes = _mapped()
        self._tests = (directory / "tests").open("a", buffering=1)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Generator[None, Any, Any]:
        """Record the lines that one test reaches, with its fixtures."""
        self._bytes[:] = bytes(len(self._bytes))
        started = time.monotonic()
        done = yield
        places = [place for place, byte in enumerate(bytes(self._bytes)) if byte]
        self._tests.write(json.dumps([item.nodeid, time.monotonic() - started, places]) + "\n")
        return done


def pytest_configure(config: pytest.Config) -> None:
    """Register the recorder."""
    config.pluginmanager.register(_Recorder(Path(os.environ[VARIABLE])))
