"""The numbered statements of both standards about the bytes of one packet, each with a test that names it.

The number ``"1.5.4-1"`` means [MQTT-1.5.4-1] of MQTT 5; ``"3.1.1: 1.5.3-1"`` means [MQTT-1.5.3-1] of MQTT 3.1.1. The
table in the server's README lists the statements; a test below compares that table with this module.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest
import topicstore
import topicstore as ts
from topicstore.contract.model import Properties
from topicstore.server.codec import encode as encoding
from topicstore.server.codec.reason import ReasonCode
from topicstore.sessions import Publish
from topicstore_conformance.mqtt import wire
from topicstore_conformance.mqtt.statements import statement, statements_of

from .conftest import read, refused, sent

MALFORMED, PROTOCOL_ERROR = ReasonCode.MALFORMED_PACKET, ReasonCode.PROTOCOL_ERROR
both = pytest.mark.parametrize("version", [4, 5], ids=["MQTT 3.1.1", "MQTT 5"])
ID, NOTHING = b"\0\7", b"\0"
"""A packet id, and an empty block of properties."""


def properties(version: int, **values: wire.Value) -> bytes:
    return wire.properties(**values) if version == 5 else b""


def connect(version: int, flags: int, *payload: bytes, keep_alive: int = 60, name: bytes = b"\0\4MQTT") -> bytes:
    """Return a CONNECT with these flags and payload fields, whether or not they are consistent."""
    head = name + bytes((version, flags)) + keep_alive.to_bytes(2, "big")
    return wire.frame("CONNECT", 0, head, properties(version), *payload)


def texts(version: int, text: bytes) -> dict[str, bytes]:
    """Return packets that have this length-prefixed text in each place where a client sends text."""
    some, end = wire.binary("some"), properties(version)
    found = {
        "client id": connect(version, 2, text),
        "will topic": connect(version, 6, some, end, text, some),
        "user name": connect(version, 0x82, some, text),
        "topic": wire.frame("PUBLISH", 0, text, end),
        "filter": wire.frame("SUBSCRIBE", 2, ID, end, some, b"\0", text, b"\0"),
        "filter of UNSUBSCRIBE": wire.frame("UNSUBSCRIBE", 2, ID, end, some, text),
    }
    if version == 5:
        fields = {
            "content type": b"\x03" + text,
            "response topic": b"\x08" + text,
            "name of a user property": b"\x26" + text + some,
            "value of a user property": b"\x26" + some + text,
        }
        for what, field in fields.items():
            block = wire.variable(len(field)) + field
            found[what] = wire.frame("PUBLISH", 0, some, block)
            found[f"{what} of a will"] = connect(version, 6, some, block, some, some)
        for what, number, kind, body in (
            ("reason string of PUBACK", 0x1F, "PUBACK", ID + b"\0"),
            ("reason string of DISCONNECT", 0x1F, "DISCONNECT", b"\0"),
            ("method of AUTH", 0x15, "AUTH", b"\x18"),
        ):
            block = wire.variable(1 + len(text)) + bytes((number,)) + text
            found[what] = wire.frame(kind, 0, body, block)
        block = wire.variable(1 + len(text)) + b"\x15" + text
        found["method of CONNECT"] = wire.frame("CONNECT", 0, b"\0\4MQTT\5\2\0\0", block, some)
    return found


ILL_FORMED = {
    "a continuation without a beginning": b"\x80",
    "a beginning without a continuation": b"\xc3(",
    "an overlong form": b"\xc0\xaf",
    "a surrogate": b"\xed\xa0\x80",
    "a pair of surrogates": b"\xed\xa0\xbd\xed\xb8\x80",
    "beyond Unicode": b"\xf4\x90\x80\x80",
    "a byte that UTF-8 doesn't have": b"\xff",
    "a character that is cut off": b"a\xe6\xb0",
}


@both
@pytest.mark.parametrize("bad", ILL_FORMED.values(), ids=list(ILL_FORMED))
@statement(
    "1.5.4-1", "1.5.7-1", "3.1.3-4", "3.1.3-11", "3.1.3-12", "3.3.2-1", "3.3.2-13", "3.3.2-19", "3.8.3-1", "3.10.3-1"
)
@statement("3.1.1: 1.5.3-1", "3.1.1: 3.1.3-4", "3.1.1: 3.1.3-10", "3.1.1: 3.1.3-11", "3.1.1: 3.3.2-1", "3.1.1: 3.8.3-1")
@statement("3.1.1: 3.10.3-1")
def test_text_is_utf8(version: int, bad: bytes) -> None:
    for packet in texts(version, wire.binary(bad)).values():
        refused(version, packet, MALFORMED)


@both
@pytest.mark.parametrize("bad", ["\0", "a\0", "\0a", "a/\0/b"])
@statement("1.5.4-2", "4.7.3-2", "3.1.1: 1.5.3-2", "3.1.1: 4.7.3-2")
def test_text_has_no_nul(version: int, bad: str) -> None:
    for packet in texts(version, wire.binary(bad)).values():
        refused(version, packet, MALFORMED)


@statement("1.5.5-1")
def test_a_variable_byte_integer_has_no_byte_too_many() -> None:
    for padded in (b"\x80\0", b"\x80\x80\0", b"\x80\x80\x80\0"):
        refused(5, b"\xc0" + padded, MALFORMED)
        refused(5, wire.frame("PUBLISH", 0, wire.binary("a"), padded), MALFORMED)
        refused(5, wire.frame("CONNECT", 0, b"\0\4MQTT\5\2\0\0", padded, wire.binary("me")), MALFORMED)
        refused(5, wire.frame("PUBACK", 0, ID, b"\0", padded), MALFORMED)
        refused(5, wire.frame("DISCONNECT", 0, b"\0", padded), MALFORMED)
    identifier = b"\x0b\x85\x80\0"
    refused(
        5,
        wire.frame("SUBSCRIBE", 2, ID, wire.variable(len(identifier)) + identifier, wire.binary("a"), b"\0"),
        MALFORMED,
    )
    for size in (0, 127, 128, 16_383, 16_384, 2_097_151, 2_097_152):
        packet = encoding.publish(4, Publish(0, ts.Message("a", bytes(max(size - 3, 0))), 0), "a", 0)
        assert packet.startswith(b"\x30" + wire.variable(max(size, 3)))
    for size in (0, 100, 127, 128, 300, 16_384):
        values = Properties(user_properties=(("a" * min(size, 60_000), "b"),)) if size else None
        packet = encoding.publish(5, Publish(0, ts.Message("a", b"x", properties=values), 0), "a", 0)
        length = 6 + size if size else 0
        assert packet.endswith(wire.variable(length) + (packet[-length - 1 : -1] if length else b"") + b"x")


FLAGS = {"PUBREL": 2, "SUBSCRIBE": 2, "UNSUBSCRIBE": 2}
ACKS = ("PUBACK", "PUBREC", "PUBREL", "PUBCOMP")
CLIENTS = ("CONNECT", *ACKS, "SUBSCRIBE", "UNSUBSCRIBE", "PINGREQ", "DISCONNECT", "AUTH")


def of_kind(version: int, kind: str) -> bytes:
    """Return a valid packet of this type."""
    made = {
        "CONNECT": wire.connect("me", version=version),
        "SUBSCRIBE": wire.subscribe(7, [("a", 0)], version=version),
        "UNSUBSCRIBE": wire.unsubscribe(7, ["a"], version=version),
        "PINGREQ": wire.PINGREQ,
        "DISCONNECT": wire.disconnect(version=version),
        "AUTH": wire.auth(0x18, authentication_method="m"),
    }
    return made.get(kind) or wire.acknowledgement(kind, 7)


@both
@pytest.mark.parametrize("kind", CLIENTS)
@statement("2.1.3-1", "3.6.1-1", "3.8.1-1", "3.10.1-1", "3.14.1-1", "3.15.1-1")
@statement("3.1.1: 2.2.2-1", "3.1.1: 2.2.2-2", "3.1.1: 3.6.1-1", "3.1.1: 3.8.1-1", "3.1.1: 3.10.1-1", "3.1.1: 3.14.1-1")
def test_reserved_flags_have_their_values(version: int, kind: str) -> None:
    packet = of_kind(version, kind)
    for flags in range(16):
        if flags != FLAGS.get(kind, 0):
            refused(version, bytes((packet[0] & 0xF0 | flags,)) + packet[1:], MALFORMED)
    if version == 5 or kind != "AUTH":
        assert read(version, packet)


@both
@statement("2.1.3-1", "3.1.1: 2.2.2-1")
def test_types_that_a_client_does_not_send(version: int) -> None:
    """Packet types that only servers send are a protocol error; type 0, and 15 in MQTT 3.1.1, are malformed."""
    refused(version, b"\0\0", MALFORMED)
    for kind in ("CONNACK", "SUBACK", "UNSUBACK", "PINGRESP"):
        refused(version, wire.frame(kind, 0, ID, b"\0"), PROTOCOL_ERROR)
    refused(4, of_kind(4, "AUTH"), MALFORMED)


@both
@statement("2.2.1-2", "3.1.1: 2.3.1-5")
def test_a_publish_of_qos_0_has_no_packet_id(version: int) -> None:
    message, packet_id, _ = read(version, wire.publish("a", b"\0\7", version=version))
    assert (message.payload, packet_id) == (b"\0\7", 0)
    packet = encoding.publish(version, Publish(0, ts.Message("a", b"\0\7"), 0), "a", 0)
    assert packet == wire.publish("a", b"\0\7", version=version)


@both
@statement("2.2.1-3", "3.1.1: 2.3.1-1")
def test_a_packet_id_is_not_0(version: int) -> None:
    for qos in (1, 2):
        refused(version, wire.publish("a", b"x", qos=qos, packet_id=0, version=version), PROTOCOL_ERROR)
    refused(version, wire.subscribe(0, [("a", 0)], version=version), PROTOCOL_ERROR)
    refused(version, wire.unsubscribe(0, ["a"], version=version), PROTOCOL_ERROR)
    for kind in ACKS:
        refused(version, wire.acknowledgement(kind, 0), PROTOCOL_ERROR)


@statement("2.2.2-1")
def test_no_properties_are_a_length_of_0() -> None:
    assert encoding.publish(5, Publish(7, ts.Message("a", b"x", qos=1), 1), "a", 0) == b"\x32\7\0\1a\0\7\0x"
    assert encoding.connack(5, 0) == b"\x20\3\0\0\0"
    assert encoding.suback(5, 7, [1]) == b"\x90\4\0\7\0\1"
    assert encoding.unsuback(5, 7, [0]) == b"\xb0\4\0\7\0\0"
    refused(5, wire.frame("PUBLISH", 2, wire.binary("a"), ID), MALFORMED)
    refused(5, wire.frame("SUBSCRIBE", 2, ID), MALFORMED)
    refused(5, wire.frame("UNSUBSCRIBE", 2, ID), MALFORMED)


@both
@pytest.mark.parametrize(
    "name", [b"\0\4mqtt", b"\0\4MQTt", b"\0\5MQTT ", b"\0\3MQT", b"\0\0", b"\0\6MQIsdp", b"\0\4HTTP"]
)
@statement("3.1.2-1", "3.1.1: 3.1.2-1")
def test_the_protocol_has_its_name(version: int, name: bytes) -> None:
    """A CONNECT with another protocol name is refused.

    The server doesn't reveal that it speaks MQTT, except to MQTT 3.1 clients.
    """
    found = refused(version, connect(version, 2, wire.binary("me"), name=name), ReasonCode.UNSUPPORTED_PROTOCOL_VERSION)
    assert found.version == 0


@pytest.mark.parametrize(
    ("level", "answer"), [(0, 4), (1, 4), (2, 4), (3, 4), (6, 5), (7, 5), (0x83, 4), (0x84, 4), (0x85, 5), (255, 5)]
)
@statement("3.1.2-2", "3.1.1: 3.1.2-2")
def test_the_protocol_has_a_version_that_is_served(level: int, answer: int) -> None:
    """A CONNECT with an unsupported protocol version is answered in the format of that version.

    Bridges of mosquitto set the version's high bit, and connect without it after such an answer.
    """
    found = refused(0, connect(level, 2, wire.binary("me")), ReasonCode.UNSUPPORTED_PROTOCOL_VERSION)
    assert found.version == answer
    expected = b"\x20\2\0\1" if answer == 4 else b"\x20\3\0\x84\0"
    assert encoding.connack(found.version, found.reason) == expected


@statement("3.1.2-2", "3.1.1: 3.1.2-2")
def test_mqtt_31_is_refused_as_not_served() -> None:
    packet = wire.frame("CONNECT", 0, b"\0\6MQIsdp\3\2\0\x3c", wire.binary("me"))
    found = refused(0, packet, ReasonCode.UNSUPPORTED_PROTOCOL_VERSION)
    assert encoding.connack(found.version, found.reason) == b"\x20\2\0\1"


@both
@statement("3.1.2-3", "3.1.1: 3.1.2-3")
def test_the_reserved_flag_of_a_connect_is_0(version: int) -> None:
    refused(version, connect(version, 3, wire.binary("me")), MALFORMED)


@both
@statement("3.1.2-9", "3.1.1: 3.1.2-9")
def test_a_will_has_a_topic_and_a_payload(version: int) -> None:
    some, end = wire.binary("some"), properties(version)
    found = read(version, connect(version, 6, some, end, some, b"\0\0"))
    assert (found.will.topic, found.will.payload) == ("some", b"")
    for payload in ((some,), (some, end), (some, end, some), (some, end, some, b"\0"), (some, end, some, b"\0\1")):
        refused(version, connect(version, 6, *payload), MALFORMED)


@both
@statement("3.1.2-11", "3.1.2-13", "3.1.1: 3.1.2-11", "3.1.1: 3.1.2-13", "3.1.1: 3.1.2-15")
def test_without_a_will_there_is_nothing_of_it(version: int) -> None:
    some = wire.binary("some")
    for flags in (0x08, 0x10, 0x18, 0x20, 0x28, 0x38):
        refused(version, connect(version, 2 | flags, some), MALFORMED)
    refused(version, connect(version, 2, some, properties(version), some, some), MALFORMED)


@both
@statement("3.1.2-12", "3.1.1: 3.1.2-14")
def test_a_will_has_qos_0_1_or_2(version: int) -> None:
    payload = wire.binary("some"), properties(version), wire.binary("a"), wire.binary("")
    for qos in (0, 1, 2):
        assert read(version, connect(version, 6 | qos << 3, *payload)).will.qos == qos
    refused(version, connect(version, 6 | 3 << 3, *payload), MALFORMED)


@both
@statement("3.1.2-16", "3.1.2-17", "3.1.2-18", "3.1.2-19")
@statement("3.1.1: 3.1.2-18", "3.1.1: 3.1.2-19", "3.1.1: 3.1.2-20", "3.1.1: 3.1.2-21")
def test_user_name_and_password_are_there_as_the_flags_say(version: int) -> None:
    some = wire.binary("some")
    found = read(version, connect(version, 0xC2, some, wire.binary("user"), wire.binary("secret")))
    assert (found.user_name, found.password) == ("user", b"secret")
    found = read(version, connect(version, 0x82, some, some))
    assert (found.user_name, found.password) == ("some", None)
    found = read(version, connect(version, 2, some))
    assert (found.user_name, found.password) == (None, None)
    for flags, payload in ((2, [some] * 2), (0x82, [some]), (0x82, [some] * 3), (0xC2, [some] * 2), (0xC2, [some] * 4)):
        refused(version, connect(version, flags, *payload), MALFORMED)


@statement("3.1.1: 3.1.2-22")
def test_a_password_without_a_user_name_is_for_mqtt_5() -> None:
    some = wire.binary("some")
    refused(4, connect(4, 0x42, some, some), MALFORMED)
    found = read(5, connect(5, 0x42, some, some))
    assert (found.user_name, found.password) == (None, b"some")


@both
@statement("3.1.3-1", "3.1.3-3", "3.1.1: 3.1.3-1", "3.1.1: 3.1.3-3")
def test_the_fields_of_a_connect_have_their_order(version: int) -> None:
    client_id, topic, payload, user, password = (wire.binary(text) for text in ("c", "t", "p", "u", "w"))
    found = read(version, connect(version, 0xEE, client_id, properties(version), topic, payload, user, password))
    assert (found.client_id, found.user_name, found.password) == ("c", "u", b"w")
    assert (found.will.topic, found.will.payload, found.will.qos, found.will.retain) == ("t", b"p", 1, True)
    refused(version, connect(version, 2), MALFORMED)


@both
@statement("3.1.3-5", "3.1.1: 3.1.3-5")
def test_client_ids_that_every_server_allows(version: int) -> None:
    letters = "0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ"
    for client_id in [*letters, *(letters[at : at + 23] for at in range(40))]:
        assert read(version, wire.connect(client_id, version=version)).client_id == client_id


@both
@statement("3.1.3-6", "3.1.1: 3.1.3-6", "3.1.1: 3.1.3-8")
def test_a_client_id_may_be_empty(version: int) -> None:
    """A client id may be empty; in MQTT 3.1.1 only with a clean session, otherwise the return code is 2."""
    assert read(version, wire.connect("", version=version)).client_id == ""
    if version == 5:
        assert read(5, wire.connect("", clean=False)).client_id == ""
    else:
        found = refused(4, wire.connect("", version=4, clean=False), ReasonCode.CLIENT_IDENTIFIER_NOT_VALID)
        assert encoding.connack(found.version, found.reason) == b"\x20\2\0\2"


@statement("3.1.4-1", "3.1.1: 3.1.4-1", "3.1.1: 3.2.2-6")
def test_a_connect_that_breaks_the_rules_is_answered_as_its_version_says() -> None:
    """A malformed CONNECT is answered with a CONNACK in MQTT 5, and not at all in MQTT 3.1.1."""
    for version, answer in ((5, b"\x20\3\0\x81\0"), (4, b"")):
        bad = [connect(version, 3, wire.binary("me")), connect(version, 2), connect(version, 2, b"\0\1\xff")]
        bad += [connect(version, 2, wire.binary("me"), b"x")]
        for packet in bad:
            found = refused(0, packet, MALFORMED)
            assert found.version == (5 if version == 5 else 0)
            assert encoding.connack(version, found.reason) == answer
    assert refused(0, b"\x10\0", MALFORMED).version == 0
    assert refused(0, b"\x10\6\0\4MQTT", MALFORMED).version == 0


@both
@statement("3.2.2-1", "3.2.2-6", "3.1.1: 3.2.2-4")
def test_a_refusal_has_no_session(version: int) -> None:
    for reason in range(0x80, 0xA3):
        if reason not in (MALFORMED, PROTOCOL_ERROR):
            assert not sent(version, encoding.connack(version, reason, True)).present
    for present in (False, True):
        packet = encoding.connack(version, 0, present)
        assert packet[2] == present
        assert sent(version, packet).present == present


REASONS: dict[str, tuple[Callable[[int], bytes], set[int]]] = {
    "3.2.2-8": (
        lambda code: encoding.connack(5, code),
        {0, *range(0x80, 0x8B), 0x8C, 0x90, 0x95, 0x97, 0x99, 0x9A, 0x9B, 0x9C, 0x9D, 0x9F},
    ),
    "3.4.2-1": (lambda code: encoding.puback(5, 4, 7, code), {0, 0x10, 0x80, 0x83, 0x87, 0x90, 0x91, 0x97, 0x99}),
    "3.5.2-1": (lambda code: encoding.puback(5, 5, 7, code), {0, 0x10, 0x80, 0x83, 0x87, 0x90, 0x91, 0x97, 0x99}),
    "3.6.2-1": (lambda code: encoding.puback(5, 6, 7, code), {0, 0x92}),
    "3.7.2-1": (lambda code: encoding.puback(5, 7, 7, code), {0, 0x92}),
    "3.9.3-2": (
        lambda code: encoding.suback(5, 7, [code]),
        {0, 1, 2, 0x80, 0x83, 0x87, 0x8F, 0x91, 0x97, 0x9E, 0xA1, 0xA2},
    ),
    "3.11.3-2": (lambda code: encoding.unsuback(5, 7, [code]), {0, 0x11, 0x80, 0x83, 0x87, 0x8F, 0x91}),
    "3.14.2-1": (
        lambda code: encoding.disconnect(5, code),
        {0, *range(0x80, 0x84), 0x87, 0x89, 0x8B, *range(0x8D, 0x91), *range(0x93, 0xA3)},
    ),
}
"""By statement: a function that encodes a packet with a reason code, and the codes in the standard's table."""


