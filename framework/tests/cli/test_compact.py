"""``topicstore compact``: nothing is lost, and it says what it did."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import topicstore as ts
from click.testing import Result
from topicstore_conformance.subjects.pairs import layouts_on

Run = Callable[..., Result]


def fill(path: Path, layout: str) -> Path:
    """Return a database of many small batches."""
    with ts.open(path, mode="x", layout=layout, shards=2, auto_compact=False) as db:
        for batch in range(40):
            db.store([ts.Message(f"fleet/{n % 7}/speed", b"%d %d" % (batch, n), f"bus-{n % 5}") for n in range(50)])
    return path


@pytest.mark.parametrize("layout", layouts_on("rocksdb"))
def test_the_same_messages(run: Run, tmp_path: Path, layout: str) -> None:
    """In the same order; the second time nothing is left to do."""
    path = fill(tmp_path / "db", layout)
    before = run("replay", path).stdout
    done = json.loads(run("compact", path, "--json").stdout)
    assert 2_000 == before.count("\n")
    assert before == run("replay", path).stdout
    again = json.loads(run("compact", path, "--json").stdout)
    assert (0, done["live_bytes_after"]) == (again["messages"], again["live_bytes_after"])
    assert "2,000 messages are whole; nothing is damaged" in run("verify", path).stdout


def test_what_it_says(run: Run, tmp_path: Path) -> None:
    path = fill(tmp_path / "db", "reference")
    assert run("compact", path).stdout.startswith("layout reference keeps messages as stored; values ")
    block = fill(tmp_path / "block", "block")
    shown = run("compact", block).stdout
    assert " messages rewritten in " in shown
    assert "on disk" in shown
    assert "nothing was left to merge in " in run("compact", block).stdout
    with ts.open(path, mode="r+") as db:
        db.add_generation("wildcard_optimized")
    assert "layouts reference, wildcard_optimized keep messages as stored; " in run("compact", path).stdout


def test_refusals(run: Run, tmp_path: Path) -> None:
    assert "there is no database" in run("compact", tmp_path / "none", code=3).stderr
    assert list(tmp_path.iterdir()) == []
    path = fill(tmp_path / "db", "reference")
    with ts.open(path, mode="r+"):
        run("compact", path, code=4)
