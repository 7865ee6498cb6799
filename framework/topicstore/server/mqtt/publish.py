"""The PUBLISHes of one client: topic aliases, access checks, the receive maximum, and the publish rate."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from topicstore.contract.model import Message
from topicstore.runtime.bounded_cache import BoundedCache
from topicstore.server.codec.decode import decode_publish
from topicstore.server.codec.reason import PacketError, ReasonCode
from topicstore.sessions import Session

from .reserved_topics import may_be_published
from .store_thread import Row

__all__ = [
    "Inbound",
    "Pending",
    "Rate",
    "UndecidedError",
]


class Rate:
    """A rate limiter for the publishes of one client, in messages and bytes a second; None: no limit."""

    __slots__ = ("_begun", "_bytes", "_messages", "_most_bytes", "_most_messages")

    def __init__(self, most_messages: int | None, most_bytes: int | None) -> None:
        self._most_messages, self._most_bytes = most_messages, most_bytes
        self._begun = float("-inf")
        self._messages = self._bytes = 0

    def take(self, messages: int, size: int, now: float) -> float:
        """Count messages that came at ``now``; return the seconds for which reading must pause, 0 for none.

        A single batch may exceed the rate; the excess is subtracted from the following seconds.
        """
        passed = now - self._begun
        if passed >= 1.0:
            seconds = min(int(passed), 1_000_000) if passed < float("inf") else 1_000_000
            self._messages = max(self._messages - seconds * (self._most_messages or 0), 0)
            self._bytes = max(self._bytes - seconds * (self._most_bytes or 0), 0)
            self._begun = now
            passed = 0.0
        self._messages += messages
        self._bytes += size
        over = max(
            _over(self._messages, self._most_messages),
            _over(self._bytes, self._most_bytes),
        )
        return over - passed if over else 0.0


def _over(count: int, most: int | None) -> int:
    """Return the number of seconds after which the count is within the rate again."""
    return 0 if most is None or count <= most else -(-(count - most) // most)


_VERDICTS, _VERDICT_BYTES = 1_000, 256 << 10
"""Most topics in the cache of access decisions, and most characters in them, so that a client can't fill memory."""
_ALLOWED = 0


class UndecidedError(Exception):
    """A plugin has to decide whether the client may publish to a topic; then the same packet is handled again."""

    def __init__(self, topic: str) -> None:
        super().__init__(topic)
        self.topic = topic


class Pending:
    """The publishes of one client for the next batch to the store, and the data that their answers need."""

    __slots__ = ("ids1", "ids2", "refused", "rows")

    def __init__(self) -> None:
        self.rows: list[Row] = []
        self.ids1: list[int] = []
        """The packet ids of QoS 1, in the order in which they came."""
        self.ids2: list[int] = []
        """The packet ids of QoS 2, in the order in which they came."""
        self.refused: dict[tuple[int, int], ReasonCode] = {}
        """By QoS and packet id, the reasons of publishes that are refused before they reach the store."""


