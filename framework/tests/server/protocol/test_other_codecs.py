"""What real clients' codecs send is read, and what the server sends is read by them, without a connection."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from typing import Any, Literal

import pytest
import topicstore as ts
from topicstore.contract.model import Properties
from topicstore.server.protocol import encoding
from topicstore.server.protocol.decoding import decode, decode_publish
from topicstore.server.protocol.frames import Frame, FrameReader
from topicstore.server.protocol.packets import (
    NEVER,
    AckPacket,
    ConnectPacket,
    DisconnectPacket,
    SubscribePacket,
    UnsubscribePacket,
    WillPacket,
)
from topicstore.sessions import Publish
from topicstore_conformance.faults.threads import PATIENCE

pytest.importorskip("gmqtt", reason="needs gmqtt: pip install gmqtt")
pytest.importorskip("paho.mqtt.client", reason="needs paho-mqtt: pip install paho-mqtt")

import gmqtt
import paho.mqtt.client as paho
from gmqtt.mqtt import package
from gmqtt.mqtt.utils import IdGenerator
from paho.mqtt.packettypes import PacketTypes
from paho.mqtt.properties import Properties as PahoProperties
from paho.mqtt.subscribeoptions import SubscribeOptions as PahoOptions

PROPERTIES = Properties(1, 60, "text/plain", "back/here", b"\0\1", (("a", "1"), ("水", "é")))
MESSAGE = ts.Message("fleet/é", b"41.5", "me", 1, True, None, PROPERTIES)
PLAIN = ts.Message("fleet/é", b"41.5", "me", 1, True)
WILL = WillPacket("last/will", b"gone", 2, True, 30, Properties(content_type="text/plain"))


class Paho:
    """A client of paho whose socket ends here. What it gets is collected by its callbacks."""

    def __init__(self, version: int) -> None:
        self.version = version
        self.client = paho.Client(
            paho.CallbackAPIVersion.VERSION2, "me", protocol=paho.MQTTv5 if version == 5 else paho.MQTTv311
        )
        theirs, self.ours = socket.socketpair()
        self.ours.settimeout(PATIENCE)
        self.client._sock = theirs
        self.reader = FrameReader(1 << 20)
        self.got: list[Any] = []
        self.client.on_connect = lambda _client, _data, flags, code, values: self.got.append((flags, code, values))
        self.client.on_message = lambda _client, _data, message: self.got.append(message)
        self.client.on_subscribe = lambda _client, _data, number, codes, values: self.got.append(
            (number, codes, values)
        )
        self.client.on_unsubscribe = lambda _client, _data, number, codes, values: self.got.append(
            (number, codes, values)
        )
        self.client.on_publish = lambda _client, _data, number, code, values: self.got.append((number, code, values))
        self.client.on_disconnect = lambda _client, _data, flags, code, values: self.got.append((flags, code, values))

    def sent(self) -> Frame:
        """Return what the client has sent: one packet."""
        (frame,) = self.reader.feed(self.ours.recv(1 << 16))
        self.reader.version = self.version
        return frame

    def receives(self, packet: bytes, refused: bool = False) -> Any:
        """Have the client read a packet, and return what a callback got. A refused client closes its connection."""
        self.ours.sendall(packet)
        assert (self.client.loop_read() != paho.MQTT_ERR_SUCCESS) == refused
        found, *_ = self.got  # a refused client's callback for the end of its connection comes second
        self.got.clear()
        return found

    def close(self) -> None:
        self.ours.close()
        if self.client._sock is not None:
            self.client._sock.close()
        self.client._sock = None


@pytest.fixture(params=[4, 5], ids=["MQTT 3.1.1", "MQTT 5"])
def client(request: pytest.FixtureRequest) -> Iterator[Paho]:
    made = Paho(request.param)
    yield made
    made.close()


def paho_properties(kind: int, **values: Any) -> PahoProperties:
    made = PahoProperties(kind)
    for name, value in values.items():
        setattr(made, name, value)
    return made


PUBLISHED = {
    "PayloadFormatIndicator": 1,
    "MessageExpiryInterval": 60,
    "ContentType": "text/plain",
    "ResponseTopic": "back/here",
    "CorrelationData": b"\0\1",
    "UserProperty": [("a", "1"), ("水", "é")],
}


def test_paho_connects(client: Paho) -> None:
    version = client.version
    client.client.username_pw_set("user", "secret")
    will = paho_properties(PacketTypes.WILLMESSAGE, WillDelayInterval=30, ContentType="text/plain")
    client.client.will_set("last/will", b"gone", 2, True, will if version == 5 else None)
    client.client._connect_properties = paho_properties(
        PacketTypes.CONNECT, SessionExpiryInterval=NEVER, ReceiveMaximum=20, TopicAliasMaximum=3
    )
    client.client._clean_session = client.client._clean_start = False  # type: ignore[assignment]
    client.client._send_connect(60)
    expected_will = WILL if version == 5 else WillPacket("last/will", b"gone", 2, True, 0, None)
    given = {"receive_maximum": 20, "topic_alias_maximum": 3} if version == 5 else {}
    assert decode(0, *client.sent()) == ConnectPacket(
        version, "me", False, 60, "user", b"secret", expected_will, NEVER, **given
    )
    flags, code, values = client.receives(encoding.connack(version, 0, True, receive_maximum=7, assigned_client_id="x"))
    assert (flags.session_present, code) == (True, "Success")
    assert version == 4 or (values.ReceiveMaximum, values.AssignedClientIdentifier) == (7, "x")


@pytest.mark.parametrize(
    ("reason", "text"),
    [(0x86, "Bad user name or password"), (0x85, "Client identifier not valid"), (0x87, "Not authorized")],
)
def test_paho_is_refused(client: Paho, reason: int, text: str) -> None:
    _, code, _ = client.receives(encoding.connack(client.version, reason, reason_string="no"), refused=True)
    assert str(code) == text


def test_paho_publishes(client: Paho) -> None:
    version = client.version
    values = paho_properties(PacketTypes.PUBLISH, **PUBLISHED) if version == 5 else None
    sent = client.client.publish("fleet/é", b"41.5", 1, True, values)
    message = MESSAGE if version == 5 else PLAIN
    assert decode_publish(version, *client.sent(), "me") == (message, sent.mid, 0)
    number, code, _ = client.receives(encoding.puback(version, 4, sent.mid, 0x10))
    assert (number, code) == (sent.mid, "No matching subscribers" if version == 5 else "Success")


def test_paho_gets_a_message(client: Paho) -> None:
    version = client.version
    publish = Publish(7, MESSAGE, 1, True, True, (5, 5), 59)
    found = client.receives(encoding.publish(version, publish, "fleet/é", 0))
    assert (found.topic, found.payload, found.mid) == ("fleet/é", b"41.5", 7)
    assert (found.qos, found.retain, found.dup) == (1, True, True)
    if version == 5:
        expected = {**PUBLISHED, "MessageExpiryInterval": 59, "SubscriptionIdentifier": [5, 5]}
        assert {name: getattr(found.properties, name) for name in expected} == expected
    assert decode(version, *client.sent()) == AckPacket(4, 7, 0)


def test_paho_and_qos_2(client: Paho) -> None:
    version = client.version
    sent = client.client.publish("a", b"x", 2)
    assert decode_publish(version, *client.sent(), "me") == (ts.Message("a", b"x", "me", 2), sent.mid, 0)
    client.ours.sendall(encoding.puback(version, 5, sent.mid))
    assert client.client.loop_read() == paho.MQTT_ERR_SUCCESS
    assert decode(version, *client.sent()) == AckPacket(6, sent.mid, 0)
    number, _, _ = client.receives(encoding.puback(version, 7, sent.mid))
    assert number == sent.mid
    client.ours.sendall(encoding.publish(version, Publish(9, ts.Message("b", b"y", qos=2), 2), "b", 0))
    assert client.client.loop_read() == paho.MQTT_ERR_SUCCESS
    assert decode(version, *client.sent()) == AckPacket(5, 9, 0)
    assert client.receives(encoding.puback(version, 6, 9)).payload == b"y"
    assert decode(version, *client.sent()) == AckPacket(7, 9, 0)


def test_paho_subscribes(client: Paho) -> None:
    version = client.version
    if version == 5:
        values = paho_properties(PacketTypes.SUBSCRIBE, SubscriptionIdentifier=200, UserProperty=[("a", "b")])
        options = [
            ("a/+", PahoOptions(1, noLocal=True, retainAsPublished=True, retainHandling=2)),
            ("é/#", PahoOptions(2)),
        ]
        _, number = client.client.subscribe(options, properties=values)
        assert number is not None
        expected = SubscribePacket(number, [("a/+", 0x2D), ("é/#", 2)], 200, (("a", "b"),))
    else:
        _, number = client.client.subscribe([("a/+", 1), ("é/#", 2)])
        assert number is not None
        expected = SubscribePacket(number, [("a/+", 1), ("é/#", 2)])
    assert decode(version, *client.sent()) == expected
    found, codes, values = client.receives(encoding.suback(version, number, [1, 0x87], "not the second"))
    assert (found, [code.value for code in codes]) == (number, [1, 0x87 if version == 5 else 0x80])
    assert version == 4 or values.ReasonString == "not the second"
    _, number = client.client.unsubscribe(["a/+", "é/#"])
    assert number is not None
    assert decode(version, *client.sent()) == UnsubscribePacket(number, ["a/+", "é/#"])
    found, codes, _ = client.receives(encoding.unsuback(version, number, [0, 0x11]))
    assert (found, [code.value for code in codes]) == (number, [0, 0x11] if version == 5 else [])


def test_paho_goes(client: Paho) -> None:
    reason = paho.ReasonCode(PacketTypes.DISCONNECT, "Disconnect with will message") if client.version == 5 else None
    values = paho_properties(PacketTypes.DISCONNECT, SessionExpiryInterval=9) if client.version == 5 else None
    client.client._send_disconnect(reason, values)
    expected = DisconnectPacket(4, 9) if client.version == 5 else DisconnectPacket(0)
    assert decode(client.version, *client.sent()) == expected


def test_paho_is_told_to_go() -> None:
    client = Paho(5)
    try:
        _, code, values = client.receives(encoding.disconnect(5, 0x8E, "it is used elsewhere"))
        assert (code.value, values.ReasonString) == (0x8E, "it is used elsewhere")
    finally:
        client.close()


class Protocol:
    """What gmqtt's packets ask of a connection."""

    def __init__(self, version: Literal[4, 5]) -> None:
        self.proto_name = b"MQTT"
        self.proto_ver = version
        self.id_generator = IdGenerator()


