"""A process at its limit of open files gets an error that names this limit, and no damage is reported."""

from __future__ import annotations

import errno
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import topicstore as ts
from topicstore.cli.files.rows import Prefix
from topicstore.cli.files.source_detection import open_source
from topicstore_conformance.conditions.skipping import need

pytestmark = pytest.mark.slow

SCARCE = """
import gc, itertools, os, resource, warnings
from contextlib import closing, nullcontext
from pathlib import Path
import topicstore as ts
from click.testing import CliRunner
from topicstore.cli import cli
from topicstore.opening import open_lazily

where, backend = Path(arguments[0]), arguments[1]
path, message, numbers = where / "db", ts.Message("t", b"new"), itertools.count()
warnings.simplefilter("ignore")

def another():
    return where / f"another-{next(numbers)}"

def write(_):
    with ts.open(path, auto_compact=False) as db:
        db.store([message])

def read(_):
    with ts.open(path, mode="r") as db:
        assert len(list(db.replay("#"))) >= 20

def read_lazily(_):
    with closing(open_lazily(path)) as storage:
        assert all(shard.generations.listed() for shard in storage.shards)

def import_(_):
    rows = another()
    rows.symlink_to(where / "rows.jsonl")
    result = CliRunner().invoke(cli, ["import", "--format", "jsonl", "--again", str(path), str(rows)])
    if result.exit_code:
        raise SystemExit(result.stderr.splitlines()[-1])

def verify(db):
    assert not db.verify().damages

def replay(db):
    assert len(list(db.replay("#"))) >= 20

def refresh(db):
    db.refresh()

def queue(db):
    db.queues.open("q").append([message])

def drop_queue(db):
    db.queues.open("other")
    assert db.queues.drop("other")

def list_queues(db):
    assert "q" in [queue.name for queue in db.queues]

def checkpoint(db):
    db.checkpoint(another())

def export(db):
    db.archives.export(another())

def archive(db):
    db.archives.archive(another(), generations=[1])

def outcome(act, *arguments):
    try:
        act(*arguments)
    except (Exception, SystemExit) as error:
        return f"{type(error).__name__}: {error}"
    return "fine"

def files():
    gc.collect()
    return [file for file in os.listdir("/proc/self/fd") if os.path.exists(f"/proc/self/fd/{file}")]

def opened(mode):
    return ts.open(path, mode, auto_compact=False) if mode else None

def tell(act, mode=None):
    "Do it with no file that may still be opened, with one, and so on; with a mode in a database opened so."
    with opened(mode) or nullcontext() as db:
        outcome(act, db)  # whatever is loaded then
    db, free, fine = opened(mode), 0, 0
    while fine < 2:
        taken = []
        try:
            while True:
                taken.append(os.open(os.devnull, os.O_RDONLY))
        except OSError:
            for _ in range(free):
                os.close(taken.pop())
        ended, again = outcome(act, db), "fine"
        for file in taken:
            os.close(file)
        free, fine = free + 1, fine + (ended == "fine")
        if ended != "fine":
            if mode:
                outcome(db.close)  # as one is told to after a write that failed so
                db = opened(mode)
            again = outcome(act, db)
        say(act.__name__, ended, again)
    if mode:
        db.close()

with ts.open(path, auto_compact=False):
    pass
before = len(files())
(where / "rows.jsonl").write_text('{"topic": "t", "payload": "x"}' + chr(10))
resource.setrlimit(resource.RLIMIT_NOFILE, (200, 200))
for act in (write, read, read_lazily, import_):
    tell(act)
for act in (verify, replay, queue, drop_queue, list_queues, export, archive):
    tell(act, "a")
if backend != "leveldb":  # which makes none
    tell(checkpoint, "a")
if backend == "rocksdb":  # else it has nothing to do
    tell(refresh, "r")
say("left open", len(files()) - before, "")
"""


@pytest.mark.parametrize("backend", ["rocksdb", "leveldb", "duckdb"])
def test_too_many_open_files_are_reported(tmp_path: Path, run_until: Callable[..., Any], backend: str) -> None:
    """With any number of free file descriptors, an operation succeeds or reports that there are too few."""
    need(backend)
    with ts.open(tmp_path / "db", backend=backend, auto_compact=False) as db:
        db.store([ts.Message("t", b"%d" % n) for n in range(10)])
        db.add_generation()
        db.archives.archive(tmp_path / "export")
        db.store([ts.Message("t", b"%d" % n) for n in range(10)])
        db.queues.open("q")
    said = run_until(None, SCARCE, str(tmp_path), backend)
    assert ("left open", 0, "") == said.pop()
    assert [] == [one for one in said if one[2] != "fine"]
    told = [(act, ended) for act, ended, _ in said if ended != "fine"]
    # library calls raise the first error; the program raises the second error
    clear = ("TooManyOpenFilesError: ", "SystemExit: error: ")
    assert [] == [one for one in told if not one[1].startswith(clear) or "ulimit -n" not in one[1]]
    assert {act for act, *_ in said} == {act for act, _ in told}
    with ts.open(tmp_path / "db") as db:
        assert [] == db.verify().damages
        assert db.verify().messages >= 20 + sum(act == "write" for act, *_ in said)


def test_an_archive_that_may_not_be_read_is_not_damaged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If an archive's files can't be read for lack of permission, replays and `verify` report that, not damage."""
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


def test_what_was_imported_of_a_file_is_not_overlooked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An import fails with `TooManyOpenFilesError` if it can't check how much of the file was imported before."""
    file = tmp_path / "rows.jsonl"
    file.write_text('{"topic": "t", "payload": "x"}\n')

    def exhausted(path: Path, *_: object, **__: object) -> bytes:
        raise OSError(errno.EMFILE, "Too many open files", str(path))

    with open_source(file) as source, monkeypatch.context() as patched:
        patched.setattr(Path, "open", exhausted)
        with pytest.raises(ts.TooManyOpenFilesError):
            source.has_prefixes([Prefix(1, b"")])
