"""Splitting a stream of bytes into frames, in whatever pieces they arrive."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from topicstore.server.codec.frames import Frame, FrameReader, FramingError
from topicstore.server.codec.reason import ReasonCode
from topicstore_conformance.conditions.profiles import PROFILE
from topicstore_conformance.mqtt import wire

LARGE = 1 << 24
CONNECT = wire.connect("me")
CONNECT_FRAME: Frame = (0x10, CONNECT[2:])
bodies = st.one_of(st.binary(max_size=5), st.integers(0, 70_000).map(bytes))
frames = st.lists(st.tuples(st.sampled_from([0x30, 0x32, 0x40, 0xC0, 0xE0]), bodies), max_size=8)


def packet(first: int, body: bytes) -> bytes:
    return bytes((first,)) + wire.variable(len(body)) + body


@PROFILE
@given(frames, st.data())
def test_frames_do_not_depend_on_how_bytes_arrive(expected: list[Frame], data: st.DataObject) -> None:
    stream = CONNECT + b"".join(packet(*frame) for frame in expected)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(stream)), max_size=12)))
    reader = FrameReader(LARGE)
    found = []
    for begin, end in zip([0, *cuts], [*cuts, len(stream)], strict=True):
        found += reader.feed(stream[begin:end])
        if found:
            reader.version = 5
    assert found == [CONNECT_FRAME, *expected]
    assert reader.feed(b"\xc0\0") == [(0xC0, b"")]  # no bytes are left over


@pytest.mark.parametrize("size", [0, 127, 128, 16_383, 16_384, 2_097_151, 2_097_152])
def test_a_packet_may_have_any_length(size: int) -> None:
    reader = FrameReader(LARGE)
    reader.version = 5
    assert reader.feed(packet(0x30, bytes(size))) == [(0x30, bytes(size))]


def test_a_large_packet_is_kept_once() -> None:
    """A large packet that arrives in small pieces takes little more memory than its bytes."""
    reader = FrameReader(LARGE)
    reader.version = 5
    body = bytes(1 << 20)
    whole = packet(0x30, body)
    assert len(whole) % 2 == 0
    for at in range(0, len(whole) - 2, 2):
        assert reader.feed(whole[at : at + 2]) == []
    assert len(body) < reader._rest.__sizeof__() < 1.3 * len(body)
    assert reader.feed(whole[-2:]) == [(0x30, body)]
    assert reader._rest.__sizeof__() < 100


@pytest.mark.parametrize("limit", [100, 1_000, 100_000])
def test_a_packet_above_the_limit_is_refused_before_it_has_arrived(limit: int) -> None:
    largest = next(size for size in range(limit, 0, -1) if len(packet(0x30, bytes(size))) == limit)
    reader = FrameReader(LARGE)
    reader.version, reader.max_packet_size = 5, limit
    assert reader.feed(packet(0x30, bytes(largest))) == [(0x30, bytes(largest))]
    with pytest.raises(FramingError, match=f"more than {limit:,} bytes") as bad:
        reader.feed(b"\xc0\0\x30" + wire.variable(largest + 1))
    assert bad.value.reason is ReasonCode.PACKET_TOO_LARGE
    assert bad.value.frames == [(0xC0, b"")]


@pytest.mark.parametrize("version", [0, 4, 5])
@pytest.mark.parametrize("cut", range(1, 6))
def test_a_length_of_five_bytes_is_malformed(version: int, cut: int) -> None:
    reader = FrameReader(LARGE)
    reader.version = version
    bad = b"\x10\xff\xff\xff\xff\x01"
    if cut < 5:
        assert reader.feed(bad[:cut]) == []
        bad = bad[cut:]
    with pytest.raises(FramingError, match="more than four bytes") as error:
        reader.feed(bad)
    assert error.value.reason is ReasonCode.MALFORMED_PACKET


@pytest.mark.parametrize("length", [b"\x80\x00", b"\x80\x80\x00", b"\x80\x80\x80\x00"])
def test_mqtt_311_allows_a_length_with_more_bytes_than_it_needs(length: bytes) -> None:
    reader = FrameReader(LARGE)
    reader.version = 4
    assert reader.feed(b"\xc0" + length) == [(0xC0, b"")]


def pieces_of_a_padded_connect(version: int) -> list[list[bytes]]:
    """Return several ways to split a CONNECT whose length field has a byte too many."""
    connect = wire.connect("me", version=version)
    padded = bytes((connect[0], connect[1] | 128, 0)) + connect[2:]
    return [[padded], [padded[:2], padded[2:5], padded[5:]], [padded[at : at + 1] for at in range(len(padded))]]


def test_the_length_of_a_connect_of_mqtt_311_may_have_a_byte_too_many() -> None:
    for pieces in pieces_of_a_padded_connect(4):
        reader = FrameReader(LARGE)
        assert [frame for piece in pieces for frame in reader.feed(piece)] == [
            (0x10, wire.connect("me", version=4)[2:])
        ]


def test_the_length_of_a_connect_of_mqtt_5_has_no_byte_too_many() -> None:
    for *pieces, last in pieces_of_a_padded_connect(5):
        reader = FrameReader(LARGE)
        for piece in pieces:
            assert reader.feed(piece) == []
        with pytest.raises(FramingError, match="more bytes than it needs") as bad:
            reader.feed(last)
        assert bad.value.reason is ReasonCode.MALFORMED_PACKET


def test_what_comes_with_a_connect_is_judged_by_its_version() -> None:
    reader = FrameReader(LARGE)
    assert len(reader.feed(wire.connect("me", version=4) + b"\xc0\x80\0")) == 2
    with pytest.raises(FramingError, match="more bytes than it needs") as bad:
        FrameReader(LARGE).feed(CONNECT + b"\xc0\x80\0")
    assert bad.value.frames == [CONNECT_FRAME]


@pytest.mark.parametrize("greeting", [b"GET /mqtt HTTP/1.1\r\n", b"\x16\x7f\x01\x02", b"\x30\x7f\0\1a"])
def test_what_begins_as_no_connect_is_not_waited_for(greeting: bytes) -> None:
    with pytest.raises(FramingError, match=r"the first packet of a client is a CONNECT \[MQTT-3.1.0-1\]") as bad:
        FrameReader(LARGE).feed(greeting)
    assert bad.value.reason is ReasonCode.PROTOCOL_ERROR
