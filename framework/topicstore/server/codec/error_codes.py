"""The reason codes and reason strings of MQTT 5 for errors of the store and for ended sessions."""

from __future__ import annotations

import topicstore as ts
from topicstore.contract.errors import TopicstoreError
from topicstore.contract.log_store import StorageUnavailableError
from topicstore.contract.topics import check_topic
from topicstore.sessions import Ended

from .reason import ReasonCode

__all__ = ["is_passing", "reason_of", "reason_of_end", "reason_of_message", "sendable", "text_of"]

_ERRORS: tuple[tuple[type[TopicstoreError], ReasonCode], ...] = (
    (ts.SessionTakenOverError, ReasonCode.SESSION_TAKEN_OVER),
    (ts.SessionEndedError, ReasonCode.UNSPECIFIED_ERROR),
    (ts.InvalidFilterError, ReasonCode.TOPIC_FILTER_INVALID),
    (ts.InvalidTopicError, ReasonCode.TOPIC_NAME_INVALID),
    (ts.MessageTooLargeError, ReasonCode.PACKET_TOO_LARGE),
    (ts.QuotaExceededError, ReasonCode.QUOTA_EXCEEDED),
    (ts.StorageFullError, ReasonCode.QUOTA_EXCEEDED),
    (ts.ShardReadOnlyError, ReasonCode.QUOTA_EXCEEDED),  # as after a full disk
    (ts.DatabaseClosedError, ReasonCode.SERVER_SHUTTING_DOWN),
    (ts.TooManyOpenFilesError, ReasonCode.SERVER_BUSY),
    (ts.ShardElsewhereError, ReasonCode.USE_ANOTHER_SERVER),
    (ts.ShardMovedError, ReasonCode.USE_ANOTHER_SERVER),
    (ts.ClusterNotReadyError, ReasonCode.SERVER_BUSY),
    (StorageUnavailableError, ReasonCode.SERVER_BUSY),
    (ts.InvalidArgumentError, ReasonCode.IMPLEMENTATION_SPECIFIC_ERROR),
)
_PASSING = (ts.ShardElsewhereError, ts.ShardMovedError, ts.ClusterNotReadyError, StorageUnavailableError)
"""Errors of a site of a cluster after which the client connects again, and sends again what was not acknowledged."""
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
    """Return the reason code for an error of one message; if the message is invalid, the topic is checked again."""
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
