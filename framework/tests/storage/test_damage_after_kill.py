"""Files that are missing or damaged after a kill are reported as such, with the path of the shard or file."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import pytest
import topicstore as ts
from topicstore.plugins import load_target, registry
from topicstore_conformance.conditions.skipping import need
from topicstore_conformance.faults import namespaces

MAKE = """
import os, random, signal, sys
import topicstore as ts

draw = random.Random(1)
for life in range(3):
    db = ts.open(sys.argv[1], backend=sys.argv[2], shards=2, durability="sync", auto_compact=False)
    for number in range(8):
        db.store([ts.Message(f"t/{n}", draw.randbytes(100), f"c{n}") for n in range(10)])
    if life == 1:
        db.compact()
    if life == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    db.close()
"""
STORED = 3 * 8 * 10
BACKENDS = ["rocksdb", "leveldb", "duckdb"]


@pytest.fixture(scope="module", params=BACKENDS)
def killed(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A database of two shards after a kill."""
    need(request.param)
    path = tmp_path_factory.mktemp("killed") / "db"
    program = [sys.executable, "-c", MAKE, str(path), request.param]
    assert -signal.SIGKILL == subprocess.run(program, check=False).returncode
    assert not (path / "closed").exists()
    return path


def resize(file: Path, parts: int) -> None:
    os.truncate(file, file.stat().st_size // 2 * parts)


def flip_middle(file: Path) -> None:
    data = bytearray(file.read_bytes())
    middle = len(data) // 2
    data[middle : middle + 8] = bytes(byte ^ 0xFF for byte in data[middle : middle + 8])
    file.write_bytes(data)


def remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink()


HARMS: dict[str, Callable[[Path], None]] = {
    "empty": lambda file: resize(file, 0),
    "half": lambda file: resize(file, 1),
    "flipped": flip_middle,
    "removed": remove,
}


def needed(path: Path, how: str) -> Iterator[Path]:
    """Yield the paths of one shard to damage, relative to the database: files that the engine needs.

    If they are to be removed, the shard's directory comes first.
    """
    with ts.open(path, mode="r") as db:
        unneeded = load_target(registry().backend(db.storage.manifest.backend)).unneeded
    shard = path / "shard-0001"
    if how == "removed":
        yield shard.relative_to(path)
    for file in sorted(shard.iterdir()):
        if file.stat().st_size and not any(fnmatchcase(file.name, pattern) for pattern in unneeded):
            yield file.relative_to(path)


def check_reported(path: Path, **options: Any) -> bool:
    """Open and read a database, and check that each loss of messages is reported with a path or shard.

    Return whether the database could be opened.
    """
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        try:
            db = ts.open(path, auto_compact=False, **options)
        except ts.CorruptionError as error:
            check_text(error, str(path))
            return False
        with db:
            try:
                messages = sum(1 for _ in db.replay("#"))
            except ts.CorruptionError as error:
                check_text(error, "shard")
                messages = 0
            damages = db.verify().damages
    assert messages == STORED or warned or damages
    if not options.get("recovery"):
        assert messages == STORED or damages
    for each in (*damages, *(warning.message for warning in warned)):
        check_text(each, "shard")
    return True


def check_text(told: object, place: str) -> None:
    assert place in str(told)
    assert "reader-" not in str(told)


WAYS: list[dict[str, Any]] = [{}, {"mode": "r"}, {"recovery": "salvage"}, {"recovery": "point_in_time"}]


@pytest.mark.slow
@pytest.mark.parametrize("options", WAYS, ids=str)
@pytest.mark.parametrize("how", list(HARMS))
def test_harmed_files(killed: Path, tmp_path: Path, how: str, options: dict[str, Any]) -> None:
    """A damaged or missing file is reported with its path or shard, for reading and writing, with any `recovery`."""
    for name in needed(shutil.copytree(killed, tmp_path / "looked at"), how):
        path = shutil.copytree(killed, tmp_path / "db")
        HARMS[how](path / name)
        check_reported(path, **options)
        shutil.rmtree(path)


@pytest.mark.parametrize("options", [*WAYS[:-1], pytest.param(WAYS[-1], marks=pytest.mark.slow)], ids=str)
def test_harm_beside_a_damaged_log(killed: Path, tmp_path: Path, options: dict[str, Any]) -> None:
    """Damage is reported with the database's path, even if the engine opened a copy or links of the shard's files."""
    for name in needed(shutil.copytree(killed, tmp_path / "looked at"), "flipped"):
        path = shutil.copytree(killed, tmp_path / "db")
        flip_middle(path / name)
        for log in path.glob("shard-0001/*[gl]"):
            if log.suffix in (".log", ".wal") and log != path / name:
                flip_middle(log)
        check_reported(path, **options)
        shutil.rmtree(path)


@pytest.mark.parametrize("what", ["directory", "main file"])
def test_what_is_gone_is_a_loss(killed: Path, tmp_path: Path, what: str) -> None:
    """A missing shard directory or main file raises `DataLossError` in any mode, and nothing is created."""
    path = shutil.copytree(killed, tmp_path / "db")
    shard = path / "shard-0001"
    (main,) = (file for file in shard.iterdir() if file.name in ("CURRENT", "shard.duckdb"))
    gone = shard if what == "directory" else main
    remove(gone)
    left = sorted(shard.rglob("*"))
    for options in WAYS:
        with pytest.raises(ts.DataLossError, match=f"^{gone}: it is gone"):
            ts.open(path, **options)
        assert left == sorted(shard.rglob("*"))
    assert not gone.exists()


UNREADABLE = """
import os
import topicstore as ts

shard = arguments[0] + "/shard-0001"
os.chmod(shard, 0)
for options in ({}, {"mode": "r"}, {"recovery": "salvage"}):
    try:
        ts.open(arguments[0], **options)
    except ts.EngineError as error:
        say(type(error).__name__, arguments[0] in str(error))
    except OSError as error:
        say(type(error).__name__, arguments[0] in str(error))
os.chmod(shard, 0o700)
"""


def test_what_may_not_be_read_is_not_lost(killed: Path, tmp_path: Path) -> None:
    """A shard's directory without read permission is reported as inaccessible, and not as lost."""
    if (reason := namespaces.why_not()) is not None:
        pytest.skip(reason)
    path = shutil.copytree(killed, tmp_path / "db")
    said = namespaces.run_unprivileged(UNREADABLE, path)
    assert 3 == len(said)
    assert {("EngineError", True), ("FileAccessError", True)} >= {tuple(each) for each in said}
