"""Fixtures for the tests of several layouts."""

from __future__ import annotations

import pytest
from topicstore_layouts.block import compaction, deletion, reading, segments, slab, topic_index, writing
from topicstore_layouts.shared import name_table


@pytest.fixture
def tiny_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make blocks, segments and dictionaries so small that a few messages exercise every case."""
    for module, values in {
        writing: {"_SPLIT_ROWS": 3, "_MOST_ROWS": 30, "_MOST_BYTES": 2_000},
        slab: {"_ENOUGH": 10},
        deletion: {"_LOOKED_AT": 2},
        compaction: {
            "SEGMENT_ROWS": 50,
            "SEGMENT_BYTES": 200_000,
            "FRAME_ROWS": 8,
            "FRAME_BYTES": 1_000,
            "WORTH_ROWS": 25,
            "MOST_BLOCKS": 12,
        },
        segments: {"_ROWS_A_TOPIC": 2},
        reading: {"_FEW_FRAMES": 1, "_TOGETHER": 40, "_TOGETHER_BYTES": 1_500, "_MOST_TOGETHER": 3},
        topic_index: {
            "MOST_BYTES": 16_000,
            "PAGE_TOPICS": 40,
            "LEAST_BLOCKS": 2,
            "_READ_BLOCKS": 3,
            "_FIRST_BLOCKS": 1,
        },
        name_table: {"MOST_BYTES": 2_000, "LONGEST": 50},
    }.items():
        for name, value in values.items():
            monkeypatch.setattr(module, name, value)
