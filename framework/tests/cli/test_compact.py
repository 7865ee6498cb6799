"""``topicstore compact``: the report that it prints."""

from __future__ import annotations

from pathlib import Path

import topicstore as ts

from .conftest import run


def fill(path: Path, layout: str) -> Path:
    """Return a database into which many small batches were stored."""
    with ts.open(path, mode="x", layout=layout, shards=2, auto_compact=False) as db:
        for batch in range(40):
            db.store([ts.Message(f"fleet/{n % 7}/speed", b"%d %d" % (batch, n), f"bus-{n % 5}") for n in range(50)])
    return path


def test_what_it_says(tmp_path: Path) -> None:
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
