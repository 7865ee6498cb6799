"""Messages and their parts are frozen records with a fixed order of fields."""

from __future__ import annotations

import pickle
from datetime import UTC
from typing import Any

import msgspec
import pytest
from topicstore.contract.model import MAX_PAYLOAD, Message, MessageId, Properties
from topicstore.contract.positions import MAX_TIME, to_microseconds

FULL = Properties(1, 60, "text/plain", "reply/to", b"\x00\x01", (("k", "1"), ("j", ""), ("k", "1")))


def test_a_message_needs_a_topic_and_a_payload() -> None:
    """Only topic and payload are required; the other fields have the documented defaults."""
    expected = Message(topic="a", payload=b"b", client_id="", qos=0, retain=False, timestamp=None, properties=None)
    assert expected == Message("a", b"b")
    for arguments in ((), ("a",)):
        with pytest.raises(TypeError):
            Message(*arguments)


def test_the_arguments_of_a_message_have_a_fixed_order() -> None:
    """Positional and keyword arguments have the same fixed order, on which batches and Arrow rely."""
    values = ("a", b"b", "c", 2, True, 5, FULL)
    names = ("topic", "payload", "client_id", "qos", "retain", "timestamp", "properties")
    assert names == Message.__struct_fields__
    assert Message(**dict(zip(names, values, strict=True))) == Message(*values)


@pytest.mark.parametrize("timestamp", [0, 1_700_000_000_123_456, MAX_TIME])
def test_the_time_of_a_message_is_its_timestamp(timestamp: int) -> None:
    """`time` is in UTC, and exact to the microsecond over the whole range."""
    time = Message("a", b"", timestamp=timestamp).time
    assert time is not None
    assert (UTC, timestamp) == (time.tzinfo, to_microseconds(time))


def test_a_message_without_a_timestamp_has_no_time() -> None:
    """A message without a timestamp has no `time` before it is stored."""
    assert Message("a", b"").time is None


def test_properties_are_stored_in_this_order() -> None:
    """The order of fields is part of stored formats, so fields are only appended."""
    stored = [1, 60, "text/plain", "reply/to", b"\x00\x01", [["k", "1"], ["j", ""], ["k", "1"]]]
    assert stored == msgspec.msgpack.decode(msgspec.msgpack.encode(FULL))
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(stored), type=Properties) == FULL


@pytest.mark.parametrize("record", [Message("a", b"", properties=FULL), FULL, MessageId(1, 2)], ids=repr)
def test_records_are_frozen_hashable_and_copied_by_value(record: Any) -> None:
    """Records are immutable, and equal records have equal hashes, even after pickling."""
    for name in record.__struct_fields__:
        with pytest.raises(AttributeError):
            setattr(record, name, None)
    again = pickle.loads(pickle.dumps(record))
    assert record == again
    assert {record} == {again}


def test_ids_are_ordered_by_shard_then_position() -> None:
    """Ids are ordered by shard and then by position."""
    ordered = [MessageId(0, 5), MessageId(0, 2**64 - 1), MessageId(1, 0), MessageId(1, 1)]
    assert ordered == sorted([ordered[2], ordered[1], ordered[3], ordered[0]])


def test_the_largest_payload_is_what_a_packet_carries() -> None:
    """The largest payload in bytes is the largest number that MQTT's variable byte integer encodes, in 28 bits."""
    assert MAX_PAYLOAD == 2**28 - 1
