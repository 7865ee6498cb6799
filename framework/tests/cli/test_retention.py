"""``topicstore retention``: limits, how they are written, and what goes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import topicstore as ts
from click.testing import Result
from topicstore_conformance.faults.clock import START, Clock

Run = Callable[..., Result]
Document = Callable[..., dict[str, Any]]
DAY = 86_400


def test_limits_are_shown_and_changed_one_by_one(run: Run, document: Document, path: Path) -> None:
    """What is not named stays; ``none`` lifts one."""
    assert "for ever" in run("retention", path).stdout
    run("retention", "set", path, "--max-age", "1d12h", "--max-bytes", "1.5GB")
    run("retention", "set", path, "--when-full", "drop", "--rotate-every", "90")
    shown = document("retention", "show", path)
    assert (1.5 * DAY, 90.0, 1_500_000_000, "drop", 0, 1) == tuple(
        shown[name] for name in ("max_age", "rotate_every", "max_bytes", "when_full", "live_bytes", "generations")
    )
    text = run("retention", path).stdout
    assert [True] * 4 == [part in text for part in ("36 hours", "90 s", "1.5 GB, then the oldest go", "1 generation\n")]
    changed = document("retention", "set", path, "--max-age", "none")
    assert (None, 90.0) == (changed["max_age"], changed["rotate_every"])


@pytest.mark.parametrize(
    ("option", "text", "seconds_or_bytes"),
    [
        ("--max-age", "7d", 7 * DAY),
        ("--max-age", "0.5", 0.5),
        ("--rotate-every", "2w", 14 * DAY),
        ("--max-bytes", "1000", 1_000),
        ("--max-bytes", "20 kB", 20_000),
        ("--max-bytes", "3M", 3_000_000),
        ("--max-bytes", "1TB", 10**12),
    ],
)
def test_how_limits_are_written(
    document: Document, path: Path, option: str, text: str, seconds_or_bytes: float
) -> None:
    name = option.removeprefix("--").replace("-", "_")
    assert seconds_or_bytes == document("retention", "set", path, option, text)[name]


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["--max-age", "soon"],
        ["--max-age", "-1"],
        ["--max-age", "0"],
        ["--max-bytes", "many"],
        ["--max-bytes", "0"],
        ["--max-bytes", "1XB"],
        ["--when-full", "explode"],
    ],
)
def test_limits_that_are_none(run: Run, document: Document, path: Path, arguments: list[str]) -> None:
    run("retention", "set", path, *arguments, code=2)
    assert document("retention", path)["max_age"] is None


def test_a_run_says_what_went(run: Run, document: Document, tmp_path: Path) -> None:
    """And that nothing did."""
    path = tmp_path / "db"
    with ts.open(path, clock=Clock(START)) as db:
        db.store([ts.Message("a", b"x")] * 3)
        expiring = ts.Properties(message_expiry_interval=1)
        db.publish([ts.Message("r", b"x", retain=True, properties=expiring)])
    assert "1 retained message had expired\n" == run("retention", "run", path).stdout
    assert "nothing was to be done\n" == run("retention", "run", path).stdout
    run("retention", "set", path, "--max-age", "7d")
    said = run("retention", "run", path).stdout
    assert "generation 2 begins\ndropped: generation 1, with 3 messages of " in said
    assert document("retention", "run", path)["dropped"] == []
