"""Skeletons of plugins: `topicstore plugins new`."""

from __future__ import annotations

import ast
import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from .conftest import run

STORE = """
class Store:
    def __init__(self, path, names, options, *, create):
        self.maps = {name: {} for name in names}

    def apply(self, ranges, changes, *, sync):
        changed = {name: dict(pairs) for name, pairs in self.maps.items()}
        for name, start, end in ranges:
            for key in [key for key in changed[name] if start <= key < end]:
                del changed[name][key]
        for name, key, value in changes:
            changed[name].pop(key, None)
            if value is not None:
                changed[name][key] = value
        self.maps = changed

    def flush(self):
        pass

    def begin(self):
        return self.maps

    def end(self, view):
        pass

    def get(self, view, name, key):
        return view[name].get(key)

    def pairs(self, view, name, start, end, *, reverse):
        keys = [key for key in view[name] if (start is None or key >= start) and (end is None or key < end)]
        return ((key, view[name][key]) for key in sorted(keys, reverse=reverse))

    def size(self):
        values = [value for pairs in self.maps.values() for value in pairs.values()]
        return EngineInfo(disk_bytes=0, memory_bytes=sum(map(len, values)))

    def close(self):
        self.maps = {}
"""
"""The class of the backend's skeleton, written for a map in memory."""
ROWS = """
def encode(row, key):
    return add_checksum(struct.pack(">IQQ", *key), msgspec.msgpack.encode(row))


def decode(value, key):
    return msgspec.msgpack.decode(strip_checksum(struct.pack(">IQQ", *key), value), type=Row)
"""
"""The functions of the layout's skeleton."""


@pytest.mark.parametrize(("kind", "name"), [("backend", "two_words"), ("layout", "by_day")])
def test_a_skeleton_is_a_whole_distribution(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, name: str
) -> None:
    """The command writes a new folder, in which no placeholder is left and each module can be compiled."""
    monkeypatch.chdir(tmp_path)
    printed = run("plugins", "new", name, "--kind", kind).stdout.split()
    folder = tmp_path / f"topicstore-{name.replace('_', '-')}"
    assert sorted(map(Path, printed)) == sorted(
        path.relative_to(tmp_path) for path in folder.rglob("*") if path.is_file()
    )
    for path in map(Path, printed):
        text = path.read_text()
        assert not re.search(r"\$\{?[a-zA-Z]", text), path
        if path.suffix == ".py":
            ast.parse(text)
    assert "File exists" in run("plugins", "new", name, "--kind", kind, code=3).stderr


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (["Upper"], "is no name of a plugin"),
        (["a-b"], "is no name of a plugin"),
        (["memory"], "there is a backend 'memory' already"),
        (["block", "--kind", "layout"], "there is a layout 'block' already"),
    ],
)
def test_a_name_that_can_not_be(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str], why: str
) -> None:
    """A name that no module can have, or that is taken, is refused, and nothing is written."""
    monkeypatch.chdir(tmp_path)
    assert why in run("plugins", "new", *arguments, code=2).stderr
    assert [] == list(tmp_path.iterdir())


def own_tests(folder: Path, target: Path) -> str:
    """Install a distribution from its folder outside this environment, and return the last line of its own tests."""
    # pip uses the installed build backend, and no network
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", "--no-build-isolation"]
    subprocess.run([*pip, "--upgrade", "--target", target, folder], check=True, capture_output=True)
    environment = {**os.environ, "PYTHONPATH": str(target), "TOPICSTORE_CONFORMANCE": "quick"}
    program = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-c", folder / "pyproject.toml"]
    command, nothing = [*program, folder / "tests"], subprocess.DEVNULL
    done = subprocess.run(command, cwd=folder, env=environment, stdin=nothing, capture_output=True, text=True)
    assert 0 == done.returncode, done.stdout[-4_000:]
    return done.stdout.splitlines()[-1]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["backend", "layout"])
def test_a_skeleton_is_green_before_and_after_it_is_written(tmp_path: Path, kind: str) -> None:
    """A new skeleton's tests of unwritten code are expected failures; once the code is written, all tests pass."""
    if importlib.util.find_spec("hatchling") is None:
        pytest.skip("needs hatchling: pip install hatchling")
    folder, target = tmp_path / "distribution", tmp_path / "installed"
    run("plugins", "new", "fresh", "--kind", kind, "--directory", folder)
    before = own_tests(folder, target)
    assert "xfailed" in before
    assert "passed" in before
    package, test = folder / "src" / "topicstore_fresh", folder / "tests" / "test_fresh.py"
    if kind == "backend":
        module = package / "engine.py"
        written = re.sub(r"(?s)\nclass Store:\n.*?\n\n(?=\nclass View)", STORE, module.read_text())
        test.write_text(test.read_text().replace("raw_get=raw_get, raw_put=raw_put", ""))  # the store has no raw access
    else:
        module = package / "layout.py"
        written = re.sub(r"(?s)\ndef encode.*?\n\n(?=\nclass Fresh)", ROWS, module.read_text())
        written = written.replace("import time\n", "import struct\nimport time\n").replace(
            "from topicstore.contract.engine",
            "from topicstore.contract.checksums import add_checksum, strip_checksum\nfrom topicstore.contract.engine",
        )
    assert "to be written:" not in written
    module.write_text(written)
    after = own_tests(folder, target)
    assert "xfailed" not in after
    assert "passed" in after
