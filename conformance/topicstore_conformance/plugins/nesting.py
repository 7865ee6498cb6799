"""Tests of the plugins within or around another transform."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import topicstore as ts
from topicstore import Message
from topicstore.plugins import registry

from topicstore_conformance.plugins.fixtures import Fixtures, messages, opened
from topicstore_conformance.subjects.pairs import Pair
from topicstore_conformance.subjects.transforms import Shifting

__all__ = ["Nesting"]

_OTHER = "topicstore-conformance-shifting"
both_ways = pytest.mark.parametrize("nested", ["within another", "around another"], indirect=True)


class Nesting(Fixtures):
    """Tests of the plugins within or around another transform."""

    @pytest.fixture
    def nested(
        self, request: pytest.FixtureRequest, pair: Pair, directory: Path, monkeypatch: pytest.MonkeyPatch
    ) -> Iterator[ts.Database]:
        """Yield a database with another transform, outside or inside the plugins."""
        monkeypatch.setitem(registry().plugins, _OTHER, Shifting(7))
        inside = request.param == "around another"
        names = (*pair.plugins, _OTHER) if inside else (_OTHER, *pair.plugins)
        with opened(pair, directory / "nested", plugins=names, shards=2) as db:
            yield db

    @both_ways
    def test_nested(self, nested: ts.Database) -> None:
        """Within or around another transform, the plugins return every message as it was stored."""
        nested.store(messages(6))
        nested.store(ts.MessageBatch.from_messages(messages(6, 6)).to_arrow())
        nested.store([Message("empty", b"", "c")])
        assert messages(12) == sorted(nested.replay("t/#"), key=lambda message: message.timestamp or 0)
        found = [payload for batch in nested.replay_arrow("empty") for payload in batch.column("payload").to_pylist()]
        assert [b""] == found

    @both_ways
    def test_nested_and_kept(self, nested: ts.Database) -> None:
        """Within or around another transform, the plugins return retained and queued messages unchanged."""
        nested.publish([Message("t", b"kept", "c", retain=True)])
        assert [b"kept"] == [message.payload for message in nested.retained("t")]
        queue = nested.queues.open("queue")
        queue.append([Message("t", b"queued", "c"), Message("t", b"", "c")])
        assert [b"queued", b""] == [message.payload for message in queue.read().messages]
