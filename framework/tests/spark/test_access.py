"""What tasks read: pieces that together are everything that was asked for, each message in one of them."""

from __future__ import annotations

from pathlib import Path

import pytest
import topicstore as ts

pytest.importorskip("pyspark", reason='needs pyspark: pip install "topicstore[spark]"')

from topicstore.contract.positions import first_position
from topicstore.spark import access
from topicstore.spark.selection import Selection

FIRST = 1_700_000_000_000_000


@pytest.mark.parametrize("layout", ["block", "skipstream", "wildcard_optimized"])
@pytest.mark.parametrize("start", [0, FIRST + 450_000_000])
def test_large_generations_are_cut(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, layout: str, start: int) -> None:
    """Into as many pieces as are wanted where there are messages for it, and not more."""
    monkeypatch.setattr(access, "_WORTH_CUTTING", 100)
    messages = [ts.Message(f"a/{n % 7}", b"%d" % n, timestamp=FIRST + n * 1_000_000) for n in range(1_000)]
    with ts.open(tmp_path, layout=layout, timestamps="message") as db:
        db.store(messages[:900])
        db.add_generation()
        db.store(messages[900:])
    selection = Selection(first=first_position(start))
    with access.open_to_read(str(tmp_path)) as db:
        assert 2 == len(access.pieces_of(db, selection))
        pieces = access.pieces_of(db, selection, 4)
        assert [1, 1, 1, 1, 2] == [piece.generation for piece in pieces]
        parts = [
            [int(m.payload) for batch in access.read(db, piece, ("#",)) for m in batch.to_messages()]
            for piece in pieces
        ]
    assert [n for n in range(1_000) if messages[n].timestamp >= start] == sorted(n for part in parts for n in part)
    assert all(parts)
