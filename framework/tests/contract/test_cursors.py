"""Cursors can be converted to bytes and back, and other bytes are refused."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st
from topicstore.contract.cursors import Cursor
from topicstore.contract.errors import InvalidCursorError

ONE = Cursor(b"database", 3, 2, 2**64 - 1, "fleet/+/bus/#", b"\x00place\xff")
FIELDS: list[Any] = [b"database", 3, 2, 2**64 - 1, "fleet/+/bus/#", b"\x00place\xff"]

numbers = st.integers(0, 2**64 - 1)
levels = st.text(st.characters(codec="utf-8", exclude_characters="\0+#/"), max_size=8)
filters = st.lists(st.just("+") | levels, min_size=1, max_size=6).map("/".join).filter(bool)


def framed(body: bytes) -> bytes:
    """Prepend a cursor's version and a valid checksum to a body."""
    return b"\x01" + xxhash.xxh64_intdigest(body).to_bytes(8, "little") + body


def packed(*fields: Any) -> bytes:
    return framed(msgspec.msgpack.encode(fields))


@given(st.binary(max_size=40), numbers, numbers, numbers, filters, st.binary(max_size=200))
def test_an_cursor_comes_back_from_its_bytes(
    database: bytes, shard: int, generation: int, stream: int, topic_filter: str, place: bytes
) -> None:
    """All fields of a cursor are the same after conversion to bytes and back."""
    one = Cursor(database, shard, generation, stream, topic_filter, place)
    assert one == Cursor.from_bytes(one.to_bytes())


def test_the_stored_form_is_frozen() -> None:
    """The encoding of cursors in version 1 doesn't change."""
    expected = bytes.fromhex("0139d9ea36087716e696c404646174610302cc80a3612f2bc40200ff")
    one = Cursor(b"data", 3, 2, 128, "a/+", b"\x00\xff")
    assert expected == one.to_bytes()
    assert one == Cursor.from_bytes(expected)


@pytest.mark.parametrize("kind", [bytes, bytearray, memoryview])
def test_any_kind_of_bytes_will_do(kind: type) -> None:
    """Cursors can be read from bytes, bytearray and memoryview, which are copied."""
    one = Cursor.from_bytes(kind(ONE.to_bytes()))
    assert one == ONE
    assert (bytes, bytes) == (type(one.database), type(one.place))


def test_an_cursor_cannot_be_changed() -> None:
    """A cursor is immutable, and equal cursors have the same hash."""
    with pytest.raises(AttributeError):
        ONE.shard = 4  # type: ignore[misc]
    assert {Cursor(*FIELDS): 1} == {ONE: 1}


def test_every_damaged_byte_is_noticed() -> None:
    """A change of any single byte of a cursor is detected."""
    good = ONE.to_bytes()
    for place in range(len(good)):
        for change in range(1, 256):
            bad = good[:place] + bytes([good[place] ^ change]) + good[place + 1 :]
            with pytest.raises(InvalidCursorError):
                Cursor.from_bytes(bad)


def test_every_truncation_and_extension_is_noticed() -> None:
    """A truncated or extended cursor is refused, even with a valid checksum."""
    good = ONE.to_bytes()
    for size in range(len(good)):
        with pytest.raises(InvalidCursorError):
            Cursor.from_bytes(good[:size])
        with pytest.raises(InvalidCursorError):
            Cursor.from_bytes(good + good[: size + 1])
    body, short = good[9:], [packed(*FIELDS[:size]) for size in range(1, 6)]
    cut = [framed(each) for each in (body + b"\xc0", body + body, *(body[:cut] for cut in range(len(body))))]
    for bad in (*short, *cut):  # with a correct checksum
        with pytest.raises(InvalidCursorError):
            Cursor.from_bytes(bad)


@pytest.mark.parametrize(
    "thing", [None, "", "text", 1, 1.5, [1], (b"",), {}, ONE, object()], ids=lambda t: type(t).__name__
)
def test_only_bytes_are_read(thing: Any) -> None:
    """Anything but bytes is refused with `InvalidCursorError`."""
    with pytest.raises(InvalidCursorError, match="is bytes"):
        Cursor.from_bytes(thing)