@pytest.mark.parametrize("number", REASONS)
@statement(*REASONS)
def test_reason_codes_that_a_server_sends(number: str) -> None:
    make, allowed = REASONS[number]
    found = set()
    for code in ReasonCode:
        packet = sent(5, make(code))
        reason = packet.reasons[0] if packet.reasons else packet.reason
        found.add(reason)
        assert reason == code or (code not in allowed and reason in (0x80, 0x92))
    assert found == allowed


CLIENT_REASONS = {
    "3.4.2-1": ("PUBACK", ID, {0, 0x10, 0x80, 0x83, 0x87, 0x90, 0x91, 0x97, 0x99}),
    "3.5.2-1": ("PUBREC", ID, {0, 0x10, 0x80, 0x83, 0x87, 0x90, 0x91, 0x97, 0x99}),
    "3.6.2-1": ("PUBREL", ID, {0, 0x92}),
    "3.7.2-1": ("PUBCOMP", ID, {0, 0x92}),
    "3.14.2-1": ("DISCONNECT", b"", {0, 4, 0x80, 0x81, 0x82, 0x83, 0x90, *range(0x93, 0x9A)}),
    "3.15.2-1": ("AUTH", b"", {0x18, 0x19}),
}


@pytest.mark.parametrize("number", CLIENT_REASONS)
@statement(*CLIENT_REASONS)
def test_reason_codes_that_a_client_sends(number: str) -> None:
    kind, head, allowed = CLIENT_REASONS[number]
    end = wire.properties(authentication_method="m") if kind == "AUTH" else NOTHING
    for code in range(256):
        packet = wire.frame(kind, FLAGS.get(kind, 0), head, bytes((code,)), end)
        if code in allowed:
            assert read(5, packet).reason == code
        else:
            refused(5, packet, PROTOCOL_ERROR)


