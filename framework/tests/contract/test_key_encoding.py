"""Encoding of keys as bytes that sort like the keys."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from topicstore.contract.engine import DATA, META, Keyspace
from topicstore.contract.errors import InvalidArgumentError
from topicstore.contract.key_encoding import KeyEncoding

SHAPES = st.lists(st.sampled_from((4, 8)), min_size=1, max_size=4).map(tuple)
PREFIXES = st.binary(max_size=3)


def numbers(width: int) -> st.SearchStrategy[int]:
    """Draw numbers of a width in bytes, often small, large, or with a single bit."""
    largest = (1 << 8 * width) - 1
    single = st.integers(0, 8 * width - 1).map(lambda bit: 1 << bit)
    return st.integers(0, 3) | single | st.integers(largest - 3, largest) | st.integers(0, largest)


@st.composite
def keyspaces_with_keys(draw: st.DrawFn) -> tuple[Keyspace, list[Any]]:
    """Draw a keyspace, and keys of it."""
    shape = draw(st.none() | SHAPES)
    keys = st.binary(max_size=6) if shape is None else st.tuples(*map(numbers, shape))
    return Keyspace("some", shape), draw(st.lists(keys, max_size=8))


def test_the_stored_form() -> None:
    """The encoding doesn't change, because databases contain it."""
    numbers = KeyEncoding(DATA)
    assert bytes.fromhex("00000001 0000000000000002 0000000000000003") == numbers.encode((1, 2, 3))
    assert b"\x10" + numbers.encode((1, 2, 3)) == KeyEncoding(DATA, b"\x10").encode((1, 2, 3))
    assert b"key" == KeyEncoding(META).encode(b"key")
    assert b"\x11key" == KeyEncoding(META, b"\x11").encode(b"key")


@given(keyspaces_with_keys(), PREFIXES)
def test_keys_come_back(drawn: tuple[Keyspace, list[Any]], prefix: bytes) -> None:
    """Decoding returns the encoded keys, and `encode_all` returns the same as `encode` for each."""
    keyspace, keys = drawn
    encoding = KeyEncoding(keyspace, prefix)
    encoded = [encoding.encode(key) for key in keys]
    assert all(each.startswith(prefix) for each in encoded)
    assert keys == list(map(encoding.decode, encoded))
    assert encoded == list(encoding.encode_all(keys))


@given(keyspaces_with_keys(), PREFIXES)
def test_bytes_are_ordered_as_keys_are(drawn: tuple[Keyspace, list[Any]], prefix: bytes) -> None:
    """The order of encoded keys is the order of the keys, and different keys have different encodings."""
    keyspace, keys = drawn
    encoding = KeyEncoding(keyspace, prefix)
    assert list(map(encoding.encode, sorted(keys))) == sorted(map(encoding.encode, keys))
    assert len(set(keys)) == len(set(map(encoding.encode, keys)))


@pytest.mark.parametrize("prefix", [b"", b"\x10"])
@pytest.mark.parametrize(
    ("keyspace", "key"),
    [
        (DATA, (1, 2)),
        (DATA, (1, 2, 3, 4)),
        (DATA, (1, 2, -1)),
        (DATA, (1 << 32, 2, 3)),
        (DATA, (1, 2, 1 << 64)),
        (DATA, (1, 2, 3.0)),
        (DATA, (1, 2, None)),
        (DATA, b"\1\2\3"),
        (DATA, None),
        (DATA, 7),
        (META, (1, 2, 3)),
        (META, "key"),
        (META, bytearray(b"key")),
        (META, None),
    ],
)
def test_other_keys_are_refused(keyspace: Keyspace, key: Any, prefix: bytes) -> None:
    """Keys of a wrong type, length or range are refused with an error that names them, even among valid keys."""
    encoding = KeyEncoding(keyspace, prefix)
    good = b"key" if keyspace.shape is None else (1, 2, 3)
    with pytest.raises(InvalidArgumentError, match="is not a key of keyspace") as alone:
        encoding.encode(key)
    with pytest.raises(InvalidArgumentError) as among:
        encoding.encode_all([good, key, good])
    assert str(alone.value) == str(among.value)
    assert str(alone.value).startswith(repr(key))
