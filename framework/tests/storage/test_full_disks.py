"""Full disks: a database can still be opened, and dropping a generation frees space."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from topicstore_conformance.conditions.skipping import need
from topicstore_conformance.faults import namespaces

pytestmark = pytest.mark.slow

ROOM = {
    "rocksdb": {"write_buffer_bytes": 4 << 20},
    "leveldb": {"write_buffer_bytes": 2 << 20, "file_bytes": 1 << 20},
}
SIZE = 160 << 20

SHARED = """
import os, subprocess, sys
import topicstore as ts

directory, backend, options, how = arguments[0], arguments[1], {arguments[1]: eval(arguments[2])}, arguments[3]
shards = int(arguments[4])
path = directory + "/db"

def batch(first):
    numbers = range(first, first + 250)
    return [ts.Message(f"t/{n}", b"%08d" % n + os.urandom(2_000), f"client-{n % 40}") for n in numbers]
"""
FILL = """
db = ts.open(path, backend=backend, shards=shards, options=options, auto_compact=False)
stored = 0
for number in range(100):
    db.store(batch(stored))
    stored += 250
db.add_generation()
try:
    while True:
        db.store(batch(stored))
        stored += 250
except (ts.StorageFullError, ExceptionGroup):
    print(stored, flush=True)
others = os.open(directory + "/others", os.O_CREAT | os.O_WRONLY)
try:
    while True:  # whatever is free then, somebody else takes
        os.write(others, bytes(4096))
except OSError:
    os.close(others)
if how == "killed":
    os._exit(0)
try:
    db.close()
except (ts.EngineError, ts.StorageFullError, ExceptionGroup):
    os._exit(0)
"""
DROP = """
def has(db, first, last):  # the batch that failed may be in some shards
    found = {int(message.payload[:8]) for message in db.replay("#")}
    return found - set(range(stored, stored + 250)) == set(range(first, stored)) and found >= set(range(stored, last))

program = "import sys; arguments = sys.argv[1:]\\n" + SHARED + FILL
filled = subprocess.run([sys.executable, "-c", program, *arguments], stdout=subprocess.PIPE, text=True, check=True)
stored = int(filled.stdout)
say(os.path.exists(path + "/ballast"))
with ts.open(path, options=options, auto_compact=False) as db:
    say(has(db, 0, stored))
    db.drop_generation(1)
    say(has(db, 25_000, stored))
    db.store(batch(stored))
with ts.open(path, options=options, auto_compact=False) as db:
    say(has(db, 25_000, stored + 250), db.verify().damages == [])
os.remove(directory + "/others")
with ts.open(path, options=options, auto_compact=False) as db:
    db.add_generation()
    say(os.path.exists(path + "/ballast"))
"""


@pytest.mark.parametrize("shards", [1, 4])
@pytest.mark.parametrize("how", ["closed", "killed"])
@pytest.mark.parametrize("backend", ["rocksdb", "leveldb"])
def test_room_is_made_on_a_full_disk(tmp_path: Path, backend: str, how: str, shards: int) -> None:
    """On a full disk, opening deletes the ballast, no acknowledged message is lost, and a drop frees space."""
    need(backend)
    if (reason := namespaces.why_not()) is not None:
        pytest.skip(reason)
    assert [[True], [True], [True], [True, True], [True]] == _said(tmp_path, backend, ROOM[backend], how, shards, SIZE)


@pytest.mark.parametrize("how", ["closed", "killed"])
def test_room_grows_with_what_is_stored(tmp_path: Path, how: str) -> None:
    """The ballast grows with the stored data, because on opening each shard of LevelDB may need space to compact."""
    need("leveldb")
    if (reason := namespaces.why_not()) is not None:
        pytest.skip(reason)
    options = {"write_buffer_bytes": 8 << 20, "file_bytes": 2 << 20}
    assert [[True], [True], [True], [True, True], [True]] == _said(tmp_path, "leveldb", options, how, 4, 384 << 20)


def _said(directory: Path, backend: str, options: dict[str, int], how: str, shards: int, size: int) -> list[list[Any]]:
    """Return the output of the program that fills a disk of this size and frees space on it."""
    code = f"SHARED, FILL = {SHARED!r}, {FILL!r}\n{SHARED}{DROP}"
    return namespaces.run_mounted(namespaces.SMALL, directory, size, code, directory, backend, options, how, shards)
