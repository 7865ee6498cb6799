"""``topicstore retention``: the notation of limits, and the removals of a run."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import topicstore as ts
from topicstore_conformance.faults.clock import START, Clock

from .conftest import document, run

DAY = 86_400


def test_limits_are_shown_and_changed_one_by_one(path: Path) -> None:
    """`retention set` changes only the limits that are given; ``infinity`` removes a limit."""
    assert "for ever" in run("retention", path).stdout
    run("retention", "set", path, "--max-age", "1d12h", "--max-bytes", "1.5GB")
    run("retention", "set", path, "--when-full", "drop", "--rotate-every", "150m")
    shown = document("retention", "show", path)
    assert (1.5 * DAY, 9_000.0, 1_500_000_000, "drop", 0, 1) == tuple(
        shown[name] for name in ("max_age", "rotate_every", "max_bytes", "when_full", "live_bytes", "generations")
    )
    text = run("retention", path).stdout
    parts = ("1 day 12 hours", "2 hours 30 minutes", "1.5 GB, then the oldest go", "1 generation\n")
    assert [True] * 4 == [part in text for part in parts]
    changed = document("retention", "set", path, "--max-age", "infinity")
    assert (None, 9_000.0) == (changed["max_age"], changed["rotate_every"])


@pytest.mark.parametrize(
    ("option", "text", "seconds_or_bytes"),
    [
        ("--max-age", "7d", 7 * DAY),
        ("--max-age", "500ms", 0.5),
        ("--max-age", "none", None),
        ("--rotate-every", "2w", 14 * DAY),
        ("--max-bytes", "1000B", 1_000),
        ("--max-bytes", "infinity", None),
        ("--max-bytes", "20 kB", 20_000),
        ("--max-bytes", "3M", 3_000_000),
        ("--max-bytes", "1TB", 10**12),
    ],
)
def test_how_limits_are_written(path: Path, option: str, text: str, seconds_or_bytes: float | None) -> None:
    name = option.removeprefix("--").replace("-", "_")
    assert seconds_or_bytes == document("retention", "set", path, option, text)[name]


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["--max-age", "soon"],
        ["--max-age", "30"],
        ["--max-age", "-1h"],
        ["--max-age", "0s"],
        ["--max-bytes", "many"],
        ["--max-bytes", "1000"],
        ["--max-bytes", "0B"],
        ["--max-bytes", "1XB"],
        ["--when-full", "explode"],
    ],
)
def test_limits_that_are_none(path: Path, arguments: list[str]) -> None:
    run("retention", "set", path, *arguments, code=2)
    assert document("retention", path)["max_age"] is None


def test_a_run_says_what_went(tmp_path: Path) -> None:
    """`retention run` prints the generations that it dropped, or that there was nothing to do."""
    path = tmp_path / "db"
    with ts.open(path, clock=Clock(START)) as db:
        db.store([ts.Message("a", b"x")] * 3)
    said = run("retention", "run", path).stdout
    assert "nothing was to be done:\n  no limit is set, so nothing goes\n" == said
    run("retention", "set", path, "--max-age", "7d", "--yes")
    said = run("retention", "run", path).stdout
    assert "generation 2 begins\ndropped: generation 1, with 3 messages of " in said
    assert document("retention", "run", path)["dropped"] == []


def test_filters_are_changed_one_by_one(path: Path) -> None:
    """`--filter` changes only the given filters, and ``none`` removes a filter; a filter may contain "="."""
    run("retention", "set", path, "--filter", "debug/#=1h", "--filter", "alarms/#=infinity", "--filter", "a=b/+=90s")
    assert {"debug/#": 3600, "alarms/#": None, "a=b/+": 90} == document("retention", path)["filters"]
    changed = document("retention", "set", path, "--filter", "debug/#=2h", "--filter", "a=b/+=none")
    assert {"debug/#": 7200, "alarms/#": None} == changed["filters"]
    assert "what matches alarms/#  for ever\n" in run("retention", path).stdout
    assert "messages that match debug/#" in run("info", path).stdout


@pytest.mark.parametrize("text", ["debug/#", "=1h", "debug/#=", "debug/#=soon", "a/#/b=1h", "debug/#=0s", "debug/#=90"])
def test_filters_that_are_none(path: Path, text: str) -> None:
    run("retention", "set", path, "--filter", text, code=2)
    assert {} == document("retention", path)["filters"]


def test_show_says_what_goes_when_and_a_run_why_nothing_does(tmp_path: Path) -> None:
    """`show` prints when messages will be removed; `run` prints its removals, or why it removed nothing."""
    path, clock = tmp_path / "db", Clock(START)
    with ts.open(path, clock=clock) as db:
        db.retention.set(max_age=10**9 - 1, filters={"debug/#": 10, "alarms/#": None})
        db.store([ts.Message(topic, b"x") for topic in ("debug/a", "alarms/a", "b")])
        db.add_generation()
    first, current, debug, other = document("retention", "show", path)["outlook"]
    assert (1, 3, None) == (first["generation"], first["messages"], first["when"])
    assert "what matches alarms/# stays for ever" in first["why"]
    assert "empty" in current["why"]
    assert ("what matches debug/#", "what no filter matches") == (debug["what"], other["what"])
    assert "what matches debug/#" in run("retention", path).stdout
    assert "deleted: 1 message matching debug/#\n" == run("retention", "run", path).stdout
    said = run("retention", "run", path).stdout
    assert said.startswith("nothing was to be done:\n  generation 1: what matches alarms/# stays for ever")
    run("retention", "set", path, "--yes", "--filter", "alarms/#=none", "--filter", "debug/#=none")
    (first, _) = document("retention", "show", path)["outlook"]
    assert START + (10**9 - 1) * 10**6 + 1 == first["when"]


def test_what_filters_remove_is_counted_before_it_goes(tmp_path: Path) -> None:
    """`set` and `run --dry-run` count the messages that a filter's age limit removes, and the run removes as many.

    The age is that of a message's position, here its own time. Younger messages, and messages that another filter keeps
    longer, aren't counted.
    """
    path, now = tmp_path / "db", time.time_ns() // 1_000
    with ts.open(path, timestamps="message", shards=2) as db:
        ages = [("other", 7_200), *((f"debug/{n % 3}", 7_200 - n) for n in range(900)), ("debug/1", 60)]
        db.store([ts.Message(topic, b"x", str(age), timestamp=now - age * 10**6) for topic, age in ages])
    limits = ("--filter", "debug/#=1h", "--filter", "debug/0=infinity")
    assert "what matches debug/# (600 messages)" in run("retention", "set", path, *limits, code=2).stderr
    assert "a run removes nothing\n" == run("retention", "run", path, "--dry-run").stdout
    run("retention", "set", path, *limits, "--yes")
    assert "a run removes what matches debug/# (600 messages)" in run("retention", "run", path, "--dry-run").stdout
    (due,) = document("retention", "run", path, "--dry-run")["outlook"]
    assert (600, True) == (due["messages"], due["due"])
    assert {"debug/#": 600} == document("retention", "run", path)["deleted"]
    assert [] == document("retention", "run", path, "--dry-run")["outlook"]


@pytest.mark.parametrize("limit", [("--max-age", "30s"), ("--filter", "a=1h")])
def test_what_goes_is_shown_before_limits_change(tmp_path: Path, limit: tuple[str, str]) -> None:
    """Without a terminal, ``--yes`` is required for limits by which the next run would remove messages."""
    path = tmp_path / "db"
    with ts.open(path, clock=Clock(START)) as db:
        db.store([ts.Message("a", b"x")] * 3)
    refused = run("retention", "set", path, *limit, code=2)
    assert "nothing was changed: with these limits the next run, or store, may remove" in refused.stderr
    assert (None, {}) == tuple(document("retention", path)[name] for name in ("max_age", "filters"))
    assert "nothing" not in run("retention", "set", path, "--max-age", "11000d").stderr
    run("retention", "set", path, *limit, "--yes")
    report = document("retention", "run", path)
    assert 3 == report["messages"] + sum(report["deleted"].values())
