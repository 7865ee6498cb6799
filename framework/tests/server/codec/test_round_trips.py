"""Valid packets of MQTT 5 and 3.1.1, encoded by one codec and decoded by another.

The codecs are the tests' own, ohmqtt's and the server's.
"""

from __future__ import annotations

from typing import Any

import ohmqtt.packet
import pytest
import topicstore as ts
from hypothesis import given
from hypothesis import strategies as st
from ohmqtt.property import MQTTPublishProps
from topicstore.contract.model import Properties
from topicstore.server.codec import encode as encoding
from topicstore.server.codec.packets import (
    NEVER,
    AckPacket,
    AuthPacket,
    ConnectPacket,
    DisconnectPacket,
    PingPacket,
    SubscribePacket,
    UnsubscribePacket,
    WillPacket,
)
from topicstore.server.codec.reason import (
    ACK_REASONS,
    CLIENT_DISCONNECT_REASONS,
    CONNACK_REASONS,
    SERVER_DISCONNECT_REASONS,
    SUBACK_REASONS,
    UNSUBACK_REASONS,
)
from topicstore.sessions import Publish
from topicstore_conformance.conditions.profiles import PROFILE
from topicstore_conformance.mqtt import wire

from .conftest import read, sent

versions = st.sampled_from([4, 5])
alphabet = st.one_of(st.sampled_from("aZ09/$ -é水\ufeff\U0001f600"), st.characters(exclude_categories=["Cs"]))
texts = st.text(alphabet.filter(lambda letter: letter != "\0"), max_size=20)
topics = texts.map(lambda text: text.replace("+", "").replace("#", "")).filter(bool)
filters = texts.filter(bool)
binaries = st.binary(max_size=300)
bytes_2 = st.integers(0, 0xFFFF)
bytes_4 = st.integers(0, 0xFFFF_FFFF)
packet_ids = st.integers(1, 0xFFFF)
identifiers = st.integers(1, 268_435_455)
user_properties = st.lists(st.tuples(texts, texts), max_size=3)


def some(**values: st.SearchStrategy[Any]) -> st.SearchStrategy[dict[str, Any]]:
    """Return a strategy for any subset of these properties; an empty list counts as absent."""
    drawn = st.fixed_dictionaries({}, optional=values)
    return drawn.map(lambda found: {name: value for name, value in found.items() if value != []})


MESSAGE = {
    "payload_format_indicator": st.integers(0, 1),
    "message_expiry_interval": bytes_4,
    "content_type": texts,
    "response_topic": topics,
    "correlation_data": binaries,
    "user_property": user_properties,
}
message_properties = some(**MESSAGE)


def as_properties(values: dict[str, Any]) -> Properties | None:
    """Return the message properties among a packet's properties."""
    ours = {name: value for name, value in values.items() if name in MESSAGE}
    pairs = tuple(ours.pop("user_property", ()))
    return Properties(**ours, user_properties=pairs) if ours or pairs else None


wills = st.builds(
    wire.Will,
    topic=topics,
    payload=binaries,
    qos=st.integers(0, 2),
    retain=st.booleans(),
    properties=some(will_delay_interval=bytes_4, **MESSAGE),
)
connects = some(
    session_expiry_interval=bytes_4,
    receive_maximum=packet_ids,
    maximum_packet_size=st.integers(1, 0xFFFF_FFFF),
    topic_alias_maximum=bytes_2,
    request_response_information=st.integers(0, 1),
    request_problem_information=st.integers(0, 1),
    authentication_method=texts,
    user_property=user_properties,
)


def fields(**values: st.SearchStrategy[Any]) -> st.SearchStrategy[dict[str, Any]]:
    """Return a strategy for dictionaries with all of these fields."""
    return st.fixed_dictionaries(values)


