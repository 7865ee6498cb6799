"""``topicstore explain``: what it says, and what scripts get."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import topicstore as ts
from click.testing import CliRunner, Result
from topicstore.cli import cli
from topicstore.storage.explain import LEGEND

ROWS = [ts.Message(f"fleet/{n % 3}/speed", b"%02d" % n, f"bus-{n % 5}", timestamp=1_000_000 * n) for n in range(60)]


def run(*arguments: object, code: int = 0) -> Result:
    result = CliRunner().invoke(cli, ["explain", *map(str, arguments)])
    assert result.exit_code == code, result.output
    if code:
        assert result.stderr.startswith("error: ")
        assert result.stderr.count("\n") == 1
    return result


def document(*arguments: object) -> dict[str, Any]:
    found = json.loads(run(*arguments, "--json").stdout)
    assert isinstance(found, dict)
    return found


@pytest.fixture
def db(tmp_path: Path) -> Path:
    with ts.open(tmp_path / "db", mode="x", layout="reference", timestamps="message") as opened:
        opened.store(ROWS[:30])
        opened.add_generation("block")
        opened.store(ROWS[30:])
    return tmp_path / "db"


def test_for_scripts(db: Path) -> None:
    found = document(db, "fleet/1/+")
    assert ("fleet/1/+", 20, 40, "time") == tuple(
        found[name] for name in ("topic_filter", "messages", "payload_bytes", "order")
    )
    reference, block = found["slabs"]
    assert {"seeks": 1, "visited": 30, "skipped": 0, "rows": 10} == reference["reads"]
    assert ("block", 3, 1, ["fleet/1/speed"], 10) == (
        block["layout"],
        block["streams"],
        block["matching"],
        block["patterns"],
        block["reads"]["rows"],
    )


def test_for_people(db: Path) -> None:
    shown = run(db, "fleet/1/+").stdout
    for words in ("fleet/1/+", "20, with 40 bytes", "1 of 3", "reference", "block", "fleet/1/speed", LEGEND):
        assert words in shown
    assert "shard  " not in shown  # there is one
    assert "generation  layout" in shown
    assert "[bold]" in run(db, "x/[bold]").stdout  # a filter, not markup
    assert "\\x1b" in run(db, "x/\x1b[2J").stdout


def test_a_range_of_time_and_an_order(db: Path) -> None:
    late = ("--start", "1970-01-01T00:00:40Z", "--until", "1970-01-01T00:00:50Z")
    found = document(db, "#", *late, "--order", "any")
    assert (40_000_000, 50_000_000, "any", 10) == tuple(found[n] for n in ("start", "until", "order", "messages"))
    [left] = found["unread"]
    assert {"shard": 0, "generation": 1, "layout": "reference", "reason": "it ended before the start"} == left
    assert "not read: shard 0, generation 1 (reference): it ended before the start" in run(db, "#", *late).stdout


def test_nothing_matches(db: Path) -> None:
    assert 0 == document(db, "nothing")["messages"]
    assert "0, with 0 bytes" in run(db, "nothing").stdout


def test_looking_changes_nothing(db: Path) -> None:
    before = document(db, "#")["slabs"]
    assert [slab["reads"] for slab in before] == [slab["reads"] for slab in document(db, "#")["slabs"]]


def test_refusals(db: Path, tmp_path: Path) -> None:
    run(tmp_path / "none", "#", code=3)
    assert not (tmp_path / "none").exists()
    assert "'#' must be alone" in run(db, "a/#/b", code=2).stderr
    assert "FILTER" in run(db, code=2).stderr
    run(db, "#", "--start", "soon", code=2)
    run(db, "#", "--order", "random", code=2)
