"""``topicstore queue``."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import topicstore as ts
from click.testing import Result

Run = Callable[..., Result]
Document = Callable[..., dict[str, Any]]


def test_queues_are_listed_read_and_dropped(run: Run, document: Document, path: Path) -> None:
    with ts.open(path) as db:
        db.queues.open("to/cloud", max_messages=9, max_bytes=5_000).append(
            [ts.Message(f"a/{n}", b"%d" % n) for n in range(5)]
        )
        db.queues.open("empty")
    (empty, cloud) = document("queue", path)["queues"]
    assert ("empty", 0, None, "refuse") == (
        empty["name"],
        empty["messages"],
        empty["max_messages"],
        empty["overflow"],
    )
    assert ("to/cloud", 5, 9, 5_000) == (
        cloud["name"],
        cloud["messages"],
        cloud["max_messages"],
        cloud["max_bytes"],
    )
    assert "9 messages, 5.0 kB: refuse" in run("queue", "list", path).stdout

    def read(*more: object) -> list[str]:
        lines = run("queue", "read", path, "to/cloud", *more).stdout.splitlines()
        return [json.loads(line)["topic"] for line in lines]

    assert ["a/0", "a/1", "a/2", "a/3", "a/4"] == read()
    assert [["a/0", "a/1"], ["a/0", "a/1"], ["a/2"]] == [
        read("--limit", 2),
        read("--limit", 2, "--commit"),
        read("--limit", 1),
    ]
    assert "a/2" in run("queue", "read", path, "to/cloud", "--format", "table").stdout
    assert "" == run("queue", "read", path, "empty", "--commit").stdout
    assert "needs --yes" in run("queue", "drop", path, "to/cloud", code=2).stderr
    assert "with 3 messages" in run("queue", "drop", path, "to/cloud", "--yes").stdout
    assert ["empty"] == [one["name"] for one in document("queue", path)["queues"]]


@pytest.mark.parametrize("arguments", [["read"], ["drop", "--yes"]])
def test_no_command_makes_a_queue_by_looking(run: Run, document: Document, path: Path, arguments: list[str]) -> None:
    name, *more = arguments
    assert "there is no queue 'q'" in run("queue", name, path, "q", *more, code=2).stderr
    assert [] == document("queue", path)["queues"]
