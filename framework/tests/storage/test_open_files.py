"""A process that may open no more files is told that, whatever it was about to do; what is stored is not at fault."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import topicstore as ts
from topicstore_conformance.conditions.skipping import need

pytestmark = pytest.mark.slow

SCARCE = """
import os, resource
import topicstore as ts

path = arguments[0]

def write():
    with ts.open(path, auto_compact=False) as db:
        db.store([ts.Message("t", b"new")])

def read():
    with ts.open(path, read_only=True) as db:
        assert len(list(db.replay("#"))) >= 20

def verify():
    assert not db.verify().damages

def queue():
    db.queues.open("q").append([ts.Message("t", b"1")])

def outcome(act):
    try:
        act()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "fine"

def tell(act, most):
    for free in range(most):
        taken = []
        try:
            while True:
                taken.append(os.open(os.devnull, os.O_RDONLY))
        except OSError:
            for _ in range(free):
                os.close(taken.pop())
        ended = outcome(act)
        for file in taken:
            os.close(file)
        say(act.__name__, free, ended)

write(), read()  # whatever is loaded then
resource.setrlimit(resource.RLIMIT_NOFILE, (200, 200))
tell(write, 32), tell(read, 32)
with ts.open(path, auto_compact=False) as db:
    tell(verify, 4), tell(queue, 32)
"""


@pytest.mark.parametrize("backend", ["rocksdb", "leveldb", "duckdb"])
def test_too_many_open_files_are_told(tmp_path: Path, run_until: Callable[..., Any], backend: str) -> None:
    """However many files may still be opened, it is done, or said why not; and done where there are enough."""
    need(backend)
    with ts.open(tmp_path / "db", backend=backend, auto_compact=False) as db:
        db.store([ts.Message("t", b"%d" % n) for n in range(10)])
        db.add_generation()
        db.archives.archive(tmp_path / "export")
        db.store([ts.Message("t", b"%d" % n) for n in range(10)])
    said = run_until(None, SCARCE, str(tmp_path / "db"))
    for act in ("write", "read", "verify", "queue"):
        told = [ended for name, _, ended in said if name == act]
        unclear = [ended for ended in told if ended != "fine" and not ended.startswith("TooManyOpenFilesError: ")]
        assert [] == unclear
        assert all("ulimit -n" in ended for ended in told if ended != "fine")
        assert told[0] != "fine"
        assert told[-1] == "fine"
    with ts.open(tmp_path / "db") as db:
        written = sum(name == "write" and ended == "fine" for name, _, ended in said)
        assert db.verify().messages >= 20 + 1 + written
        assert [] == db.verify().damages


def test_an_archive_that_may_not_be_read_is_not_damaged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Permission denied is told as that, by replays and by a verification."""
    with ts.open(tmp_path / "db", backend="memory") as db:
        db.store([ts.Message("t", b"1")])
        db.add_generation()
        db.archives.archive(tmp_path / "export")

        def denied(path: Path) -> bytes:
            raise PermissionError(13, "Permission denied", str(path))

        with monkeypatch.context() as patched:
            patched.setattr(Path, "read_bytes", denied)
            for act in (db.verify, lambda: list(db.replay("#"))):
                with pytest.raises(ts.EngineError, match=r"generation 1, .*Permission denied") as told:
                    act()
                assert not isinstance(told.value, ts.CorruptionError)
        assert 1 == len(list(db.replay("#")))
