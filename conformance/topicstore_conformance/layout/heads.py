"""Tests of message heads (topic, client id, position and payload size), from which messages are counted."""

from __future__ import annotations

import numpy as np
import pytest
from topicstore import TopicFilter
from topicstore.contract.layout import Heads

from .fixtures import Fixtures, Stored, numbered
from .reading import FILTERS, TOPICS

__all__ = ["Counting"]

Counted = tuple[int, str, str, int]
"""Position, topic, client id, and bytes of the payload."""


class Counting(Fixtures):
    """Tests of `Slab.heads` and `CompactStep.heads`, and of `Slab.reads_heads`, which says whether a slab has them."""

    def test_heads_are_those_of_the_messages(self, stored: Stored) -> None:
        """A filter's heads are those of its messages, in consecutive ranges of positions, compacted or not."""
        for round_ in range(3):
            for gap, size in ((1, 4), (30, 8), (1, 300)):
                stored.put(numbered(TOPICS, 150, size), gap)
                stored.put(numbered(["f/y/3/s"], 10, size))
            stored.delete("f/x/#", stored.rows[100][0], stored.rows[200][0])
            if round_ != 1:
                stored.compact(stored.rows[-200][0])
            if stored.slab.reads_heads:
                assert stored.slab.epoch == 1, "a slab with epochs can't read heads"
                for text in FILTERS:
                    self._check(stored, text, 0, stored.last)
                    self._check(stored, text, stored.rows[120][0], stored.rows[-50][0])

    def test_heads_of_any_range(self, stored: Stored) -> None:
        """The heads of a range end at its last position, even if that lies within a batch, a merged unit or a gap."""
        for gap in (1, 30, 1):
            stored.put(numbered(TOPICS, 60), gap)
        stored.compact(stored.rows[-61][0])
        if not stored.slab.reads_heads:
            pytest.skip("the layout reads no heads")
        rows = [position for position, _ in stored.rows]
        for first in (0, rows[10], rows[70] + 1):
            for last in (rows[70] + 3, rows[90], rows[119], rows[150]):
                for text in ("#", "f/y/3/s", "none"):
                    self._check(stored, text, first, last)

    def test_compaction_steps_have_the_heads_of_a_range(self, stored: Stored) -> None:
        """The heads of a compaction step are those of all messages in its range, if the slab has heads."""
        for round_ in range(3):
            for gap in (1, 30):
                stored.put(numbered(TOPICS, 150), gap)
            seen = 0
            for step in stored.slab.compact(stored.last - 1, whole=True):
                assert stored.slab.reads_heads == (step.heads is not None)
                if step.heads is not None:
                    assert expected(stored, "#", step.heads, hidden=True) == counted(step.heads)
                    seen += len(step.heads.positions)
                stored.engine.write(step.write)
            assert seen >= 150 or not stored.slab.reads_heads
            stored.delete("f/y/#" if round_ else "f/+/1/#")

    @staticmethod
    def _check(stored: Stored, text: str, first: int, last: int) -> None:
        before = first - 1
        for heads in stored.slab.heads(TopicFilter(text), first, last):
            assert heads.before == before < heads.last <= last
            assert expected(stored, text, heads) == counted(heads)
            before = heads.last
        assert before == last


def expected(stored: Stored, text: str, heads: Heads, *, hidden: bool = False) -> list[Counted]:
    """Return the rows that a filter, or every filter if ``hidden``, must have in the range of ``heads``."""
    filters = stored.everything() if hidden else [text]
    rows = [row for one in filters for row in stored.wanted(one, heads.before + 1, heads.last)]
    return sorted((position, one.topic, one.client_id, len(one.payload)) for position, one in rows)


def counted(heads: Heads) -> list[Counted]:
    """Return the rows of heads in order of positions."""
    columns = heads.positions.tolist(), list(heads.topics), list(heads.client_ids), np.asarray(heads.sizes).tolist()
    return sorted(zip(*columns, strict=True))