@both
@statement("3.3.1-2", "3.1.1: 3.3.1-2")
def test_dup_of_qos_0_is_0(version: int) -> None:
    refused(version, wire.publish("a", b"x", dup=True, version=version), MALFORMED)
    refused(version, wire.publish("a", b"x", dup=True, retain=True, version=version), MALFORMED)


@both
@statement("3.3.1-4", "3.1.1: 3.3.1-4")
def test_there_is_no_qos_3(version: int) -> None:
    for flags in (6, 7, 14, 15):
        refused(version, wire.frame("PUBLISH", flags, wire.binary("a"), ID, properties(version), b"x"), MALFORMED)


@both
@pytest.mark.parametrize("topic", ["+", "#", "a/+", "a/#", "a+b", "a#b", "+/a", "$share/+/a"])
@statement("3.3.2-2", "4.7.0-1", "3.1.1: 3.3.2-2", "3.1.1: 4.7.1-1")
def test_a_topic_has_no_wildcard(version: int, topic: str) -> None:
    refused(version, wire.publish(topic, b"x", version=version), ReasonCode.TOPIC_NAME_INVALID)
    refused(version, wire.connect("me", version=version, will=wire.Will(topic=topic)), ReasonCode.TOPIC_NAME_INVALID)


@both
@statement("4.7.3-1", "3.1.1: 4.7.3-1")
def test_a_topic_has_a_character(version: int) -> None:
    refused(version, wire.publish("", b"x", version=version), PROTOCOL_ERROR)
    refused(version, wire.publish("", b"x", qos=1, packet_id=7, version=version), PROTOCOL_ERROR)
    refused(version, wire.connect("me", version=version, will=wire.Will(topic="")), ReasonCode.TOPIC_NAME_INVALID)
    if version == 5:
        refused(5, wire.publish("", b"x", content_type="a"), PROTOCOL_ERROR)
        refused(5, wire.publish("a", b"x", response_topic=""), PROTOCOL_ERROR)
        will = wire.Will(topic="a", properties={"response_topic": ""})
        refused(5, wire.connect("me", will=will), PROTOCOL_ERROR)
        assert read(5, wire.publish("", b"x", topic_alias=1))[0].topic == ""


