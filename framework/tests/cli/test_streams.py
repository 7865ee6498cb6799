"""``topicstore streams``: the order of the list."""

from __future__ import annotations

from pathlib import Path

import topicstore as ts

from .conftest import document


def test_streams_are_in_natural_order(tmp_path: Path) -> None:
    """Streams are sorted by topic, with numbers in topics in numeric order."""
    topics = ["b", "a/10/x", "a/9/x", "a/010/x", "a", "/", "a/9", "a/" + "9" * 5_000]
    with ts.open(tmp_path / "db", mode="x") as opened:
        opened.store([ts.Message(topic, b"") for topic in topics])
    ordered = ["/", "a", "a/9", "a/9/x", "a/010/x", "a/10/x", "a/" + "9" * 5_000, "b"]
    assert ordered == [stream["pattern"] for stream in document("streams", tmp_path / "db")["streams"]]
