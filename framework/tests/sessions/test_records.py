"""The stored format of session records: encoding, damage, versions and keys."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest
import topicstore as ts
from hypothesis import given
from hypothesis import strategies as st
from topicstore.contract.checksums import add_checksum
from topicstore.sessions import SubscribeOptions
from topicstore.sessions.records import (
    VERSION,
    InFlightRecord,
    Keys,
    OptionsPeriod,
    SessionRecord,
    SubscriptionRecord,
    decode,
    owner_in,
    owner_of,
    pack_ids,
    pack_positions,
    timer_of,
    unpack_ids,
    unpack_positions,
)

POSITIONS = st.lists(st.integers(0, (1 << 64) - 1), max_size=50, unique=True).map(sorted)


@given(POSITIONS)
def test_positions_come_back(positions: list[int]) -> None:
    """Encoded positions decode to the same positions, whatever the gaps between them."""
    packed = pack_positions(np.array(positions, dtype=np.uint64))
    assert positions == unpack_positions(*packed).tolist()


@given(st.lists(st.integers(1, 65_535), min_size=1))
def test_packet_ids_come_back(ids: list[int]) -> None:
    """Encoded packet ids decode to the same ids, in order."""
    assert ids == list(unpack_ids(pack_ids(ids), len(ids)))


def test_consecutive_packet_ids_take_one_number() -> None:
    """Consecutive packet ids are stored as one number, because most deliveries have consecutive ids."""
    assert 7 == pack_ids(range(7, 1_000))
    assert range(7, 1_000) == unpack_ids(7, 993)


def test_a_record_that_is_damaged_is_an_error_that_names_it() -> None:
    """A record with a bad checksum or bad contents raises an error that names its key."""
    key = Keys("client").session
    with pytest.raises(ts.CorruptionError, match="srclient"):
        decode(key, b"damaged", SessionRecord)
    with pytest.raises(ts.CorruptionError, match="srclient"):
        decode(key, add_checksum(key, msgspec.msgpack.encode((VERSION, "guard"))), SessionRecord)


def test_a_record_of_a_newer_version_is_refused() -> None:
    """A record of a newer format version is refused rather than misread."""
    key = Keys("client").session
    with pytest.raises(ts.NewerFormatError, match="version 3"):
        decode(key, add_checksum(key, msgspec.msgpack.encode((VERSION + 2, {"anything": 1}))), SessionRecord)


STORED = [
    (
        Keys("c").batch(3),
        "cb9024239a01a3612f2b009502c3c2010907c4020102cd04d2c40200010190",
        InFlightRecord(1, "a/+", 0, SubscribeOptions(2, True, False, 1, 9), 7, b"\1\2", 1_234, b"\0\1", 1),
    ),
    (
        Keys("c").subscription(0),
        "3e5645fe9301a3612f2b92929501c2c200009105929502c2c20000c0",
        SubscriptionRecord(1, "a/+", (OptionsPeriod(SubscribeOptions(1), (5,)), OptionsPeriod(SubscribeOptions(2)))),
    ),
    (Keys("c").session, "f3c2b43099010506c3ff070809c2", SessionRecord(1, 5, 6, True, -1, 7, 8, 9)),
]


@pytest.mark.parametrize(("key", "stored", "record"), STORED)
def test_what_is_stored_stays_readable(key: bytes, stored: str, record: msgspec.Struct) -> None:
    """Records with these bytes exist in databases, so every later version must read them."""
    assert record == decode(key, bytes.fromhex(stored), type(record))


def test_keys_of_the_longest_client_id_are_short() -> None:
    """Keys are short even for the longest client id, because an engine reads index blocks with whole keys."""
    keys = Keys("c" * 65_535)
    longest = [keys.batch(1), keys.released(1), keys.timer(1, b"e"), keys.incoming(1), keys.session, keys.name or b""]
    assert max(map(len, longest)) <= 80


@given(st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), min_size=1))
def test_keys_tell_whose_they_are(client_id: str) -> None:
    """Each key identifies its session, and no key begins with the prefix of another session."""
    keys = Keys(client_id)
    owner = owner_of(client_id).decode()
    assert owner == owner_in(keys.batch(5), b"\1sf")
    assert (12, b"e", owner) == timer_of(keys.timer(12, b"e"))
    assert not Keys(client_id + "x").batch(1).startswith(keys.prefixes()["batches"])
