"""Durable sessions: what a client that was away missed, in order, whatever happened in between.

A session keeps its subscriptions, one place a shard for each, and what is in flight: never copies of
messages. It speaks no network protocol: a broker opens sessions, sends what `Sessions.deliver` returns
and passes on what its clients answer. Terms and rules are those of MQTT 5 (OASIS Standard), section 4.

What a crash may cost: packet ids are committed before their messages are handed out, PUBRECs before
their PUBRELs, incoming messages of QoS 2 together with their packet ids. PUBACKs and PUBCOMPs are
committed when a whole flight was acknowledged and something else is committed, at the latest by
`Sessions.checkpoint`, which `Sessions.tick` calls every 15 seconds; at once when a session is opened,
taken over or closed. So after a crash only messages of QoS 1 without a committed PUBACK come again,
with DUP, under the same packet ids and in the same order.
"""

from __future__ import annotations

from topicstore.contract.errors import SessionEndedError, SessionNotFoundError, SessionTakenOverError

from .manager import Sessions
from .model import (
    START_PROPERTY,
    Delivery,
    Ended,
    GroupInfo,
    GroupMember,
    Release,
    SessionInfo,
    SessionStatus,
    Start,
    SubscribeOptions,
    SubscriptionStatus,
    Will,
    parse_start,
)
from .session import Session

__all__ = [
    "START_PROPERTY",
    "Delivery",
    "Ended",
    "GroupInfo",
    "GroupMember",
    "Release",
    "Session",
    "SessionEndedError",
    "SessionInfo",
    "SessionNotFoundError",
    "SessionStatus",
    "SessionTakenOverError",
    "Sessions",
    "Start",
    "SubscribeOptions",
    "SubscriptionStatus",
    "Will",
    "parse_start",
]
