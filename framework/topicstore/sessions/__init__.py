"""Durable sessions: a client that was disconnected receives every message that it missed, in order (MQTT 5, section 4).

A session keeps its subscriptions, one place in each shard for each of them, and the packet ids and positions of
messages in flight. It keeps no copies of messages, except of retained messages in flight, which may be replaced before
they are sent again. The package implements no network protocol: a broker opens sessions, sends the packets that
`Sessions.deliver` returns and passes on its clients' acknowledgements. Terms and rules are those of MQTT 5 (OASIS
Standard), section 4: session state is section 4.1, the QoS exchanges 4.3, resending 4.4, message ordering 4.6.

Effects of a crash: packet ids are committed before their messages are handed out, PUBRECs before their PUBRELs, and
incoming messages of QoS 2 together with their packet ids. Messages whose packet ids are committed together form an
in-flight batch. PUBACKs and PUBCOMPs are committed with the next write after a whole in-flight batch was acknowledged,
at the latest by `Sessions.checkpoint`, which `Sessions.tick` calls every 15 seconds. When a session is opened, taken
over or closed, they are committed immediately. So after a crash only messages of QoS 1 without a committed PUBACK are
delivered again, with DUP, under the same packet ids and in the same order.

In a cluster, a session is open only on the site that owns its shard, and its commits go through the shard's log. So a
site that has lost the shard can't hand out a packet with a packet id. The new owner continues from the committed state.
"""

from __future__ import annotations

from topicstore.contract.errors import SessionEndedError, SessionNotFoundError, SessionTakenOverError

from .connect import Connect
from .delivery_batch import DeliveryBatch
from .model import (
    OVER,
    START_PROPERTY,
    Acknowledged,
    Ended,
    GroupInfo,
    GroupMember,
    Overlapping,
    Publish,
    PublishedRows,
    PubRel,
    SessionCounts,
    SessionInfo,
    SessionStatus,
    SessionSubscription,
    Skipped,
    Start,
    SubscribeOptions,
    SubscribeResult,
    Will,
)
from .session import Session
from .sessions import Sessions
from .shared.groups import SharedSubscriptions

__all__ = [
    "OVER",
    "START_PROPERTY",
    "Acknowledged",
    "Connect",
    "DeliveryBatch",
    "Ended",
    "GroupInfo",
    "GroupMember",
    "Overlapping",
    "PubRel",
    "Publish",
    "PublishedRows",
    "Session",
    "SessionCounts",
    "SessionEndedError",
    "SessionInfo",
    "SessionNotFoundError",
    "SessionStatus",
    "SessionSubscription",
    "SessionTakenOverError",
    "Sessions",
    "SharedSubscriptions",
    "Skipped",
    "Start",
    "SubscribeOptions",
    "SubscribeResult",
    "Will",
]