@PROFILE
@given(
    versions,
    fields(client_id=texts, keep_alive=bytes_2, will=st.none() | wills, user_name=st.none() | texts),
    st.booleans(),
    st.none() | binaries,
    connects,
    st.none() | binaries,
)
def test_connect(
    version: int, given: dict[str, Any], clean: bool, password: bytes | None, values: dict[str, Any], data: bytes | None
) -> None:
    if version == 4:
        values, clean = {}, clean or not given["client_id"]
        password = None if given["user_name"] is None else password
    if "authentication_method" in values and data is not None:
        values["authentication_data"] = data
    packet = wire.connect(version=version, clean=clean, password=password, **given, **values)
    will, expected_will = given.pop("will"), None
    if will is not None:
        described = will.properties if version == 5 else {}
        delay = described.get("will_delay_interval", 0)
        expected_will = WillPacket(will.topic, will.payload, will.qos, will.retain, delay, as_properties(described))
    expected = {
        "session_expiry": values.pop("session_expiry_interval", 0) if version == 5 else 0 if clean else NEVER,
        "request_response_information": values.pop("request_response_information", 0) == 1,
        "request_problem_information": values.pop("request_problem_information", 1) == 1,
        "user_properties": tuple(values.pop("user_property", ())),
        **values,
    }
    assert read(0, packet) == ConnectPacket(
        version=version, clean_start=clean, password=password, will=expected_will, **given, **expected
    )


PUBLISH = {
    "topic": topics,
    "qos": st.integers(0, 2),
    "packet_id": packet_ids,
    "retain": st.booleans(),
    "dup": st.booleans(),
}


@PROFILE
@given(versions, fields(payload=binaries, **PUBLISH), message_properties, some(topic_alias=packet_ids), st.booleans())
def test_publish_from_a_client(
    version: int, given: dict[str, Any], values: dict[str, Any], alias: dict[str, int], named: bool
) -> None:
    alias, given["dup"] = alias if version == 5 else {}, given["dup"] and given["qos"] > 0
    given["topic"] = given["topic"] if named or not alias else ""
    packet = wire.publish(version=version, **given, **values, **alias)
    topic, payload, qos, retain = (given[name] for name in ("topic", "payload", "qos", "retain"))
    properties = as_properties(values) if version == 5 else None
    expected = ts.Message(topic, payload, "me", qos, retain, None, properties)
    for _ in range(2):  # the second time, topic and properties come from a cache
        found = read(version, packet)
        assert found == (expected, given["packet_id"] if qos else 0, alias.get("topic_alias", 0))


@PROFILE
@given(
    versions,
    fields(payload=st.integers(0, 20_000).map(bytes), **PUBLISH),
    message_properties,
    st.lists(identifiers, max_size=3),
    bytes_2,
    st.booleans(),
)
def test_publish_to_a_client(
    version: int, given: dict[str, Any], values: dict[str, Any], subscriptions: list[int], alias: int, named: bool
) -> None:
    topic, payload, qos, retain = (given[name] for name in ("topic", "payload", "qos", "retain"))
    dup, packet_id = given["dup"] and qos > 0, given["packet_id"] if qos else 0
    alias = alias if version == 5 else 0
    message = ts.Message(topic, payload, "other", qos, retain, 1, as_properties(values))
    expiry = values.pop("message_expiry_interval", None)
    publish = Publish(packet_id, message, qos, dup, retain, tuple(subscriptions), expiry)
    name = topic if named or not alias else ""
    packet = encoding.publish(version, publish, name, alias)
    expected = dict(values) if version == 5 else {}
    if version == 5:
        expected |= {"message_expiry_interval": expiry} if expiry is not None else {}
        expected |= {"subscription_identifier": subscriptions} if subscriptions else {}
        expected |= {"topic_alias": alias} if alias else {}
    found = sent(version, packet)
    assert (found.topic, found.payload, found.packet_id) == (name, payload, packet_id)
    assert (found.qos, found.retain, found.dup, found.properties) == (qos, retain, dup, expected)
    before, after = encoding.publish_parts(version, publish, name, alias)
    assert packet == before + (packet_id.to_bytes(2, "big") if qos else b"") + after
    if version == 5:
        theirs = ohmqtt.packet.decode_packet(packet)
        assert isinstance(theirs, ohmqtt.packet.MQTTPublishPacket)
        assert (theirs.topic, theirs.payload, theirs.packet_id) == (name, payload, packet_id)


@PROFILE
@given(topics, packet_ids, binaries, message_properties)
def test_publish_as_ohmqtt_makes_it(topic: str, packet_id: int, payload: bytes, values: dict[str, Any]) -> None:
    properties = MQTTPublishProps()
    for name, value in values.items():
        setattr(properties, "".join(map(str.capitalize, name.split("_"))), value)
    packet = ohmqtt.packet.MQTTPublishPacket(
        topic, payload, ohmqtt.packet.publish.MQTTQoS.Q1, packet_id=packet_id, properties=properties
    )
    message = ts.Message(topic, payload, "me", 1, False, None, as_properties(values))
    assert read(5, packet.encode()) == (message, packet_id, 0)


