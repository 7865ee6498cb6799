"""``topicstore verify``: reports of damage, and exit codes."""

from __future__ import annotations

from pathlib import Path

import topicstore as ts
from click.testing import CliRunner
from topicstore.cli import cli
from topicstore.contract.engine import DATA, WriteBatch

from .conftest import document, run


def damage(path: Path) -> None:
    """Flip a byte in the middle of a stored value."""
    with ts.open(path, mode="r+") as db:
        engine = db.storage.shards[0].writer.open_engine()
        key, value = next(iter(engine.scan(DATA, (0, 0, 0), (2**32 - 1, 0, 0))))[0]
        write = WriteBatch()
        middle = len(value) // 2
        write.put(DATA, key, value[:middle] + bytes((value[middle] ^ 255,)) + value[middle + 1 :])
        engine.write(write)


def test_verify(db: Path) -> None:
    assert document("verify", db) == {"path": str(db), "ok": True, "messages": 60, "damages": []}
    assert "nothing is damaged" in run("verify", db).stdout
    damage(db)
    found = document("verify", db, code=1)
    assert found["ok"] is False
    result = CliRunner().invoke(cli, ["verify", str(db)])
    assert (result.exit_code, result.stderr) == (1, "")
    assert found["damages"][0]["place"] in result.stdout
    run("replay", db, code=5)


def test_a_database_too_damaged_to_open(db: Path) -> None:
    manifest = db / "topicstore.json"
    manifest.write_bytes(manifest.read_bytes().replace(b'"shards": 2', b'"shards": 3'))
    assert document("verify", db, code=1)["damages"][0]["place"] == str(manifest)
    run("info", db, code=5)
