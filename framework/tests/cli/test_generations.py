"""``topicstore generations``: listing, adding with another layout and options, dropping."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import msgspec
import pytest
import topicstore as ts
from topicstore.files.formats import encode_lines
from topicstore_conformance.subjects.pairs import layouts_on

from .conftest import document, run


def test_replays_cross_generations_of_other_layouts(rows: Sequence[ts.Message], db: Path, tmp_path: Path) -> None:
    """A replay crosses generations of different layouts in one order."""
    layouts = ["reference", *sorted(set(layouts_on("rocksdb")) - {"reference"})]
    for number, layout in enumerate(layouts, 1):
        run("generations", "add", db, "--layout", layout)
        later = 60_000_000 * number
        more = [msgspec.structs.replace(row, timestamp=(row.timestamp or 0) + later) for row in rows]
        (tmp_path / "more.jsonl").write_bytes(encode_lines(more))
        run("import", db, tmp_path / "more.jsonl")
    times = [row["timestamp"] for row in map(json.loads, run("replay", db).stdout.splitlines())]
    assert [1_000_000 * second for second in range(60 * (len(layouts) + 1))] == times
    read = document("explain", db, "fleet/1/speed", "--start", "1970-01-01T00:01:00Z")
    assert set(layouts) == {slab["layout"] for slab in read["slabs"]}
    assert 20 * len(layouts) == read["messages"]
    assert {"it ended before the start"} == {slab["reason"] for slab in read["unread"]}


def test_options_of_generations(db: Path) -> None:
    """Options are shown with defaults; a generation without options gets the options last used for its layout."""
    run("generations", "add", db, "--option", "level=5", "--option", "compression=zstd")
    run("generations", "add", db)
    run("generations", "add", db, "--layout", "reference")
    run("generations", "add", db, "--layout", "block")
    first, *changed, other, last = (one["options"] for one in document("generations", db)["generations"])
    assert [{**first, "level": 5, "compression": "zstd"}] * 2 == changed
    assert ({}, changed[-1]) == (other, last)
    assert first.keys() >= {"level", "compression", "thresholds"}
    for command in ("generations", "info"):
        shown = run(command, db).stdout
        assert 3 == shown.count("level=5")
        assert 4 == shown.count("thresholds=[100,20]")


@pytest.mark.parametrize(
    "arguments",
    [
        ("--layout", "block", "--option", "block.level=5", "--option", "block.thresholds=[7]"),
        ("block", "--option", "level=5", "--option", "thresholds=[7]"),
        ("block", "--layout", "block", "--option", "block.level=5", "--option", "thresholds=[7]"),
        ("--option", "block.level=5", "--option", "block.thresholds=[7]"),
    ],
)
def test_how_a_generation_may_be_asked_for(db: Path, arguments: tuple[str, ...]) -> None:
    """A layout and its options can be given as for `create`, or in shorter forms."""
    run("generations", "add", db, *arguments)
    added = document("generations", db)["generations"][-1]
    assert ("block", 5, [7]) == (added["layout"], added["options"]["level"], added["options"]["thresholds"])


def test_a_generation_that_contradicts_itself(db: Path) -> None:
    assert "two layouts" in run("generations", "add", db, "block", "--layout", "reference", code=2).stderr
    other = run("generations", "add", db, "block", "--option", "rocksdb.compression=zstd", code=2)
    assert "'rocksdb.compression=zstd' is no option of the layout 'block'" in other.stderr
    assert 1 == len(document("generations", db)["generations"])


@pytest.mark.parametrize(
    ("option", "says"),
    [
        ("colour=1", "'block' has no option 'colour'; it has: thresholds"),
        ("level=high", "level"),
        ("level=99", "'level' must be <= 19: 99"),
        ("level=2.5", "level"),
        ("thresholds=5", "thresholds"),
        ("thresholds=[-1]", "thresholds is one number or more"),
        ("thresholds=[]", "thresholds is one number or more"),
        ("compression=rar", "compression"),
        ("level", "is not NAME=VALUE"),
        ("block.level", "is not NAME=VALUE"),
    ],
)
def test_bad_options_of_generations(db: Path, option: str, says: str) -> None:
    """A wrong option is reported in one line that names it, and no generation is added."""
    assert says in run("generations", "add", db, "--layout", "block", "--option", option, code=2).stderr
    assert 1 == len(document("generations", db)["generations"])
