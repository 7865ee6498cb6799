"""``topicstore explain``: its text for people, and its JSON for scripts."""

from __future__ import annotations

from pathlib import Path

import pytest
import topicstore as ts
from topicstore.storage.reading.explain import LEGEND

from .conftest import document, run

ROWS = [ts.Message(f"fleet/{n % 3}/speed", b"%02d" % n, f"bus-{n % 5}", timestamp=1_000_000 * n) for n in range(60)]


@pytest.fixture
def db(tmp_path: Path) -> Path:
    with ts.open(tmp_path / "db", mode="x", layout="reference", timestamps="message") as opened:
        opened.store(ROWS[:30])
        opened.add_generation("block")
        opened.store(ROWS[30:])
    return tmp_path / "db"


def test_for_people(db: Path) -> None:
    shown = run("explain", db, "fleet/1/+").stdout
    for words in ("fleet/1/+", "20, with 40 bytes", "1 of 3", "reference", "block", "fleet/1/speed", LEGEND):
        assert words in shown
    assert "shard  " not in shown  # there is only one shard
    assert "generation  layout" in shown
    # brackets in a filter are printed, and not taken for markup
    assert "[bold]" in run("explain", db, "x/[bold]").stdout
    assert "\\x1b" in run("explain", db, "x/\x1b[2J").stdout


def test_a_range_of_time_and_an_order(db: Path) -> None:
    late = ("--start", "1970-01-01T00:00:40Z", "--until", "1970-01-01T00:00:50Z")
    found = document("explain", db, "#", *late, "--order", "any")
    assert (40_000_000, 50_000_000, "any", 10) == tuple(found[n] for n in ("start", "until", "order", "messages"))
    [left] = found["unread"]
    assert {"shard": 0, "generation": 1, "layout": "reference", "reason": "it ended before the start"} == left
    assert (
        "not read: shard 0, generation 1 (reference): it ended before the start"
        in run("explain", db, "#", *late).stdout
    )