@pytest.mark.parametrize("version", [0, 2, 255])
def test_other_versions_are_refused(version: int) -> None:
    """The error for a cursor of an unknown version says that the version may be newer."""
    with pytest.raises(InvalidCursorError, match="newer version"):
        Cursor.from_bytes(bytes([version]) + ONE.to_bytes()[1:])


@pytest.mark.parametrize("field", range(6))
@pytest.mark.parametrize("value", [None, True, 1.0, -1, "text+", b"\xff", [1], {"a": 1}], ids=repr)
def test_fields_of_the_wrong_type_are_refused(field: int, value: Any) -> None:
    """A field of a wrong type, or a negative number, is refused, even with a valid checksum."""
    if field in (0, 5) and isinstance(value, bytes):
        return
    with pytest.raises(InvalidCursorError):
        Cursor.from_bytes(packed(*FIELDS[:field], value, *FIELDS[field + 1 :]))


BAD_UTF8 = [b"\xff", b"a\xc3", b"\xed\xa0\x80", b"\xc0\xaf", b"\xf4\x90\x80\x80"]
"""Encodings that are truncated, of surrogates, overlong, or beyond Unicode."""


@pytest.mark.parametrize("text", ["", "a#", "a/#/b", "a+", "\0", "a" * 65_536, *BAD_UTF8], ids=lambda it: repr(it[:9]))
def test_bad_filters_are_refused(text: str | bytes) -> None:
    """A filter that is invalid, or isn't valid UTF-8, is refused."""
    data = text if isinstance(text, bytes) else text.encode()
    head = bytes([0xA0 + len(data)]) if len(data) < 32 else b"\xdb" + len(data).to_bytes(4, "big")
    with pytest.raises(InvalidCursorError):
        Cursor.from_bytes(framed(b"\x96\xc4\x00\x03\x02\x01" + head + data + b"\xc4\x00"))


EMPTY = b"\x96\xc4\x00\x00\x00\x00\xa1a"
"""The encoding of all fields but the last."""


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"\xdd\xff\xff\xff\xff",
        b"\x96\xdb\xff\xff\xff\xff",
        EMPTY + b"\xc6\x7f\xff\xff\xff" + b"\0" * 100,
        EMPTY + b"\xd6\xff\x00\x00\x00\x00",
        b"\x91" * 200_000,
        EMPTY + b"\x81\xa0" * 200_000,
        b"\x97" + EMPTY[1:] + b"\xc4\x00" + b"\x91" * 200_000,
    ],
    ids=lambda body: f"{body[:12].hex()}-{len(body)}",
)
def test_hostile_bodies_are_refused(body: bytes) -> None:
    """Huge lengths and deep nesting are refused, without much memory or a stack overflow."""
    with pytest.raises(InvalidCursorError):
        Cursor.from_bytes(framed(body))


@settings(max_examples=500)
@given(st.binary(max_size=200))
def test_random_bytes_are_refused(data: bytes) -> None:
    """Random bytes, even after a valid version, are refused with `InvalidCursorError`."""
    for bad in (data, b"\x01" + data):
        with pytest.raises(InvalidCursorError):
            Cursor.from_bytes(bad)
    try:
        one = Cursor.from_bytes(framed(data))
    except InvalidCursorError:
        return
    assert one == Cursor.from_bytes(one.to_bytes())


@settings(max_examples=500)
@given(st.integers(0, len(ONE.to_bytes()) - 10), st.binary(min_size=1, max_size=4))
def test_garbled_bodies_with_a_good_checksum_are_read_or_refused(place: int, change: bytes) -> None:
    """Changed bytes with a correct checksum are decoded or refused with `InvalidCursorError`."""
    body = ONE.to_bytes()[9:]
    try:
        one = Cursor.from_bytes(framed(body[:place] + change + body[place + len(change) :]))
    except InvalidCursorError:
        return
    assert one == Cursor.from_bytes(one.to_bytes())
