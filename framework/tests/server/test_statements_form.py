"""Statements of the standard about the form of packets: what is malformed ends its connection with the reason."""

from __future__ import annotations

import attrs
import pytest
from topicstore_conformance.mqtt import wire
from topicstore_conformance.mqtt.statements import statement

MALFORMED, PROTOCOL_ERROR, BAD_TOPIC = 0x81, 0x82, 0x90
BOTH = (4, 5)


@attrs.frozen
class Bad:
    """A packet that must not be."""

    what: str
    statement: str
    reasons: tuple[int, ...]
    """The reason codes by which MQTT 5 may answer."""
    packets: tuple[bytes, ...]
    """What is sent by a client of MQTT 5."""
    packets_4: tuple[bytes, ...] | None = None
    """What is sent by one of 3.1.1, if it has the same fault there."""


def raw(kind: str, flags: int, *parts: bytes) -> bytes:
    return wire.frame(kind, flags, *parts)


NOTHING = wire.properties()
ID, TOPIC = b"\x00\x07", wire.binary("a")
UTF8 = {
    "ill-formed": b"\x00\x02\xc3\x28",
    "a surrogate": b"\x00\x03\xed\xa0\x80",
    "overlong": b"\x00\x02\xc0\xaf",
    "beyond Unicode": b"\x00\x04\xf4\x90\x80\x80",
}
BAD = [
    Bad("a reserved type", "2.1.3-1", (MALFORMED, PROTOCOL_ERROR), (b"\x00\x00",), (b"\x00\x00",)),
    Bad("flags of PUBACK", "2.1.3-1", (MALFORMED,), (raw("PUBACK", 1, ID),), (raw("PUBACK", 1, ID),)),
    Bad("flags of PINGREQ", "2.1.3-1", (MALFORMED,), (b"\xc1\x00",), (b"\xc1\x00",)),
    Bad("flags of PUBREL", "3.6.1-1", (MALFORMED,), (raw("PUBREL", 0, ID),), (raw("PUBREL", 0, ID),)),
    Bad(
        "flags of SUBSCRIBE",
        "3.8.1-1",
        (MALFORMED,),
        (raw("SUBSCRIBE", 0, ID, NOTHING, TOPIC, b"\0"),),
        (raw("SUBSCRIBE", 0, ID, TOPIC, b"\0"),),
    ),
    Bad(
        "flags of UNSUBSCRIBE",
        "3.10.1-1",
        (MALFORMED,),
        (raw("UNSUBSCRIBE", 0, ID, NOTHING, TOPIC),),
        (raw("UNSUBSCRIBE", 0, ID, TOPIC),),
    ),
    Bad("flags of DISCONNECT", "3.14.1-1", (MALFORMED,), (b"\xe1\x00",), (b"\xe1\x00",)),
    Bad("a packet of the server", "2.1.3-1", (PROTOCOL_ERROR, MALFORMED), (b"\xd0\x00",), (b"\xd0\x00",)),
    Bad(
        "QoS 3",
        "3.3.1-4",
        (MALFORMED,),
        (raw("PUBLISH", 6, TOPIC, ID, NOTHING),),
        (raw("PUBLISH", 6, TOPIC, ID),),
    ),
    Bad(
        "packet id 0",
        "2.2.1-3",
        (MALFORMED, PROTOCOL_ERROR),
        (wire.publish("a", qos=1, packet_id=0),),
        (wire.publish("a", qos=1, packet_id=0, version=4),),
    ),
    Bad(
        "packet id 0 of SUBSCRIBE",
        "2.2.1-3",
        (MALFORMED, PROTOCOL_ERROR),
        (wire.subscribe(0, [("a", 0)]),),
        (wire.subscribe(0, [("a", 0)], version=4),),
    ),
    *(
        Bad(
            f"a topic with {wildcard}",
            "3.3.2-2",
            (BAD_TOPIC, MALFORMED, PROTOCOL_ERROR),
            (wire.publish(f"a/{wildcard}"),),
            (wire.publish(f"a/{wildcard}", version=4),),
        )
        for wildcard in "+#"
    ),
    *(
        Bad(
            f"a topic that is {what}",
            "1.5.4-1",
            (MALFORMED,),
            (raw("PUBLISH", 0, text, NOTHING),),
            (raw("PUBLISH", 0, text),),
        )
        for what, text in UTF8.items()
    ),
    Bad(
        "a topic with a null character",
        "1.5.4-2",
        (MALFORMED, BAD_TOPIC),
        (wire.publish("a\0b"),),
        (wire.publish("a\0b", version=4),),
    ),
    Bad("no topic", "3.3.2-1", (PROTOCOL_ERROR, MALFORMED, BAD_TOPIC), (wire.publish(""),)),
    Bad(
        "no topic",
        "4.7.3-1",
        (PROTOCOL_ERROR, MALFORMED, BAD_TOPIC),
        (wire.publish(""),),
        (wire.publish("", version=4),),
    ),
    Bad(
        "a user property that isn't UTF-8",
        "1.5.7-1",
        (MALFORMED,),
        (raw("PUBLISH", 0, TOPIC, b"\x08\x26\x00\x01a\x00\x02\xc3\x28"),),
    ),
    Bad(
        "a content type that isn't UTF-8",
        "3.3.2-19",
        (MALFORMED,),
        (raw("PUBLISH", 0, TOPIC, b"\x05\x03\x00\x02\xc3\x28"),),
    ),
    Bad(
        "a response topic that isn't UTF-8",
        "3.3.2-13",
        (MALFORMED,),
        (raw("PUBLISH", 0, TOPIC, b"\x05\x08\x00\x02\xc3\x28"),),
    ),
    Bad(
        "a response topic with a wildcard",
        "3.3.2-14",
        (PROTOCOL_ERROR, MALFORMED, BAD_TOPIC),
        (wire.publish("a", response_topic="a/#"),),
    ),
    Bad(
        "a length of five bytes",
        "1.5.5-1",
        (MALFORMED,),
        (b"\x30\xff\xff\xff\xff\x01",),
        (b"\x30\xff\xff\xff\xff\x01",),
    ),
    Bad("a length with more bytes than it needs", "1.5.5-1", (MALFORMED,), (raw("PUBLISH", 0, TOPIC, b"\x80\x00"),)),
    Bad(
        "the same property twice",
        "2.2.2-1",
        (PROTOCOL_ERROR,),
        (wire.frame("PUBLISH", 0, TOPIC, b"\x04\x01\x00\x01\x00"),),
    ),
    Bad(
        "a property of another packet",
        "2.2.2-1",
        (PROTOCOL_ERROR, MALFORMED),
        (wire.publish("a", session_expiry_interval=1),),
    ),
    Bad("properties longer than the packet", "2.2.2-1", (MALFORMED,), (raw("PUBLISH", 0, TOPIC, b"\x7f"),)),
    Bad(
        "a subscription identifier of a client",
        "3.3.4-6",
        (PROTOCOL_ERROR, MALFORMED),
        (wire.publish("a", subscription_identifier=[1]),),
    ),
    Bad(
        "a subscription identifier of 0",
        "3.8.3-2",
        (PROTOCOL_ERROR,),
        (wire.subscribe(7, [("a", 0)], subscription_identifier=[0]),),
    ),
    Bad(
        "no filter",
        "3.8.3-2",
        (PROTOCOL_ERROR, MALFORMED),
        (wire.subscribe(7, []),),
        (wire.subscribe(7, [], version=4),),
    ),
    Bad(
        "no filter to remove",
        "3.10.3-2",
        (PROTOCOL_ERROR, MALFORMED),
        (wire.unsubscribe(7, []),),
        (wire.unsubscribe(7, [], version=4),),
    ),
    Bad("no local and shared", "3.8.3-4", (PROTOCOL_ERROR,), (wire.subscribe(7, [("$share/g/a", 4)]),)),
    *(
        Bad(
            f"subscription options {options:#x}",
            "3.8.3-5",
            (MALFORMED, PROTOCOL_ERROR),
            (wire.subscribe(7, [("a", options)]),),
            (wire.subscribe(7, [("a", options)], version=4),),
        )
        for options in (0x40, 0x80, 0x03)
    ),
    Bad("retain handling 3", "3.8.3-5", (PROTOCOL_ERROR, MALFORMED), (wire.subscribe(7, [("a", 0x30)]),)),
    Bad("options of MQTT 5", "3.8.3-5", (), (), (wire.subscribe(7, [("a", 0x04)], version=4),)),
    Bad(
        "a filter that isn't UTF-8",
        "3.8.3-1",
        (MALFORMED,),
        (raw("SUBSCRIBE", 2, ID, NOTHING, UTF8["ill-formed"], b"\0"),),
        (raw("SUBSCRIBE", 2, ID, UTF8["ill-formed"], b"\0"),),
    ),
    Bad(
        "a filter to remove that isn't UTF-8",
        "3.10.3-1",
        (MALFORMED,),
        (raw("UNSUBSCRIBE", 2, ID, NOTHING, UTF8["ill-formed"]),),
        (raw("UNSUBSCRIBE", 2, ID, UTF8["ill-formed"]),),
    ),
    Bad(
        "a filter without options",
        "3.8.3-2",
        (MALFORMED, PROTOCOL_ERROR),
        (raw("SUBSCRIBE", 2, ID, NOTHING, TOPIC),),
        (raw("SUBSCRIBE", 2, ID, TOPIC),),
    ),
    Bad(
        "a packet that ends early", "4.13.1-1", (MALFORMED,), (raw("PUBACK", 0, b"\x00"),), (raw("PUBACK", 0, b"\x00"),)
    ),
    Bad("a packet that is too long", "4.13.1-1", (MALFORMED, PROTOCOL_ERROR), (b"\xc0\x01\x00",), (b"\xc0\x01\x00",)),
    Bad("a reason code of another packet", "3.14.2-1", (MALFORMED, PROTOCOL_ERROR), (wire.disconnect(0x8E - 0x70),)),
    Bad("a reason code of PUBACK", "3.4.2-1", (MALFORMED, PROTOCOL_ERROR), (raw("PUBACK", 0, ID, b"\x01", NOTHING),)),
    Bad(
        "a payload format of 2",
        "3.3.2-4",
        (PROTOCOL_ERROR, MALFORMED),
        (wire.publish("a", payload_format_indicator=2),),
    ),
]
CASES = [
    pytest.param(version, packets, bad, id=f"{bad.what}-{version}")
    for bad in BAD
    for version, packets in ((5, bad.packets), (4, bad.packets_4))
    if packets
]


@pytest.mark.parametrize(("version", "packets", "bad"), CASES)
@statement(*dict.fromkeys(bad.statement for bad in BAD), "3.14.2-2")
def test_what_must_not_be_ends_its_connection(connect, version: int, packets: tuple[bytes, ...], bad: Bad) -> None:  # type: ignore[no-untyped-def]
    """With a reason code where there are any, and with nothing processed that comes behind it."""
    client = connect(version=version)
    client.send(*packets, wire.PINGREQ)
    last = client.ended()
    if version == 4:
        assert last is None, last
    else:
        assert last is not None, "the connection was closed without a reason"
        assert (last.kind, last.reason in bad.reasons) == ("DISCONNECT", True), last
        assert "session_expiry_interval" not in last.properties  # [MQTT-3.14.2-2]
