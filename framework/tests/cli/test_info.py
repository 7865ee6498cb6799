"""``topicstore info``: the lines that it shows, and those that it omits."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
import topicstore as ts

from .conftest import document, run


@pytest.mark.filterwarnings("default:shard 0")  # other tests treat the printed warning as an error
def test_info_warns_of_a_shard_ahead_of_the_clock(tmp_path: Path) -> None:
    ahead = 4_000_000_000_000_000
    with ts.open(tmp_path / "db", mode="x", timestamps="message", clock=lambda: ahead) as opened:
        opened.store([ts.Message("a", b"", timestamp=ahead)])
    shown = run("info", tmp_path / "db")
    assert "shard 0: its last position lies " in shown.stdout
    assert "in the future" in shown.stdout


def test_what_reading_counts_is_for_scripts(db: Path) -> None:
    """Counters of reads are only in the JSON, because a database that was just opened has read nothing."""
    counted = {"seeks": 0, "visited": 0, "skipped": 0, "rows": 0}
    assert [{"1": counted}] * 2 == [shard["reads"] for shard in document("info", db)["shards"]]
    shown = run("info", db).stdout
    assert not any(name in shown for name in counted)


def test_columns_that_say_nothing_are_left_out(rows: Sequence[ts.Message], db: Path, tmp_path: Path) -> None:
    """Columns for shards, generations and late messages are omitted where there is only one or none."""
    with ts.open(tmp_path / "one", mode="x", timestamps="message", late="lift") as opened:
        opened.store(rows)
    for command in ("info", "streams"):
        assert "shard  " in run(command, db).stdout
        assert "shard  " not in run(command, tmp_path / "one").stdout
    assert ["topics", "stream", "state"] == run("streams", tmp_path / "one").stdout.splitlines()[0].split()
    assert "lifted" not in run("info", tmp_path / "one").stdout
    with ts.open(tmp_path / "one", mode="r+") as opened:
        opened.store(rows[:1])
    assert "lifted" in run("info", tmp_path / "one").stdout
    run("generations", "add", tmp_path / "one")
    headings = run("streams", tmp_path / "one").stdout.splitlines()[0].split()
    assert ["topics", "generation", "stream", "state"] == headings