options = st.builds(
    lambda qos, no_local, as_published, handling: qos | no_local << 2 | as_published << 3 | handling << 4,
    st.integers(0, 2),
    st.integers(0, 1),
    st.integers(0, 1),
    st.integers(0, 2),
)


@PROFILE
@given(
    versions,
    packet_ids,
    st.lists(st.tuples(filters, options), min_size=1, max_size=4),
    st.integers(0, 268_435_455),
    user_properties,
)
def test_subscribe(
    version: int, packet_id: int, asked: list[tuple[str, int]], identifier: int, pairs: list[tuple[str, str]]
) -> None:
    asked = [(text, one & 3 if version == 4 or text.startswith("$share/") else one) for text, one in asked]
    values: dict[str, Any] = {}
    if version == 5:
        values = {"subscription_identifier": [identifier]} if identifier else {}
        values |= {"user_property": pairs} if pairs else {}
    expected = SubscribePacket(packet_id, asked)
    if version == 5:
        expected = SubscribePacket(packet_id, asked, identifier, tuple(pairs))
    assert read(version, wire.subscribe(packet_id, asked, version=version, **values)) == expected


@PROFILE
@given(versions, packet_ids, st.lists(filters, min_size=1, max_size=4), user_properties)
def test_unsubscribe(version: int, packet_id: int, asked: list[str], pairs: list[tuple[str, str]]) -> None:
    pairs = pairs if version == 5 else []
    values: dict[str, Any] = {"user_property": pairs} if pairs else {}
    packet = wire.unsubscribe(packet_id, asked, version=version, **values)
    assert read(version, packet) == UnsubscribePacket(packet_id, asked, tuple(pairs))


ack_properties = some(reason_string=texts, user_property=user_properties)
KINDS = {4: "PUBACK", 5: "PUBREC", 6: "PUBREL", 7: "PUBCOMP"}


@PROFILE
@given(st.sampled_from(list(KINDS)), packet_ids, st.data(), ack_properties, st.booleans())
def test_acknowledgements(kind: int, packet_id: int, data: st.DataObject, values: dict[str, Any], full: bool) -> None:
    reason = data.draw(st.sampled_from(sorted(ACK_REASONS[kind])))
    packet = wire.acknowledgement(KINDS[kind], packet_id, reason)
    if full or values:
        rest = packet_id.to_bytes(2, "big"), bytes((reason,)), wire.properties(**values)
        packet = wire.frame(KINDS[kind], 2 if kind == 6 else 0, *rest)
    assert read(5, packet) == AckPacket(kind, packet_id, reason)
    short = wire.acknowledgement(KINDS[kind], packet_id)
    assert read(4, short) == read(5, short) == AckPacket(kind, packet_id, 0)
    packet = encoding.puback(5, kind, packet_id, reason)
    assert read(5, packet) == AckPacket(kind, packet_id, reason)
    assert sent(5, packet).reason == reason
    assert encoding.puback(4, kind, packet_id, reason) == short
    assert encoding.pubacks(5, kind, [(packet_id, reason)]) == encoding.puback(5, kind, packet_id, reason)


@PROFILE
@given(
    st.sampled_from(sorted(CLIENT_DISCONNECT_REASONS)),
    some(session_expiry_interval=bytes_4, reason_string=texts, user_property=user_properties),
    st.booleans(),
)
def test_disconnect(reason: int, values: dict[str, Any], short: bool) -> None:
    packet = wire.frame("DISCONNECT", 0, bytes((reason,))) if short else wire.disconnect(reason, **values)
    given = {} if short else values
    expected = DisconnectPacket(reason, given.get("session_expiry_interval"), given.get("reason_string"))
    assert read(5, packet) == expected


@PROFILE
@given(st.sampled_from([0x18, 0x19]), texts, st.none() | binaries)
def test_auth(reason: int, method: str, data: bytes | None) -> None:
    values: dict[str, Any] = {} if data is None else {"authentication_data": data}
    packet = wire.auth(reason, authentication_method=method, **values)
    assert read(5, packet) == AuthPacket(reason, method, data)