@pytest.fixture(params=[4, 5], ids=["MQTT 3.1.1", "MQTT 5"])
def protocol(request: pytest.FixtureRequest) -> Protocol:
    return Protocol(request.param)


def one_frame(version: int, packet: bytes) -> Frame:
    reader = FrameReader(1 << 20)
    reader.version = version
    (frame,) = reader.feed(bytes(packet))
    return frame


GMQTT = {
    "payload_format_id": 1,
    "message_expiry_interval": 60,
    "content_type": "text/plain",
    "response_topic": "back/here",
    "correlation_data": b"\0\1",
    "user_property": [("a", "1"), ("水", "é")],
}


def test_gmqtt_connects(protocol: Protocol) -> None:
    version = protocol.proto_ver
    will = gmqtt.Message("last/will", b"gone", 2, True, will_delay_interval=30, content_type="text/plain")
    packet = package.LoginPackageFactor.build_package(
        "me", "user", "secret", False, 60, protocol, will, session_expiry_interval=NEVER, receive_maximum=20
    )
    expected_will = WILL if version == 5 else WillPacket("last/will", b"gone", 2, True, 0, None)
    assert decode(0, *one_frame(0, packet)) == ConnectPacket(
        version, "me", False, 60, "user", b"secret", expected_will, NEVER, 20 if version == 5 else 65_535
    )