@statement("3.3.2-8")
def test_a_topic_alias_is_not_0() -> None:
    refused(5, wire.publish("a", b"x", topic_alias=0), ReasonCode.TOPIC_ALIAS_INVALID)
    refused(5, wire.publish("", b"x", topic_alias=0), ReasonCode.TOPIC_ALIAS_INVALID)
    packet = encoding.publish(5, Publish(0, ts.Message("a", b""), 0), "a", 0)
    assert "topic_alias" not in sent(5, packet).properties


@pytest.mark.parametrize("topic", ["+", "#", "a/#", "a+"])
@statement("3.3.2-14")
def test_a_response_topic_has_no_wildcard(topic: str) -> None:
    refused(5, wire.publish("a", b"x", response_topic=topic), PROTOCOL_ERROR)
    will = wire.Will(topic="a", properties={"response_topic": topic})
    assert refused(5, wire.connect("me", will=will), PROTOCOL_ERROR).version == 5


@statement("3.3.4-6")
def test_a_client_sends_no_subscription_identifier_with_a_message() -> None:
    refused(5, wire.publish("a", b"x", subscription_identifier=[5]), PROTOCOL_ERROR)


@both
@statement("3.8.3-2", "3.10.3-2", "3.1.1: 3.8.3-3", "3.1.1: 3.10.3-2")
def test_there_is_a_filter(version: int) -> None:
    refused(version, wire.subscribe(7, [], version=version), PROTOCOL_ERROR)
    refused(version, wire.unsubscribe(7, [], version=version), PROTOCOL_ERROR)


