"""Tests of single contenders."""

from __future__ import annotations

from pathlib import Path

import pytest
from topicstore import Message
from topicstore_benchmarks.contenders import sqlite
from topicstore_benchmarks.contenders.sqlite import SqliteContender
from topicstore_conformance.oracle.model import match


@pytest.mark.parametrize("way", sqlite._WAYS)
def test_each_way_to_ask_sqlite_is_right(way: str, tmp_path: Path) -> None:
    """In each of SQLite's ways to evaluate a filter, ``+`` matches exactly one level and other levels match exactly."""
    topics = ["a/b/c", "a/x/c", "a/b/x/c", "a/b/cc", "a/b", "aa/b/c", "a0/b/c", "a//c", "b/b/c"]
    side = SqliteContender("sqlite", tmp_path / "side")
    side._ways = dict.fromkeys(["a/+/c", "a/b/+"], way)
    side.open()
    side.store([Message(topic, b"", timestamp=time) for time, topic in enumerate(topics)])
    for text in ("a/+/c", "a/b/+"):
        expected = {topic for topic in topics if match(text, topic)}
        assert expected == {message.topic for message in side.replay(text)}
    side.close()