@pytest.mark.parametrize("version", [4, 5])
def test_packets_without_a_body(version: int) -> None:
    assert read(version, wire.PINGREQ) == PingPacket()
    assert read(version, b"\xe0\0") == DisconnectPacket(0)
    assert encoding.PINGRESP == wire.frame("PINGRESP", 0)


CONNACK = {
    "session_expiry": ("session_expiry_interval", bytes_4),
    "receive_maximum": ("receive_maximum", packet_ids),
    "maximum_qos": ("maximum_qos", st.integers(0, 1)),
    "retain_available": ("retain_available", st.booleans()),
    "maximum_packet_size": ("maximum_packet_size", st.integers(1, 0xFFFF_FFFF)),
    "assigned_client_id": ("assigned_client_identifier", texts),
    "topic_alias_maximum": ("topic_alias_maximum", bytes_2),
    "reason_string": ("reason_string", texts),
    "user_properties": ("user_property", user_properties),
    "wildcard_subscription_available": ("wildcard_subscription_available", st.booleans()),
    "subscription_identifiers_available": ("subscription_identifier_available", st.booleans()),
    "shared_subscription_available": ("shared_subscription_available", st.booleans()),
    "server_keep_alive": ("server_keep_alive", bytes_2),
    "response_information": ("response_information", texts),
    "server_reference": ("server_reference", texts),
    "authentication_method": ("authentication_method", texts),
    "authentication_data": ("authentication_data", binaries),
}
"""Each property of a CONNACK: its name here, its name in `wire`, and its values."""


@PROFILE
@given(
    st.sampled_from(sorted(CONNACK_REASONS)),
    st.booleans(),
    some(**{name: values for name, (_, values) in CONNACK.items()}),
)
def test_connack(reason: int, present: bool, values: dict[str, Any]) -> None:
    packet = encoding.connack(5, reason, present, **values)
    found = sent(5, packet)
    assert (found.kind, found.flags, found.reason, found.present) == ("CONNACK", 0, reason, present and not reason)
    assert found.properties == {CONNACK[name][0]: value for name, value in values.items()}
    theirs = ohmqtt.packet.decode_packet(packet)
    assert isinstance(theirs, ohmqtt.packet.MQTTConnAckPacket)
    assert theirs.reason_code == reason


@PROFILE
@given(packet_ids, st.lists(st.sampled_from(sorted(SUBACK_REASONS)), min_size=1, max_size=300), st.none() | texts)
def test_suback(packet_id: int, codes: list[int], reason_string: str | None) -> None:
    found = sent(5, encoding.suback(5, packet_id, codes, reason_string))
    assert (found.kind, found.flags, found.packet_id, found.reasons) == ("SUBACK", 0, packet_id, tuple(codes))
    assert found.properties.get("reason_string") == reason_string
    found = sent(4, encoding.suback(4, packet_id, codes, reason_string))
    assert (found.packet_id, found.reasons) == (packet_id, tuple(min(code, 0x80) for code in codes))


@PROFILE
@given(packet_ids, st.lists(st.sampled_from(sorted(UNSUBACK_REASONS)), min_size=1, max_size=300), st.none() | texts)
def test_unsuback(packet_id: int, codes: list[int], reason_string: str | None) -> None:
    found = sent(5, encoding.unsuback(5, packet_id, codes, reason_string))
    assert (found.kind, found.flags, found.packet_id, found.reasons) == ("UNSUBACK", 0, packet_id, tuple(codes))
    assert found.properties.get("reason_string") == reason_string
    assert encoding.unsuback(4, packet_id, codes) == b"\xb0\2" + packet_id.to_bytes(2, "big")


@PROFILE
@given(st.sampled_from(sorted(SERVER_DISCONNECT_REASONS)), st.none() | texts, st.none() | texts)
def test_disconnect_of_the_server(reason: int, reason_string: str | None, reference: str | None) -> None:
    found = sent(5, encoding.disconnect(5, reason, reason_string, reference))
    assert (found.kind, found.flags, found.reason) == ("DISCONNECT", 0, reason)
    assert found.properties.get("reason_string") == reason_string
    assert found.properties.get("server_reference") == reference
