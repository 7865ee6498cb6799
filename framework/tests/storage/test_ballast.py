"""The ballast file is created without blocking stores, is recreated after use, and never causes an error."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import topicstore as ts
from topicstore.storage.directory import ballast
from topicstore_conformance.faults.threads import PATIENCE, begin


@pytest.fixture
def db(tmp_path: Path) -> Iterator[ts.Database]:
    """A database with two generations."""
    with ts.open(tmp_path / "db", shards=2, auto_compact=False) as opened:
        opened.store([ts.Message("t", b"1")])
        opened.add_generation()
        yield opened


def fail_at(patched: pytest.MonkeyPatch, where: object, name: str, error: Exception) -> None:
    def fails(*_: object) -> None:
        raise error

    patched.setattr(where, name, fails)


@pytest.mark.parametrize(
    ("call", "error"),
    [
        ("posix_fallocate", OSError(errno.EDQUOT, "it fails here")),
        ("open", OSError(errno.EMFILE, "it fails here")),
        ("info", ts.TooManyOpenFilesError("it fails here")),
    ],
)
def test_ballast_that_cant_be_made_fails_nothing(
    db: ts.Database, monkeypatch: pytest.MonkeyPatch, call: str, error: Exception
) -> None:
    """If the ballast can't be created, calls succeed, and `info` shows the failure until the ballast is created."""
    file = db.path / "ballast"
    file.unlink()
    assert db.info().ballast_failure is None
    where = type(db.storage.shards[0].writer.open_engine()) if call == "info" else os
    for act, left in ((db.add_generation, [1, 2, 3]), (lambda: db.drop_generation(1), [2, 3])):
        with monkeypatch.context() as patched:
            if call == "open":
                fail_at(patched, ballast, "open_own", error)
            else:
                fail_at(patched, where, call, error)
            assert act()
        assert "it fails here" in str(db.info().ballast_failure)
        assert left == [generation.number for generation in db.generations()]
        assert not file.exists()
    db.add_generation()
    assert db.info().ballast_failure is None
    assert file.exists()


def test_a_failure_is_warned_of(db: ts.Database, monkeypatch: pytest.MonkeyPatch) -> None:
    """A failure to create the ballast is reported as a warning with its reason."""
    (db.path / "ballast").unlink()
    fail_at(monkeypatch, os, "posix_fallocate", OSError(errno.EDQUOT, "it fails here"))
    with pytest.warns(RuntimeWarning, match="no room is held ready for a full disk: .*it fails here"):
        db.add_generation()


def test_stores_do_not_wait_for_ballast(db: ts.Database, monkeypatch: pytest.MonkeyPatch) -> None:
    """The ballast is created without holding a shard's lock, so that stores don't wait."""
    (db.path / "ballast").unlink()
    fallocate, stored = os.posix_fallocate, []

    def while_storing(*arguments: Any) -> None:
        # enough clients that each shard gets a message
        batch = [ts.Message("t", b"2", f"client-{n}") for n in range(10)]
        stored.append(begin(lambda: db.store(batch)).result(PATIENCE).count)
        fallocate(*arguments)

    monkeypatch.setattr(os, "posix_fallocate", while_storing)
    db.add_generation()
    (db.path / "ballast").unlink()
    db.drop_generation(1)
    assert [10, 10] == stored


@pytest.mark.parametrize("act", ["drop", "archive", "refused"])
def test_ballast_is_made_again(db: ts.Database, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, act: str) -> None:
    """A call that deletes the ballast because space is low recreates it once there is space, even if the call fails."""
    db.add_generation()
    file, real = db.path / "ballast", shutil.disk_usage
    there: list[bool] = []

    def scarce_at_first(path: Path) -> Any:
        there.append(file.exists())
        return real(path) if len(there) > 1 else real(path)._replace(free=0)

    monkeypatch.setattr(shutil, "disk_usage", scarce_at_first)
    if act == "drop":
        db.drop_generation(1)
    elif act == "archive":
        db.archives.archive(tmp_path / "export", generations=[1])
    else:
        with pytest.raises(ts.GenerationError):
            db.drop_generation(3)
    assert [True, False] == there
    assert file.exists()
