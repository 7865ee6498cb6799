"""Tests of the stored form of a message as one value: round trips, and detection of damage."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np
import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st
from topicstore import Message, MessageBatch, Properties
from topicstore.contract.columns import Constant
from topicstore.contract.errors import CorruptionError, NewerFormatError
from topicstore.contract.positions import COUNTER_BITS, Positions
from topicstore_conformance.layout.damage import broken
from topicstore_conformance.oracle import strategies
from topicstore_layouts.shared.message_rows import batch_of, decode_rows, encode_rows, read_rows

SHARD, GENERATION = 4, 2
SLAB = SHARD << 32 | GENERATION
START = 1_700_000_000_000_000 << COUNTER_BITS
TIME = START >> COUNTER_BITS

times = st.one_of(st.just(TIME), st.integers(0, 2**52))


def at(rows: int, gaps: int = 1) -> Positions:
    return np.arange(rows, dtype=np.uint64) * np.uint64(gaps) + np.uint64(START)


def encoded(messages: Sequence[Message], positions: Positions | None = None) -> list[bytes]:
    """Return the values of messages; a message without a timestamp gets the time of its position."""
    batch = MessageBatch.from_messages(messages)
    positions = at(len(batch)) if positions is None else positions
    own = [m.timestamp for m in messages]
    filled = [p >> COUNTER_BITS if time is None else time for p, time in zip(positions.tolist(), own, strict=True)]
    return encode_rows(batch.placed(positions, filled, SHARD), SLAB)


def plain(rows: int) -> list[Message]:
    return [Message(f"a/{n}", b"%d" % n * 20, "c", 1, False, TIME) for n in range(rows)]


def sealed(body: bytes) -> bytes:
    """Return a value for the first position: these bytes after their correct checksum."""
    seed = START ^ (SLAB * 0x9E37_79B9_7F4A_7C15 % 2**64)
    return b"\x96\xc4\x08" + xxhash.xxh3_64_digest(body, seed) + body


@given(st.lists(strategies.messages(times=times), max_size=12), st.sampled_from([1, 5_000]))
def test_everything_comes_back(messages: list[Message], gaps: int) -> None:
    """Every field of every message is decoded as it was encoded, with its position and shard."""
    positions = at(len(messages), gaps)
    batch = decode_rows(encoded(messages, positions), positions, SHARD, SLAB)
    assert messages == batch.to_messages()
    if messages:
        assert positions.tolist() == batch.positions.tolist()
        assert [SHARD] * len(messages) == list(batch.shards)


def test_columns_that_say_one_thing() -> None:
    """A column with equal values in all rows is decoded to a single constant."""
    batch = decode_rows(encoded(plain(50)), at(50), SHARD, SLAB)
    for column, value in ((batch.qos, 1), (batch.retain, False), (batch.properties, None)):
        assert isinstance(column, Constant)
        assert value is column.value or value == column.value


def test_times_of_positions_take_no_room() -> None:
    """A timestamp that equals the time in the position is stored in one byte instead of nine."""
    implied, own = encoded([Message("a", b"", timestamp=None)]), encoded([Message("a", b"", timestamp=TIME + 1)])
    assert 8 == len(own[0]) - len(implied[0])


def test_choosing_rows() -> None:
    """A caller can select among decoded rows before building a batch."""
    positions = at(10)
    rows = read_rows(encoded(plain(10)), positions, SLAB)
    assert [message.topic for message in plain(10)] == [row.topic for row in rows]
    assert plain(10)[3:7:3] == batch_of(rows[3:7:3], positions[3:7:3], SHARD).to_messages()


@pytest.mark.parametrize("message", [Message("a/b", b"payload", "c"), Message("a", b"", properties=Properties(1, 2))])
def test_every_flipped_bit_and_truncation_is_found(message: Message) -> None:
    """Every flipped bit and truncation of a value raises an error with its position, alone and among others."""
    good = encoded([message] * 3)
    positions = at(3)
    value = good[1]
    for bad in [*broken(value), value + good[2]]:
        for values, places in (([bad], positions[1:2]), ([good[0], bad, good[2]], positions)):
            with pytest.raises(CorruptionError, match=str(START + 1)) as caught:
                decode_rows(values, places, SHARD, SLAB)
            assert f"shard {SHARD}, generation {GENERATION}, message at position {START + 1}" == caught.value.place


def test_values_that_make_up_for_each_other() -> None:
    """Values whose bytes were shifted between neighbours are reported as damaged, although all of them decode."""
    one, other, third = encoded(plain(3))
    with pytest.raises(CorruptionError, match=str(START)):
        decode_rows([one + other[:5], other[5:], third], at(3), SHARD, SLAB)
    with pytest.raises(CorruptionError, match=str(START)):
        decode_rows([one + other, b"", third], at(3), SHARD, SLAB)


@pytest.mark.parametrize(
    ("position", "slab"), [(START + 1, SLAB), (START, SLAB + 1), (START, SLAB + (1 << 32)), (START ^ 1 << 63, SLAB)]
)
def test_a_value_under_another_key(position: int, slab: int) -> None:
    """A value that is read under another position, generation or shard raises `CorruptionError`."""
    with pytest.raises(CorruptionError, match="checksum"):
        decode_rows(encoded(plain(1)), np.array([position], dtype=np.uint64), SHARD, slab)


def test_newer_values() -> None:
    """A value of a later version raises `NewerFormatError`, and a damaged one `CorruptionError`."""
    newer = sealed(b"\x10" + msgspec.msgpack.encode({"a": 1}))
    for values, rows in (([newer], 1), ([newer, *encoded(plain(2))[1:]], 2)):
        with pytest.raises(NewerFormatError, match=f"shard {SHARD}, .* position {START}: .* version 2"):
            decode_rows(values, at(rows), SHARD, SLAB)
    for body in (b"\x08", b"", b"\xa1a", b"\x00\xa1a\xc4\x00\xa0\xc0", b"\x08\xa1\xff\xc4\x00\xa0\xc0"):
        with pytest.raises(CorruptionError, match=str(START)):
            decode_rows([sealed(body)], at(1), SHARD, SLAB)


def test_the_form_is_frozen() -> None:
    """Values stored by the first version are encoded and decoded byte for byte."""
    messages = [
        Message("a/é", b"\x00\xff", "client", 1, True, TIME, Properties(1, 60, "t", "r/t", b"c", (("k", "v"),))),
        Message("$SYS", b"", "", 0, False, 5),
    ]
    stored = [
        bytes.fromhex("97c4080d29f9efd25e5a100da4612fc3a9c40200ffa6636c69656e74c096013ca174a3722f74c401639192a16ba176"),
        bytes.fromhex("96c408178e0be348e9da3a08a424535953c400a005"),
    ]
    assert stored == encoded(messages)
    assert messages == decode_rows(stored, at(2), SHARD, SLAB).to_messages()
