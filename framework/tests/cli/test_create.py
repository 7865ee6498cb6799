"""``topicstore create``: the settings that a database is created with."""

from __future__ import annotations

from pathlib import Path

import pytest

from .conftest import document, run


def test_creation_options(tmp_path: Path) -> None:
    options = (
        "--option",
        "block.thresholds=[5,3]",
        "--option",
        "rocksdb.compression=zstd",
        "--option",
        "block.level=2",
    )
    made = document("create", tmp_path / "db", *options)
    assert made["options"] == {"block": {"thresholds": [5, 3], "level": 2}, "rocksdb": {"compression": "zstd"}}
    for bad in ("level=2", "block.level", "block.colour=1", "rocksdb.compression=rar", "other.x=1"):
        run("create", tmp_path / "bad", "--option", bad, code=2)
    assert not (tmp_path / "bad").exists()


def test_a_backend_that_keeps_nothing_is_warned_of(tmp_path: Path) -> None:
    """Each command that creates a database warns if the backend keeps the database only in memory."""
    (tmp_path / "x.jsonl").write_text('{"topic": "a", "payload": "1"}\n')
    warning = "warning: backend 'memory' keeps nothing: this database is gone when the command ends\n"
    assert warning == run("create", tmp_path / "db", "--backend", "memory").stderr
    assert warning == run("import", tmp_path / "db", tmp_path / "x.jsonl", "--backend", "memory").stderr
    assert "" == run("create", tmp_path / "kept", "--backend", "rocksdb").stderr


def test_a_path_that_the_backend_refuses(tmp_path: Path) -> None:
    """A path that the backend refuses is an error, and nothing is created."""
    pytest.importorskip("duckdb", reason='needs duckdb: pip install "topicstore[duckdb]"')
    told = run("create", tmp_path / "a?b", "--backend", "duckdb", "--layout", "table", code=2).stderr
    assert "no ? and no backslash" in told
    assert [] == list(tmp_path.iterdir())
