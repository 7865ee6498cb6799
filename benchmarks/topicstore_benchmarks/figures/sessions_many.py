"""What a server does with many clients at once: connect them, deliver to each, take from each.

Each function returns one value a round. Sessions are connected and messages are made before the clock starts.
"""

from __future__ import annotations

import time

import topicstore as ts
from topicstore.sessions import Connect, Session, SubscribeOptions

from topicstore_benchmarks.timing import timed

from .session_clients import acknowledge, database, deliver_all, messages_of, subscribers

__all__ = ["backlog_of_many", "connecting", "fan_out_of_one", "qos2_incoming", "unicast"]

_TOGETHER = 1_000
"""How many clients connect with one call."""


def unicast(clients: int, rounds: int) -> list[float]:
    """Return deliveries a second to clients with a topic each, one message each: published, delivered, acknowledged."""
    with database() as db:
        subscribers(db, clients, lambda n: f"device/{n}/commands")
        batch = messages_of(lambda n: f"device/{n}/commands", clients)

        def serve() -> None:
            db.publish(batch)
            for session, items in deliver_all(db, clients):
                acknowledge(session, items)

        serve()
        return [clients / timed(serve) for _ in range(rounds)]


def fan_out_of_one(followers: int, rounds: int) -> list[float]:
    """Return milliseconds from the publishing of one message until the last of its followers has it."""
    with database() as db:
        subscribers(db, followers, lambda _: "hot/topic")
        one, found = messages_of(lambda _: "hot/topic", 1), []
        for _ in range(rounds + 1):
            started = time.perf_counter()
            db.publish(one)
            delivered = deliver_all(db, followers)
            found.append((time.perf_counter() - started) * 1e3)
            for session, items in delivered:
                acknowledge(session, items)
        return found[1:]


def qos2_incoming(clients: int, rounds: int) -> tuple[list[float], list[float]]:
    """Return QoS 2 messages a second until the PUBRECs may be sent, one of each client, and PUBRELs a second."""
    received, released = [], []
    with database() as db:
        db.sessions.open("archive", expiry_interval=None).subscribe("sensor/#", 1)
        publishers = [db.sessions.open(f"client-{n}", expiry_interval=None) for n in range(clients)]
        batch = [ts.Message(f"sensor/{n}", b"%0100d" % n, f"client-{n}", 2) for n in range(clients)]

        for packet_id in range(1, rounds + 2):
            packets = [(session, message, packet_id) for session, message in zip(publishers, batch, strict=True)]
            pubrels = [(session, packet_id) for session in publishers]
            received.append(clients / timed(lambda: db.sessions.publish(packets)))  # noqa: B023 - called at once
            released.append(clients / timed(lambda: db.sessions.pubrel(pubrels)))  # noqa: B023
    return received[1:], released[1:]


def connecting(clients: int, rounds: int) -> list[float]:
    """Return clients a second that open a new session and subscribe to a filter of their own, `_TOGETHER` at a time."""
    found = []
    for _ in range(rounds):
        with database() as db:
            found.append(clients / timed(lambda: _connect(db, clients)))
    return found


def _connect(db: ts.Database, clients: int) -> None:
    for first in range(0, clients, _TOGETHER):
        numbers = range(first, min(first + _TOGETHER, clients))
        connects = [Connect(client_id=f"client-{number}", expiry_interval=None) for number in numbers]
        sessions = [one for one in db.sessions.open_many(connects) if isinstance(one, Session)]
        filters = [f"device/{number}/#" for number in numbers]
        rows = [(session, text, SubscribeOptions()) for session, text in zip(sessions, filters, strict=True)]
        db.sessions.subscribe(rows)


def backlog_of_many(clients: int, rounds: int) -> list[float]:
    """Return microseconds a delivery, where one message waits for each client, and each was published by itself."""
    found = []
    for _ in range(rounds):
        with database() as db:
            subscribers(db, clients, lambda n: f"device/{n}/commands")
            for message in messages_of(lambda n: f"device/{n}/commands", clients):
                db.publish([message])
            found.append(timed(lambda: deliver_all(db, clients)) / clients * 1e6)
    return found