def test_gmqtt_publishes(protocol: Protocol) -> None:
    version = protocol.proto_ver
    sent = gmqtt.Message("fleet/bus", b"41.5", 1, True, **GMQTT)
    number, packet = package.PublishPacket.build_package(sent, protocol)
    properties = PROPERTIES if version == 5 else None
    message = ts.Message("fleet/bus", b"41.5", "me", 1, True, None, properties)
    assert decode_publish(version, *one_frame(version, packet), "me") == (message, number, 0)


def test_gmqtt_subscribes_and_goes(protocol: Protocol) -> None:
    version = protocol.proto_ver
    asked = [gmqtt.Subscription("a/+", 1, no_local=version == 5), gmqtt.Subscription("b/#", 2)]
    number, packet = package.SubscribePacket.build_package(asked, protocol, subscription_identifier=200)
    expected = SubscribePacket(number, [("a/+", 5 if version == 5 else 1), ("b/#", 2)], 200 if version == 5 else 0)
    assert decode(version, *one_frame(version, packet)) == expected
    number, packet = package.UnsubscribePacket.build_package(["a/+", "b/#"], protocol)
    assert decode(version, *one_frame(version, packet)) == UnsubscribePacket(number, ["a/+", "b/#"])
    packet = package.CommandWithMidPacket.build_package(0x40, 7, False, 0, version)
    assert decode(version, *one_frame(version, packet)) == AckPacket(4, 7, 0)
    packet = package.DisconnectPacket.build_package(protocol, 4 if version == 5 else 0, session_expiry_interval=9)
    expected_end = DisconnectPacket(4, 9) if version == 5 else DisconnectPacket(0)
    assert decode(version, *one_frame(version, packet)) == expected_end