class Inbound:
    """Decodes and checks the PUBLISHes of one connection. Used in the event loop only."""

    __slots__ = (
        "_aliases",
        "_decided",
        "_levels",
        "_most_aliases",
        "_quota",
        "_session",
        "_verdicts",
        "_version",
        "exchanges",
        "pending",
        "unanswered",
    )

    def __init__(
        self,
        version: int,
        session: Session,
        *,
        most_aliases: int,
        levels: int,
        quota: int,
        decided: Callable[[str], bool | None] | None,
    ) -> None:
        """``decided`` says whether a topic may be published to, None if plugins must be asked; None allows all topics.

        most_aliases: the topic alias maximum that the server announced.
        levels:       most levels of a topic.
        quota:        the receive maximum that the server announced, which holds in MQTT 5 only.
        """
        self._version, self._session = version, session
        self._most_aliases, self._levels = most_aliases, levels
        self._quota = quota if version == 5 else None
        self._decided = decided
        self._aliases: dict[int, str] | None = None
        self._verdicts: BoundedCache[str, int] = BoundedCache(_VERDICTS, _VERDICT_BYTES)
        self.unanswered = 0
        """Number of messages of QoS 1 without an acknowledgement."""
        self.exchanges: dict[int, None] | None = None
        """The packet ids of QoS 2 that arrived on this connection and whose exchange has not ended."""
        self.pending: Pending | None = None
        """The publishes for the next batch to the store, which takes them; None if there are none."""

    def judge_by(self, decided: Callable[[str], bool | None]) -> None:
        """Replace the function that decides to which topics the client may publish; forget earlier decisions."""
        self._decided = decided
        self._verdicts = BoundedCache(_VERDICTS, _VERDICT_BYTES)

    def publish(self, first: int, body: bytes) -> None:
        """Decode and check a PUBLISH, and add it to `pending`.

        Raises `PacketError`, and `UndecidedError`; after the latter the same packet can be handled again.
        """
        message, packet_id, alias = decode_publish(self._version, first, body, self._session.client_id)
        if alias:
            message = self._named(message, alias)
        verdict = self._verdicts.get(message.topic)
        if verdict is None:
            verdict = self._judge(message.topic)
        pending = self.pending
        if pending is None:
            pending = self.pending = Pending()
        qos = message.qos
        if qos == 1:
            pending.ids1.append(packet_id)
            self.unanswered += 1
        elif qos:
            pending.ids2.append(packet_id)
            if self.exchanges is None:
                self.exchanges = {}
            self.exchanges[packet_id] = None
        if verdict == _ALLOWED:
            pending.rows.append((self._session, message, packet_id))
        elif qos:
            pending.refused[qos, packet_id] = ReasonCode(verdict)
        if qos and self._quota is not None and self.unanswered + len(self.exchanges or ()) > self._quota:
            raise PacketError(
                ReasonCode.RECEIVE_MAXIMUM_EXCEEDED,
                f"more than {self._quota} messages were not acknowledged [MQTT-3.3.4-9]",
            )

    def released(self, packet_ids: Sequence[int]) -> None:
        """Remove the packet ids of QoS 2 exchanges that have ended."""
        if self.exchanges:
            for packet_id in packet_ids:
                self.exchanges.pop(packet_id, None)

    def _named(self, message: Message, alias: int) -> Message:
        """Resolve a topic alias, or register it if the message has a topic; return the message with its topic."""
        if alias > self._most_aliases:
            raise PacketError(
                ReasonCode.TOPIC_ALIAS_INVALID, f"topic alias {alias} is above {self._most_aliases} [MQTT-3.2.2-17]"
            )
        if self._aliases is None:
            self._aliases = {}
        if message.topic:
            self._aliases[alias] = message.topic
            return message
        topic = self._aliases.get(alias)
        if topic is None:
            raise PacketError(
                ReasonCode.PROTOCOL_ERROR, f"topic alias {alias} stands for no topic (MQTT 5, section 3.3.2.3.4)"
            )
        return Message(topic, message.payload, message.client_id, message.qos, message.retain, None, message.properties)

    def _judge(self, topic: str) -> int:
        """Return 0 if a topic may be published to, else the reason code."""
        if self._version == 4 and topic.count("/") >= self._levels:  # MQTT 3.1.1 has no reason codes
            text = f"a topic has at most {self._levels} levels here"
            raise PacketError(ReasonCode.TOPIC_NAME_INVALID, text)
        if not may_be_published(topic, self._levels):
            return self._verdicts.keep(topic, ReasonCode.TOPIC_NAME_INVALID)
        if self._decided is None:
            return self._verdicts.keep(topic, _ALLOWED)
        allowed = self._decided(topic)
        if allowed is None:
            raise UndecidedError(topic)
        return (
            self._verdicts.keep(topic, _ALLOWED) if allowed else ReasonCode.NOT_AUTHORIZED
        )  # a denial is not cached: it may be a plugin's failure
