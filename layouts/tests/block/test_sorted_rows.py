"""Tests of rows as arrays, which compaction sorts."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pytest
from hypothesis import given
from hypothesis import strategies as st
from topicstore import Properties
from topicstore_layouts.block import sorted_rows
from topicstore_layouts.block.packing import own_times
from topicstore_layouts.block.sorted_rows import RowArrays, SortedRows, sort_rows

Row = tuple[str, str, int, bool, bytes, int]
rows = st.lists(
    st.tuples(
        st.sampled_from(["a", "b/é", "b", "", "long/topic"]),
        st.text(max_size=2),
        st.integers(0, 2),
        st.booleans(),
        st.binary(max_size=5),
        st.integers(0, 2**60),
    ),
    min_size=1,
    max_size=12,
)


def arrays(part: list[Row], first: int, *, own: bool, plain: bool) -> RowArrays:
    """Return rows as arrays, with positions that count from ``first``, and a text for each topic and client id."""
    topics, clients, qos, retain, payloads, times = zip(*part, strict=True)
    places = np.arange(len(part))
    return RowArrays(
        (np.arange(len(part)) + first).astype(np.uint64) << np.uint64(11),
        places,
        pa.array(topics, pa.string()),
        np.array([len(topic) + 1 if topic != "a" else 0 for topic in topics]),
        places[::-1],
        pa.array(clients[::-1], pa.string()),
        np.array(qos, np.uint8),
        np.array(retain, np.uint8),
        None if own else np.array(times),
        None if plain else [Properties(message_expiry_interval=time % 7) for time in times],
        np.array(list(map(len, payloads))),
        b"".join(payloads),
    )


def by_stream_and_text(_: object, streams: np.ndarray, texts: pa.Array) -> np.ndarray:
    table = pa.table({"stream": streams, "topic": texts})
    return pc.sort_indices(table, [("stream", "ascending"), ("topic", "ascending")]).to_numpy().astype(np.int64)


def listed(found: SortedRows) -> list[tuple[object, ...]]:
    times = own_times(found.positions) if found.timestamps is None else found.timestamps
    payloads = [found.data[a:b] for a, b in zip(found.offsets.tolist(), found.offsets[1:].tolist(), strict=False)]
    return list(
        zip(
            [found.topic_texts[code] for code in found.topics],
            [found.client_texts[code] for code in found.clients],
            found.qos.tolist(),
            found.retain.tolist(),
            payloads,
            times.tolist(),
            found.positions.tolist(),
            [None] * len(times) if found.properties is None else found.properties,
            strict=True,
        )
    )


@given(st.lists(st.tuples(rows, st.booleans(), st.booleans()), min_size=1, max_size=3))
def test_rows_of_several_parts_are_sorted(parts: list[tuple[list[Row], bool, bool]]) -> None:
    """All rows of all parts come back complete, in order of stream, topic and position."""
    given_parts, expected, first = [], [], 1
    for part, own, plain in parts:
        given_parts.append(arrays(part, first, own=own, plain=plain))
        for number, (topic, client, qos, retain, payload, time) in enumerate(part, first):
            properties = None if plain else Properties(message_expiry_interval=time % 7)
            expected.append(
                (topic, client, qos, int(retain), payload, number if own else time, number << 11, properties)
            )
        first += len(part)
    found = sort_rows(given_parts, lambda texts: [len(text) + 1 for text in texts], by_stream_and_text)
    assert sorted(expected, key=lambda row: (len(row[0]) + 1, row[0], row[6])) == listed(found)
    assert [len(text) + 1 for text in found.topic_texts] == found.streams.tolist()
    assert len(set(found.topic_texts)) == len(found.topic_texts)


@pytest.mark.parametrize("codes", [[], [5], [70_000, 1, 65_536, 0, 65_536, 1, 131_072]])
def test_codes_of_more_than_16_bits_are_sorted(codes: list[int]) -> None:
    """Codes are sorted in a stable order, whether they have 16 bits or more."""
    expected = sorted(range(len(codes)), key=codes.__getitem__)
    assert expected == sorted_rows._stable_order(np.array(codes, np.int64)).tolist()
