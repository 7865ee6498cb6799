"""Staging directories in use are never removed, and those of killed processes are."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import topicstore as ts
from topicstore.storage.directory import staging as staging
from topicstore.storage.directory.manifest import MANIFEST
from topicstore.storage.directory.staging import staging_directory, staging_name, sweep_staging, sweep_staging_below
from topicstore_conformance.conditions.skipping import need

CHECKPOINT = """
import topicstore as ts

counts(RocksdbEngine, "checkpoint")
ts.open(arguments[0]).checkpoint(arguments[1])
"""


@pytest.mark.parametrize("moment", ["made", "opened", "locked"])
def test_a_staging_directory_in_use_is_never_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, moment: str
) -> None:
    """A staging directory is not removed by another process, neither before nor after its lock is acquired."""
    swept = []

    def sweep_once(when: str) -> None:
        if when == moment and not swept:
            swept.append(list(tmp_path.iterdir()))
            sweep_staging(tmp_path)

    def opened(*arguments: Any, open_: Callable[..., int] = os.open, **options: Any) -> int:
        sweep_once("made")
        handle = open_(*arguments, **options)
        sweep_once("opened")
        return handle

    monkeypatch.setattr(staging.os, "open", opened)
    with staging_directory(tmp_path) as path:
        sweep_once("locked")
        (path / "part").write_bytes(b"")
        sweep_staging(tmp_path)
        assert list(tmp_path.iterdir()) == [path]
        assert [file.name for file in path.iterdir()] == ["part"]
    assert [[path] == found for found in swept] == [moment == "locked"]
    assert list(tmp_path.iterdir()) == []


def test_only_staging_directories_are_swept(tmp_path: Path) -> None:
    """Only staging directories are removed: links, files, and directories with other names stay."""
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "file").touch()
    directory = tmp_path / "directory"
    directory.mkdir()
    (directory / staging_name()).symlink_to(elsewhere)
    (directory / staging_name()).touch()
    (directory / ".unfinished-12").mkdir()
    kept = sorted(directory.iterdir())
    (directory / staging_name()).mkdir()
    sweep_staging(directory)
    assert kept == sorted(directory.iterdir())
    assert (elsewhere / "file").exists()


def test_a_killed_checkpoint_does_not_block_the_next(run_until: Callable[..., Any], tmp_path: Path) -> None:
    """The next checkpoint removes the staging directory of a killed one, even if both processes have the same id."""
    need("rocksdb")
    with ts.open(tmp_path / "db", auto_compact=False) as db:
        db.store([ts.Message("t", b"1")])
    copies = tmp_path / "copies"
    run_until((1, "after"), CHECKPOINT, str(tmp_path / "db"), str(copies / "copy"))
    assert 1 == len(list(copies.iterdir()))
    with ts.open(tmp_path / "db") as db, staging_directory(copies) as anothers:
        db.checkpoint(copies / "copy")
        assert {copies / "copy", anothers} == set(copies.iterdir())
    with ts.open(copies / "copy") as copy:
        assert [b"1"] == [message.payload for message in copy.replay("#")]


def test_staging_directories_at_any_depth_are_swept(tmp_path: Path) -> None:
    """Staging directories in all subdirectories are removed, except those in use and those within databases."""
    exports, database = tmp_path / "exports" / "2026", tmp_path / "databases" / "db"
    exports.mkdir(parents=True)
    with ts.open(database, backend="memory"):
        pass
    database.mkdir(parents=True, exist_ok=True)
    (database / MANIFEST).touch()
    for place in (tmp_path, exports, database / "below"):
        place.mkdir(exist_ok=True)
        (place / staging_name()).mkdir()
    with staging_directory(exports) as used:
        sweep_staging_below(tmp_path)
        left = set(tmp_path.rglob(".unfinished-*"))
    assert {path.parent for path in left} == {exports, database / "below"}
    assert used in left
