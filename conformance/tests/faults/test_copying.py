"""Simulated kills, which copy the files of an open database."""

from __future__ import annotations

from pathlib import Path

import topicstore as ts
from topicstore_conformance.conditions.skipping import need
from topicstore_conformance.faults.copying import copy_open


def test_a_copy_has_the_links_of_a_reader_whose_files_are_gone(tmp_path: Path) -> None:
    """A copy of a database can be opened even if the writer has removed logs to which a reader's links point."""
    need("rocksdb")
    with ts.open(tmp_path / "db") as db:
        db.store([ts.Message("a", b"1")])
        with ts.open(tmp_path / "db", mode="r"):
            db.compact()
            assert [path for path in (tmp_path / "db").rglob("*") if not path.exists()]
            copy_open(tmp_path / "db", tmp_path / "copy")
    with ts.open(tmp_path / "copy") as db:
        assert [b"1"] == [message.payload for message in db.replay("#")]
