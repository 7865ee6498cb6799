"""The demo's MQTT clients (paho-mqtt): publishers of numbers, and subscribers that count them.

Their sessions never expire. When a connection ends, the client reconnects once the server is ready. It must not try
earlier: after a failed attempt, paho-mqtt 2.2 forgets a pending PUBREL, and publishes that QoS 2 message again.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from topicstore.cli.terminal.exits import DAMAGED, Failure

from .serving import PATIENCE

if TYPE_CHECKING:
    from paho.mqtt.client import Client, MQTTMessage

__all__ = ["DemoClient", "Progress", "Publisher", "Subscriber"]

_WINDOW = 100
"""The number of messages that a publisher has in flight."""
_NEVER = 0xFFFFFFFF
"""The session expiry interval of a session that doesn't expire."""


class Progress:
    """A thread-safe notification of progress: the demo waits for its clients' counts, and clients for the server."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._changes = 0
        self.starts = 0
        """The number of times that the server became ready."""

    def note(self) -> None:
        """Notify all waiters that something has changed."""
        with self._changed:
            self._changes += 1
            self._changed.notify_all()

    def serving(self) -> None:
        """Count a start of the server, and notify all waiters."""
        self.starts += 1
        self.note()

    def wait(self, holds: Callable[[], bool], what: str) -> None:
        """Wait until a condition holds. Raises `Failure` if nothing changes for `PATIENCE` seconds."""
        with self._changed:
            while not holds():
                before = self._changes
                if not self._changed.wait_for(lambda before=before: self._changes != before, PATIENCE):  # type: ignore[misc]
                    raise Failure(f"waited {PATIENCE:.0f} seconds for {what}", DAMAGED)


class DemoClient:
    """A client whose session never expires. Its thread runs from `start` to `close`."""

    def __init__(self, client_id: str, version: int, progress: Progress) -> None:
        import paho.mqtt.client as paho
        from paho.mqtt.enums import CallbackAPIVersion, MQTTProtocolVersion

        self._version, self._progress, self._closing = version, progress, False
        protocol = MQTTProtocolVersion.MQTTv5 if version == 5 else MQTTProtocolVersion.MQTTv311
        session: dict[str, Any] = {} if version == 5 else {"clean_session": False}
        self._client: Client = paho.Client(
            CallbackAPIVersion.VERSION2, client_id, protocol=protocol, reconnect_on_failure=False, **session
        )
        self._client.max_inflight_messages_set(2 * _WINDOW)
        self._client.on_connect = self._connected
        self._thread = threading.Thread(target=self._run, daemon=True)
        self.connections = 0
        self.sessions_lost = 0
        """The number of reconnects at which the server no longer had the session."""

    def _connected(self, _client: object, _data: object, flags: Any, reason: Any, _values: object) -> None:
        if not reason.is_failure:
            self.sessions_lost += bool(self.connections and not flags.session_present)
            self.connections += 1
            if self.connections == 1:
                self._begin()
            self._progress.note()

    def _begin(self) -> None:
        """Called after the first connection; subclasses publish or subscribe here."""

    def start(self, port: int) -> None:
        """Connect, and start the client's thread."""
        from paho.mqtt.packettypes import PacketTypes
        from paho.mqtt.properties import Properties

        options: dict[str, Any] = {}
        if self._version == 5:
            kept = Properties(PacketTypes.CONNECT)  # type: ignore[no-untyped-call]
            kept.SessionExpiryInterval = _NEVER
            options = {"clean_start": False, "properties": kept}
        self._client.connect("127.0.0.1", port, **options)
        self._thread.start()
        self._progress.wait(lambda: self.connections > 0, "a client to be connected")

    def _run(self) -> None:
        seen = self._progress.starts
        while True:
            self._client.loop_forever()  # returns when the connection ends
            self._progress.wait(lambda seen=seen: self._closing or self._progress.starts > seen, "the server to serve")  # type: ignore[misc]
            if self._closing:
                return
            seen = self._progress.starts
            self._client.reconnect()

    def close(self) -> None:
        """Disconnect, and end the thread."""
        self._closing = True
        self._client.disconnect()
        self._progress.note()
        self._thread.join(PATIENCE)


class Publisher(DemoClient):
    """Publishes ``count`` numbers from 0 on, each with QoS 1 to ``topic/1`` and with QoS 2 to ``topic/2``."""

    def __init__(self, client_id: str, version: int, progress: Progress, topic: str, count: int) -> None:
        super().__init__(client_id, version, progress)
        self._topic = topic
        self._left = iter([(number, qos) for number in range(count) for qos in (1, 2)])
        self.acknowledged = 0
        self._client.on_publish = self._published

    def _begin(self) -> None:
        for _ in range(_WINDOW):
            self._publish()

    def _publish(self) -> None:
        """Publish the next number, if any is left. Called only in the client's thread."""
        for number, qos in self._left:
            self._client.publish(f"{self._topic}/{qos}", b"%d" % number, qos)
            return

    def _published(self, *_: object) -> None:
        self.acknowledged += 1
        self._publish()
        self._progress.note()


class Subscriber(DemoClient):
    """Counts the messages of one QoS, from all publishers."""

    def __init__(self, client_id: str, version: int, progress: Progress, qos: int, topic_filter: str) -> None:
        super().__init__(client_id, version, progress)
        self._qos, self._filter = qos, topic_filter
        self._subscribed = False
        self.found: Counter[tuple[str, bytes]] = Counter()
        """The number of deliveries of each message, by topic and payload."""
        self.received = 0
        self._client.on_message = self._received
        self._client.on_subscribe = self._answered

    def _begin(self) -> None:
        self._client.subscribe(self._filter, self._qos)

    def start(self, port: int) -> None:
        """Connect, start the client's thread, and wait for the SUBACK."""
        super().start(port)
        self._progress.wait(lambda: self._subscribed, "a subscription to be answered")

    def _answered(self, *_: object) -> None:
        self._subscribed = True
        self._progress.note()

    def _received(self, _client: object, _data: object, message: MQTTMessage) -> None:
        self.found[message.topic, bytes(message.payload)] += 1
        self.received += 1
        self._progress.note()

    @property
    def twice(self) -> int:
        """The number of messages that were received more than once."""
        return sum(count > 1 for count in self.found.values())
