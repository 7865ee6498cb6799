"""Reason codes of MQTT 5: those of each packet type, of invalid packets, of errors of the store and of ended sessions.

Source: MQTT Version 5.0 (OASIS Standard), sections 2.4, 3.2.2.2, 3.4.2.1, 3.5.2.1, 3.6.2.1, 3.7.2.1, 3.9.3, 3.11.3 and
3.14.2.1; the return codes of MQTT 3.1.1 are in its section 3.2.2.3.
"""

from __future__ import annotations

import enum

import topicstore as ts
from topicstore.contract.errors import TopicstoreError
from topicstore.contract.log_store import StorageUnavailableError
from topicstore.contract.topics import check_topic
from topicstore.sessions import Ended

__all__ = [
    "ACK_REASONS",
    "CLIENT_AUTH_REASONS",
    "CLIENT_DISCONNECT_REASONS",
    "CONNACK_REASONS",
    "SERVER_DISCONNECT_REASONS",
    "SUBACK_REASONS",
    "UNSUBACK_REASONS",
    "PacketError",
    "ReasonCode",
    "is_passing",
    "permitted",
    "reason_of",
    "reason_of_end",
    "reason_of_message",
    "sendable",
    "text_of",
]


class ReasonCode(enum.IntEnum):
    """The reason codes of MQTT 5; 0x80 and above are failures."""

    SUCCESS = 0x00
    NORMAL_DISCONNECTION = 0x00
    GRANTED_QOS_0 = 0x00
    GRANTED_QOS_1 = 0x01
    GRANTED_QOS_2 = 0x02
    DISCONNECT_WITH_WILL_MESSAGE = 0x04
    NO_MATCHING_SUBSCRIBERS = 0x10
    NO_SUBSCRIPTION_EXISTED = 0x11
    CONTINUE_AUTHENTICATION = 0x18
    RE_AUTHENTICATE = 0x19
    UNSPECIFIED_ERROR = 0x80
    MALFORMED_PACKET = 0x81
    PROTOCOL_ERROR = 0x82
    IMPLEMENTATION_SPECIFIC_ERROR = 0x83
    UNSUPPORTED_PROTOCOL_VERSION = 0x84
    CLIENT_IDENTIFIER_NOT_VALID = 0x85
    BAD_USER_NAME_OR_PASSWORD = 0x86
    NOT_AUTHORIZED = 0x87
    SERVER_UNAVAILABLE = 0x88
    SERVER_BUSY = 0x89
    BANNED = 0x8A
    SERVER_SHUTTING_DOWN = 0x8B
    BAD_AUTHENTICATION_METHOD = 0x8C
    KEEP_ALIVE_TIMEOUT = 0x8D
    SESSION_TAKEN_OVER = 0x8E
    TOPIC_FILTER_INVALID = 0x8F
    TOPIC_NAME_INVALID = 0x90
    PACKET_IDENTIFIER_IN_USE = 0x91
    PACKET_IDENTIFIER_NOT_FOUND = 0x92
    RECEIVE_MAXIMUM_EXCEEDED = 0x93
    TOPIC_ALIAS_INVALID = 0x94
    PACKET_TOO_LARGE = 0x95
    MESSAGE_RATE_TOO_HIGH = 0x96
    QUOTA_EXCEEDED = 0x97
    ADMINISTRATIVE_ACTION = 0x98
    PAYLOAD_FORMAT_INVALID = 0x99
    RETAIN_NOT_SUPPORTED = 0x9A
    QOS_NOT_SUPPORTED = 0x9B
    USE_ANOTHER_SERVER = 0x9C
    SERVER_MOVED = 0x9D
    SHARED_SUBSCRIPTIONS_NOT_SUPPORTED = 0x9E
    CONNECTION_RATE_EXCEEDED = 0x9F
    MAXIMUM_CONNECT_TIME = 0xA0
    SUBSCRIPTION_IDENTIFIERS_NOT_SUPPORTED = 0xA1
    WILDCARD_SUBSCRIPTIONS_NOT_SUPPORTED = 0xA2


class PacketError(Exception):
    """A packet violates the standard or a limit, so that the connection must be closed (MQTT 5, section 4.13).

    reason:  the reason code for the DISCONNECT, or for the CONNACK if the packet was a CONNECT.
    text:    the reason string, which may be sent to the client, and contains no secrets.
    version: for a CONNECT, the version in which a CONNACK can be sent, 4 or 5; 0 if the connection must be closed
             without a CONNACK (as for a malformed CONNECT of MQTT 3.1.1 [MQTT-3.1.4-1]).
    """

    def __init__(self, reason: ReasonCode, text: str, version: int = 0) -> None:
        super().__init__(text)
        self.reason = reason
        self.text = text
        self.version = version


_OUTCOMES = frozenset((0x00, 0x10, 0x80, 0x83, 0x87, 0x90, 0x91, 0x97, 0x99))
_RELEASES = frozenset((0x00, 0x92))

ACK_REASONS = {4: _OUTCOMES, 5: _OUTCOMES, 6: _RELEASES, 7: _RELEASES}
"""The reason codes of PUBACK, PUBREC, PUBREL and PUBCOMP, by packet type."""

