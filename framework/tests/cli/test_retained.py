"""``topicstore retained``."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import topicstore as ts
from click.testing import Result

Run = Callable[..., Result]


def test_retained(run: Run, path: Path) -> None:
    """In order of topics, in the formats of replay."""
    with ts.open(path) as db:
        db.publish([ts.Message(topic, topic.encode(), "me", 1, True, 1_000_000) for topic in ("b/1", "a/1", "a")])
    lines = [json.loads(line) for line in run("retained", path).stdout.splitlines()]
    assert [("a", "a"), ("a/1", "a/1"), ("b/1", "b/1")] == [(line["topic"], line["payload"]) for line in lines]
    assert ["b/1"] == [json.loads(line)["topic"] for line in run("retained", path, "b/#").stdout.splitlines()]
    assert "1970-01-01T00:00:01Z,a/1,me,1,true,a/1,," in run("retained", path, "+/1", "--format", "csv").stdout
    table = run("retained", path, "a", "--format", "table").stdout.splitlines()
    assert (2, "1970-01-01T00:00:01Z  a      me      1 R  a") == (len(table), table[1])
    assert "" == run("retained", path, "none/#").stdout