@statement("3.8.3-4")
def test_a_shared_subscription_is_not_without_own_messages() -> None:
    refused(5, wire.subscribe(7, [("$share/group/a", 5)]), PROTOCOL_ERROR)
    refused(5, wire.subscribe(7, [("a", 0), ("$share/group/a", 4)]), PROTOCOL_ERROR)
    assert read(5, wire.subscribe(7, [("$share", 5), ("$shared/a", 5)])).filters == [("$share", 5), ("$shared/a", 5)]


@both
@statement("3.8.3-5", "3.1.1: 3-8.3-4")
def test_options_of_a_subscription_have_no_reserved_bits(version: int) -> None:
    """Reserved bits of subscription options are refused.

    In MQTT 3.1.1 the options are only a QoS. In MQTT 5, the values 3 of QoS and of retain handling are refused, too.
    """
    for options in range(256):
        packet = wire.subscribe(7, [("a", options)], version=version)
        if options & 0xC0 or (version == 4 and options > 2):
            refused(version, packet, MALFORMED)
        elif options & 3 == 3 or options & 0x30 == 0x30:
            refused(version, packet, PROTOCOL_ERROR)
        else:
            assert read(version, packet).filters == [("a", options)]


def test_the_table_names_these_statements_and_tests() -> None:
    """The README's table lists exactly the statements and tests of this module."""
    text = (Path(topicstore.__file__).parent / "server" / "README.md").read_text(encoding="utf-8")
    section = text.split("\n## Statements about packets\n")[1].split("\n## ")[0]
    rows = re.findall(r"^\| ([\d.-]+|–) \| ([\d.-]+|–) \| [^|]+ \| ([^|]+) \|$", section, re.MULTILINE)
    listed = {number: set(re.findall(r"`(test_\w+)`", tests)) for number, _, tests in rows if number != "–"}
    for _, number, tests in rows:
        if number != "–":
            listed.setdefault(f"3.1.1: {number}", set()).update(re.findall(r"`(test_\w+)`", tests))
    tested: dict[str, set[str]] = {}
    for name, test in globals().items():
        for number in statements_of(test):
            tested.setdefault(number, set()).add(name)
    assert listed == tested
