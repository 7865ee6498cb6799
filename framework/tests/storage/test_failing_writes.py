"""Failures under an open database: a file system that becomes read-only, and lost permissions."""

from __future__ import annotations

from pathlib import Path

import pytest
import topicstore as ts
from topicstore_conformance.backend import faults
from topicstore_conformance.conditions.skipping import need
from topicstore_conformance.faults import namespaces

BACKENDS = ["rocksdb", "leveldb", "duckdb"]

FAILING = """
import errno, os
import topicstore as ts
from topicstore_conformance.backend import faults

path, backend, durability = arguments
db = ts.open(path, backend=backend, durability=durability, auto_compact=False)
stored = 0
for _ in range(3):
    db.store([ts.Message("t", b"%d" % (stored + n) + bytes(1_000)) for n in range(20)])
    stored += 20
say("stored", stored)
faults.fail(faults.WRITES + faults.SYNCS, errno.EROFS)
for attempt in range(3):
    try:
        db.store([ts.Message("t", b"lost" + bytes(100_000))] * 10)
        say("taken", "")
    except Exception as error:
        say(type(error).__name__, str(error))
say("read", len(list(db.replay("#"))))
print(json.dumps(said), flush=True)
os._exit(0)  # as if killed
"""
DENIED = """
import os
import topicstore as ts

path = arguments[0]
for number in (0o000, 0o500):
    for name in (".", "LOCK", "topicstore.json", "shard-0000", "shard-0000/LOCK"):
        place = os.path.normpath(os.path.join(path, name))
        if not os.path.exists(place):
            continue
        before = os.stat(place).st_mode
        os.chmod(place, number & before)
        for read_only in (False, True):
            try:
                with ts.open(path, mode="r" if read_only else "a") as db:
                    found = [message.payload.decode() for message in db.replay("#")]
                    say(number, name, read_only, "fine", str(found))
            except Exception as error:
                say(number, name, read_only, type(error).__name__, str(error))
        os.chmod(place, before)
with ts.open(path, auto_compact=False) as db:
    for name in ("LOCK", "shard-0000", "."):
        os.chmod(os.path.normpath(os.path.join(path, name)), 0o500)
    for act in (lambda: db.store([ts.Message("t", b"2")]), db.add_generation, lambda: db.queues.open("q")):
        try:
            act()
            say(0, "", False, "fine", "['1']")
        except Exception as error:
            say(0, "", False, type(error).__name__, str(error))
    for name in (".", "shard-0000", "LOCK"):
        os.chmod(os.path.normpath(os.path.join(path, name)), 0o700)
"""


@pytest.mark.parametrize("durability", ["commit", "sync"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_file_system_that_becomes_read_only(tmp_path: Path, backend: str, durability: str) -> None:
    """If the file system becomes read-only, writes fail with a reason, and all acknowledged messages can be read."""
    need(backend)
    if (reason := faults.why_not() or namespaces.why_not()) is not None:
        pytest.skip(reason)
    said = namespaces.run_unprivileged(FAILING, tmp_path / "db", backend, durability)
    stored, *attempts, read = said
    assert ["stored", 60] == stored
    assert ["read", 60] == read
    assert "EngineError" == attempts[0][0]
    assert "Read-only file system" in attempts[0][1]
    assert ["ShardReadOnlyError"] * 2 == [name for name, _ in attempts[1:]]
    with ts.open(tmp_path / "db", auto_compact=False) as db:
        assert list(range(60)) == [int(message.payload.rstrip(b"\0")) for message in db.replay("#")]
        assert [] == db.verify().damages
        db.store([ts.Message("t", b"60")])


@pytest.mark.parametrize("backend", BACKENDS)
def test_permission_denied(tmp_path: Path, backend: str) -> None:
    """Lost permissions are reported as such and never as damage; with permissions again, all messages remain."""
    need(backend)
    if (reason := namespaces.why_not()) is not None:
        pytest.skip(reason)
    with ts.open(tmp_path / "db", backend=backend, auto_compact=False) as db:
        db.store([ts.Message("t", b"1")])
    said = namespaces.run_unprivileged(DENIED, tmp_path / "db")
    for _, name, read_only, ended, text in said:
        if ended == "fine":
            assert "['1']" == text, name
        else:
            assert ended in ("FileAccessError", "EngineError", "ShardReadOnlyError"), (name, read_only, text)
            assert "Permission denied" in text
            assert "open already" not in text
    assert {"fine", "FileAccessError", "EngineError"} <= {ended for *_, ended, _ in said}
    stored = [message.payload for message in _replayed(tmp_path / "db")]
    assert [b"1", b"2"][: 1 + (said[-3][3] == "fine")] == stored


def _replayed(path: Path) -> list[ts.Message]:
    with ts.open(path) as db:
        assert [] == db.verify().damages
        return list(db.replay("#"))


LOST_AND_FOUND = """
import os
import topicstore as ts

path = arguments[0]
os.mkdir(path + "/lost+found", 0)
for mode in ("a", "r"):
    with ts.open(path, mode=mode) as db:
        say(len(list(db.replay("#"))))
os.rmdir(path + "/lost+found")
"""


def test_a_directory_of_the_file_system(tmp_path: Path) -> None:
    """A ``lost+found`` directory that only root can read doesn't prevent opening."""
    if (reason := namespaces.why_not()) is not None:
        pytest.skip(reason)
    with ts.open(tmp_path / "db") as db:
        db.store([ts.Message("t", b"1")])
    assert [[1], [1]] == namespaces.run_unprivileged(LOST_AND_FOUND, tmp_path / "db")
