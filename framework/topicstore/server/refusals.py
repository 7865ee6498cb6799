"""Which reason code of MQTT 5 says what the store's errors say, and how a session's end is told."""

from __future__ import annotations

import topicstore as ts
from topicstore.contract.errors import TopicstoreError
from topicstore.contract.topics import check_topic
from topicstore.sessions import Ended

from .protocol.reason import ReasonCode

__all__ = ["reason_of", "reason_of_end", "reason_of_message", "sendable", "text_of"]

_ERRORS: tuple[tuple[type[TopicstoreError], ReasonCode], ...] = (
    (ts.SessionTakenOverError, ReasonCode.SESSION_TAKEN_OVER),
    (ts.SessionEndedError, ReasonCode.UNSPECIFIED_ERROR),
    (ts.InvalidFilterError, ReasonCode.TOPIC_FILTER_INVALID),
    (ts.InvalidTopicError, ReasonCode.TOPIC_NAME_INVALID),
    (ts.MessageTooLargeError, ReasonCode.PACKET_TOO_LARGE),
    (ts.QuotaExceededError, ReasonCode.QUOTA_EXCEEDED),
    (ts.StorageFullError, ReasonCode.QUOTA_EXCEEDED),
    (ts.ShardReadOnlyError, ReasonCode.QUOTA_EXCEEDED),  # what a full disk leaves behind
    (ts.DatabaseClosedError, ReasonCode.SERVER_SHUTTING_DOWN),
    (ts.TooManyOpenFilesError, ReasonCode.SERVER_BUSY),
    (ts.InvalidArgumentError, ReasonCode.IMPLEMENTATION_SPECIFIC_ERROR),
)
_TELLING = (ts.SessionEndedError, ts.InvalidArgumentError, ts.QuotaExceededError, ts.DatabaseClosedError)
"""Errors whose texts are of what the client asked for. The others are of the server's machine, and name its files."""
_ENDS = {
    Ended.TAKEN_OVER: ReasonCode.SESSION_TAKEN_OVER,
    Ended.KICKED: ReasonCode.ADMINISTRATIVE_ACTION,
    Ended.EXPIRED: ReasonCode.ADMINISTRATIVE_ACTION,
    Ended.KEEP_ALIVE: ReasonCode.KEEP_ALIVE_TIMEOUT,
    Ended.CLOSED: ReasonCode.SERVER_SHUTTING_DOWN,
}


def reason_of(error: TopicstoreError) -> ReasonCode:
    """Return the reason code for an error of the store."""
    for kind, reason in _ERRORS:
        if isinstance(error, kind):
            return reason
    return ReasonCode.UNSPECIFIED_ERROR


def text_of(error: TopicstoreError) -> str:
    """Return what may be said to a client of an error of the store."""
    if isinstance(error, _TELLING):
        return str(error)
    if isinstance(error, (ts.StorageFullError, ts.ShardReadOnlyError)):
        return "nothing can be stored at the moment"
    return "the store has failed; the server's log says why"


def reason_of_message(error: TopicstoreError, topic: str) -> ReasonCode:
    """Return the reason code for an error of one message, which doesn't say whether its topic is what was wrong."""
    if isinstance(error, ts.InvalidMessageError) and not isinstance(error, ts.MessageTooLargeError):
        try:
            check_topic(topic)
        except ts.InvalidTopicError:
            return ReasonCode.TOPIC_NAME_INVALID
    return reason_of(error)


def reason_of_end(why: Ended) -> ReasonCode:
    """Return the reason code with which a client is told that its session was ended."""
    return _ENDS.get(why, ReasonCode.UNSPECIFIED_ERROR)


def sendable(text: str) -> str:
    """Return a reason string that fits into any packet."""
    return text[:200].replace("\0", "")
