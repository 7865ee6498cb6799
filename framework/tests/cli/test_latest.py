"""``topicstore latest``."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import topicstore as ts
from click.testing import Result

Run = Callable[..., Result]


def test_the_last_message_of_each_topic(run: Run, path: Path) -> None:
    """In order of topics, in the formats of replay."""
    with ts.open(path) as db:
        db.store([ts.Message(topic, b"old", "me", timestamp=1) for topic in ("b/1", "a/1", "a")])
        db.store([ts.Message(topic, topic.encode(), "you", 1, timestamp=1_000_000) for topic in ("b/1", "a/1", "a")])
    lines = [json.loads(line) for line in run("latest", path).stdout.splitlines()]
    assert [("a", "a"), ("a/1", "a/1"), ("b/1", "b/1")] == [(line["topic"], line["payload"]) for line in lines]
    assert ["b/1"] == [json.loads(line)["topic"] for line in run("latest", path, "b/#").stdout.splitlines()]
    assert "1970-01-01T00:00:01Z,a/1,you,1,false,a/1,," in run("latest", path, "+/1", "--format", "csv").stdout
    table = run("latest", path, "a", "--format", "table").stdout.splitlines()
    assert (2, "1970-01-01T00:00:01Z  a      you     1    a") == (len(table), table[1])
    assert "" == run("latest", path, "none/#").stdout
