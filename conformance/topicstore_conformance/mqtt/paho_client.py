"""A paho-mqtt client with its own thread, as programs use it, and methods that wait for its callbacks."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, Literal, Self

import paho.mqtt.client as paho
from paho.mqtt.enums import CallbackAPIVersion, MQTTProtocolVersion
from paho.mqtt.packettypes import PacketTypes
from paho.mqtt.properties import Properties
from paho.mqtt.subscribeoptions import SubscribeOptions

from topicstore_conformance.faults.threads import PATIENCE

__all__ = ["PahoClient", "properties"]


def properties(packet: str, **values: Any) -> Any:
    """Return the properties of a packet type; ``values`` have paho's names, such as ``SessionExpiryInterval``."""
    found: Any = Properties(getattr(PacketTypes, packet))  # type: ignore[no-untyped-call]
    for name, value in values.items():
        setattr(found, name, value)
    return found


class PahoClient:
    """A connected client of a server on this machine. Each request waits for its answer, and fails without one.

    version:  4 for MQTT 3.1.1, 5 for MQTT 5.
    clean:    Clean Start in MQTT 5, Clean Session in MQTT 3.1.1.
    expiry:   the session expiry interval in MQTT 5, in seconds.
    prepared: a function called with paho's client before it connects, for other settings.
    values:   further properties of the CONNECT packet in MQTT 5.
    """

    def __init__(
        self,
        port: int,
        client_id: str = "",
        *,
        version: int = 5,
        clean: bool = True,
        expiry: int = 0,
        keep_alive: int = 60,
        transport: Literal["tcp", "websockets"] = "tcp",
        prepared: Callable[[paho.Client], object] | None = None,
        **values: Any,
    ) -> None:
        self._happened = threading.Condition()
        self.messages: list[paho.MQTTMessage] = []
        """The received messages, in order of arrival."""
        self.connack: tuple[Any, ...] | None = None
        """Flags, reason code and properties of the CONNACK."""
        self.disconnect: Any = None
        """The reason code with which the connection ended."""
        self._answers: dict[int, Any] = {}
        options: dict[str, Any] = {"clean_session": clean} if version == 4 else {}
        self.paho = paho.Client(
            CallbackAPIVersion.VERSION2,
            client_id,
            protocol=MQTTProtocolVersion(version),
            transport=transport,
            reconnect_on_failure=False,
            **options,
        )
        self.paho.on_connect = lambda _client, _data, flags, reason, values: self._note(connack=(flags, reason, values))
        self.paho.on_disconnect = lambda _client, _data, _flags, reason, _values: self._note(disconnect=reason)
        self.paho.on_message = lambda _client, _data, message: self._keep(message)
        self.paho.on_subscribe = lambda _client, _data, number, reasons, _values: self._answer(number, reasons)
        self.paho.on_unsubscribe = lambda _client, _data, number, reasons, _values: self._answer(number, reasons)
        self.paho.on_publish = lambda _client, _data, number, reason, _values: self._answer(number, reason)
        if prepared is not None:
            prepared(self.paho)
        if version == 5:
            options = {
                "clean_start": clean,
                "properties": properties("CONNECT", SessionExpiryInterval=expiry, **values),
            }
            self.paho.connect("127.0.0.1", port, keep_alive, **options)
        else:
            self.paho.connect("127.0.0.1", port, keep_alive)
        self.paho.loop_start()
        self.wait(lambda: self.connack is not None or self.disconnect is not None, "a CONNACK")

    def _note(self, **values: Any) -> None:
        with self._happened:
            self.__dict__.update(values)
            self._happened.notify_all()

    def _keep(self, message: paho.MQTTMessage) -> None:
        with self._happened:
            self.messages.append(message)
            self._happened.notify_all()

    def _answer(self, number: int, answer: Any) -> None:
        with self._happened:
            self._answers[number] = answer
            self._happened.notify_all()

    def wait(self, holds: Callable[[], object], what: str) -> None:
        """Wait until a condition holds that only this client's callbacks change; fail after `PATIENCE` seconds."""
        with self._happened:
            assert self._happened.wait_for(holds, PATIENCE), f"waited {PATIENCE:.0f} seconds for {what}"

    def _answered(self, number: int, what: str) -> Any:
        self.wait(lambda: number in self._answers or self.disconnect is not None, what)
        assert number in self._answers, f"the connection ended with {self.disconnect} instead of {what}"
        return self._answers.pop(number)

    @property
    def answer(self) -> int:
        """Return the reason code of the CONNACK."""
        assert self.connack is not None, f"the connection ended with {self.disconnect}"
        return int(self.connack[1].value)

    @property
    def present(self) -> bool:
        """Whether the CONNACK has the flag Session Present."""
        assert self.connack is not None
        return bool(self.connack[0].session_present)

    def subscribe(self, topic_filter: str, qos: int = 1, *, values: Properties | None = None, **options: Any) -> int:
        """Subscribe; return the reason code of the SUBACK, which is the granted QoS on success."""
        if options or values is not None:
            how = SubscribeOptions(qos, **options)
            _, number = self.paho.subscribe(topic_filter, options=how, properties=values)
        else:
            _, number = self.paho.subscribe(topic_filter, qos)
        assert number is not None
        return int(self._answered(number, f"the SUBACK of {topic_filter}")[0].value)

    def unsubscribe(self, topic_filter: str) -> int | None:
        """Unsubscribe; return the reason code of the UNSUBACK, None in MQTT 3.1.1."""
        _, number = self.paho.unsubscribe(topic_filter)
        assert number is not None
        found = self._answered(number, f"the UNSUBACK of {topic_filter}")
        return int(found[0].value) if found else None

    def publish(self, topic: str, payload: bytes | str = b"", qos: int = 1, **options: Any) -> int:
        """Publish; return the reason code of the last acknowledgement, or of the write to the socket at QoS 0."""
        sent = self.paho.publish(topic, payload, qos, **options)
        return int(self._answered(sent.mid, f"the answer to a PUBLISH to {topic}").value)

    def received(self, count: int) -> list[paho.MQTTMessage]:
        """Wait for ``count`` messages and return them; fail if more have arrived."""
        self.wait(lambda: len(self.messages) >= count, f"{count} messages, of which {len(self.messages)} came")
        assert len(self.messages) == count
        return self.messages

    def payloads(self, count: int) -> list[str]:
        """Wait for ``count`` messages and return their payloads as text; fail if more have arrived."""
        return [message.payload.decode() for message in self.received(count)]

    def ended(self) -> int:
        """Wait until the connection has ended, and return the reason code."""
        self.wait(lambda: self.disconnect is not None, "the end of the connection")
        return int(self.disconnect.value)

    def close(self) -> None:
        """Send DISCONNECT, and stop the client's thread."""
        self.paho.disconnect()
        self.paho.loop_stop()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