CONNACK_REASONS = frozenset((0x00, *range(0x80, 0x8B), 0x8C, 0x90, 0x95, 0x97, *range(0x99, 0x9E), 0x9F))
SUBACK_REASONS = frozenset((0x00, 0x01, 0x02, 0x80, 0x83, 0x87, 0x8F, 0x91, 0x97, 0x9E, 0xA1, 0xA2))
UNSUBACK_REASONS = frozenset((0x00, 0x11, 0x80, 0x83, 0x87, 0x8F, 0x91))
CLIENT_AUTH_REASONS = frozenset((0x18, 0x19))

CLIENT_DISCONNECT_REASONS = frozenset((0x00, 0x04, *range(0x80, 0x84), 0x90, *range(0x93, 0x9A)))
SERVER_DISCONNECT_REASONS = frozenset(
    (0x00, *range(0x80, 0x84), 0x87, 0x89, 0x8B, *range(0x8D, 0x91), *range(0x93, 0xA3))
)


def permitted(reason: int, reasons: frozenset[int]) -> int:
    """Return ``reason`` if it is one of ``reasons``, else `ReasonCode.UNSPECIFIED_ERROR`."""
    return reason if reason in reasons else ReasonCode.UNSPECIFIED_ERROR


_ERRORS: tuple[tuple[type[TopicstoreError], ReasonCode], ...] = (
    (ts.SessionTakenOverError, ReasonCode.SESSION_TAKEN_OVER),
    (ts.SessionEndedError, ReasonCode.UNSPECIFIED_ERROR),
    (ts.InvalidFilterError, ReasonCode.TOPIC_FILTER_INVALID),
    (ts.InvalidTopicError, ReasonCode.TOPIC_NAME_INVALID),
    (ts.MessageTooLargeError, ReasonCode.PACKET_TOO_LARGE),
    (ts.QuotaExceededError, ReasonCode.QUOTA_EXCEEDED),
    (ts.StorageFullError, ReasonCode.QUOTA_EXCEEDED),
    (ts.ShardReadOnlyError, ReasonCode.QUOTA_EXCEEDED),  # a full disk is its usual cause
    (ts.DatabaseClosedError, ReasonCode.SERVER_SHUTTING_DOWN),
    (ts.TooManyOpenFilesError, ReasonCode.SERVER_BUSY),
    (ts.ShardElsewhereError, ReasonCode.USE_ANOTHER_SERVER),
    (ts.ShardMovedError, ReasonCode.USE_ANOTHER_SERVER),
    (ts.ClusterNotReadyError, ReasonCode.SERVER_BUSY),
    (StorageUnavailableError, ReasonCode.SERVER_BUSY),
    (ts.InvalidArgumentError, ReasonCode.IMPLEMENTATION_SPECIFIC_ERROR),
)
_PASSING = (ts.ShardElsewhereError, ts.ShardMovedError, ts.ClusterNotReadyError, StorageUnavailableError)
"""Errors of a site of a cluster after which the client connects again, and repeats unacknowledged packets."""
_TELLING = (ts.SessionEndedError, ts.InvalidArgumentError, ts.QuotaExceededError, ts.DatabaseClosedError)
"""Errors whose texts concern the client's request. Other texts may name files of the server, which clients must not
see."""
_ENDS = {
    Ended.TAKEN_OVER: ReasonCode.SESSION_TAKEN_OVER,
    Ended.KICKED: ReasonCode.ADMINISTRATIVE_ACTION,
    Ended.EXPIRED: ReasonCode.ADMINISTRATIVE_ACTION,
    Ended.KEEP_ALIVE: ReasonCode.KEEP_ALIVE_TIMEOUT,
    Ended.CLOSED: ReasonCode.SERVER_SHUTTING_DOWN,
    Ended.MOVED: ReasonCode.USE_ANOTHER_SERVER,
    Ended.UNCERTAIN: ReasonCode.SERVER_BUSY,
}


def reason_of(error: TopicstoreError) -> ReasonCode:
    """Return the reason code for an error of the store."""
    for kind, reason in _ERRORS:
        if isinstance(error, kind):
            return reason
    return ReasonCode.UNSPECIFIED_ERROR


def is_passing(error: TopicstoreError) -> bool:
    """Return whether the client must send its request again, here or to another site of the cluster.

    A reason code in an acknowledgement would end the request instead.
    """
    return isinstance(error, _PASSING)


def text_of(error: TopicstoreError) -> str:
    """Return the reason string for a client about an error of the store."""
    if isinstance(error, _TELLING):
        return str(error)
    if isinstance(error, (ts.StorageFullError, ts.ShardReadOnlyError)):
        return "nothing can be stored at the moment"
    if is_passing(error):
        return "the session is moving to another server, or has moved"
    return "the store has failed; the server's log says why"


def reason_of_message(error: TopicstoreError, topic: str) -> ReasonCode:
    """Return the reason code for an error of one message; an invalid ``topic`` has a reason code of its own."""
    if isinstance(error, ts.InvalidMessageError) and not isinstance(error, ts.MessageTooLargeError):
        try:
            check_topic(topic)
        except ts.InvalidTopicError:
            return ReasonCode.TOPIC_NAME_INVALID
    return reason_of(error)


def reason_of_end(why: Ended) -> ReasonCode:
    """Return the reason code for a client whose session was ended."""
    return _ENDS.get(why, ReasonCode.UNSPECIFIED_ERROR)


def sendable(text: str) -> str:
    """Shorten a text to a valid reason string of at most 200 characters."""
    return text[:200].replace("\0", "")
