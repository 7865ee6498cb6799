"""The work in the thread that uses the database: it serves many clients' requests together, with few commits."""

from __future__ import annotations

import sys
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from functools import partial

import topicstore as ts
from connection import Connection
from lines import Request
from topicstore.sessions import Connect, Ended, Publish, PubRel, Session, SubscribeOptions

RECEIVE_MAXIMUM = 100
"""The maximum number of in-flight messages of QoS 1 and 2 to a client."""
MAX_BYTES = 262_144
"""The maximum bytes of messages delivered at once; the session of a client that doesn't read them is paused."""
Rows = list[tuple]  # [(connection, "home/#", 1), …]: the requests of one verb, as connection and values


class StoreThread:
    """The object that uses the database, in one thread.

    ``opened`` is called in the event loop, as one of the answers. ``on_end`` is called in this object's thread.
    """

    def __init__(
        self,
        db: ts.Database,
        opened: Callable[[Connection, Session], None],
        on_end: Callable[[Session, Ended], None],
    ) -> None:
        self.db, self.opened, self.on_end = db, opened, on_end
        self.answers: list[Callable[[], object]] = []
        """The functions that the event loop calls after this batch, in this order."""
        self.due = 0.0
        """The monotonic time in seconds at which `tick` must be called again."""

    def serve(
        self, taken: dict[Connection, list[Request]]
    ) -> tuple[list[Callable[[], object]], list[tuple[Session, list[Publish | PubRel]]], float]:
        """Serve requests; return the answers, the deliveries, and the maximum seconds until the next batch.

        A message is answered after its commit, and delivered after the commit of its packet identifier.
        """
        self.answers = []
        asked: defaultdict[str, Rows] = defaultdict(list)
        for connection, requests in taken.items():
            for verb, *values in requests:
                known = connection.session is not None
                if verb in ("REFUSED", "LOST") or known is not (verb == "CONNECT"):
                    asked[verb].append((connection, *values))
                else:
                    self.refuse(connection, "CONNECT comes first, and once")
        for verb, rows in asked.items():
            try:
                getattr(self, verb.lower())(rows)
            except ts.TopicstoreError as failed:  # such as a full disk: nothing was changed, and clients try again
                for connection, *_ in rows:
                    self.refuse(connection, failed)
        if self.due <= time.monotonic():
            self.due = time.monotonic() + self.tick()
        delivered = self.db.sessions.deliver(max_bytes=MAX_BYTES)
        return self.answers, delivered, 0.0 if delivered else max(self.due - time.monotonic(), 0.0)

    # --- a method for each verb ---

    def connect(self, rows: Rows) -> None:
        """Open sessions, taking over open ones of the same client ids."""
        connects = [
            Connect(client_id=name, expiry_interval=expiry, keep_alive=keep_alive, receive_maximum=RECEIVE_MAXIMUM)
            for _, name, expiry, keep_alive in rows
        ]
        results = self.db.sessions.open_many(connects, on_end=self.on_end, partial=True)
        for (connection, *_), opened in zip(rows, results, strict=True):
            if isinstance(opened, Session):
                self.answers.append(partial(self.opened, connection, opened))
            else:
                self.refuse(connection, opened)

    def subscribe(self, rows: Rows) -> None:
        """Make subscriptions, or change their QoS."""
        subscriptions = [(connection.session, name, SubscribeOptions(qos)) for connection, name, qos in rows]
        results = self.db.sessions.subscribe(subscriptions, partial=True)
        for (connection, name, qos), result in zip(rows, results, strict=True):
            if isinstance(result, ts.TopicstoreError):
                self.refuse(connection, result)
            else:
                self.say(connection, b"SUBSCRIBED %d %b" % (qos, name.encode()))

    def unsubscribe(self, rows: Rows) -> None:
        """End subscriptions."""
        self.each(rows, lambda session, name: session.unsubscribe(name))
        for connection, name in rows:
            self.say(connection, b"UNSUBSCRIBED " + name.encode())

    def publish(self, rows: Rows) -> None:
        """Publish all clients' messages with one commit, which includes the packet identifiers of QoS 2."""
        messages = [
            (connection.session, ts.Message(topic, payload, connection.session.client_id, qos), packet_id)
            for connection, qos, packet_id, topic, payload in rows
        ]
        refused = self.db.sessions.publish(messages, partial=True).refused
        answers: defaultdict[Connection, list[bytes]] = defaultdict(list)
        for row, (connection, qos, packet_id, *_) in enumerate(rows):
            if qos and row not in refused:
                answers[connection].append(b"%b %d" % (b"PUBACK" if qos == 1 else b"PUBREC", packet_id))
        for connection, lines in answers.items():
            self.say(connection, *lines)
        for row, error in refused.items():
            self.refuse(rows[row][0], error.reason if isinstance(error, ts.InvalidMessageError) else error)

    def pubrel(self, rows: Rows) -> None:
        """Release packet identifiers of QoS 2 messages that clients published."""
        refused = self.db.sessions.pubrel(_by_session(rows), partial=True).refused
        for row, (connection, packet_id) in enumerate(rows):
            if row not in refused:
                self.say(connection, b"PUBCOMP %d" % packet_id)

    def puback(self, rows: Rows) -> None:
        """Record that clients received QoS 1 messages."""
        self.each(rows, Session.puback)

    def pubrec(self, rows: Rows) -> None:
        """Record that clients received QoS 2 messages; the next delivery includes the PUBRELs."""
        self.db.sessions.pubrec(_by_session(rows), partial=True)

    def pubcomp(self, rows: Rows) -> None:
        """Record that clients released packet identifiers."""
        self.each(rows, Session.pubcomp)

    def ping(self, rows: Rows) -> None:
        """Restart the keep alive timers of clients."""
        self.each(rows, Session.alive)
        for (connection,) in rows:
            self.say(connection, b"PONG")

    def disconnect(self, rows: Rows) -> None:
        """End the sessions' connections at their clients' request."""
        sessions = [connection.session for (connection,) in rows]
        self.ended(sessions, Ended.DISCONNECTED, self.db.sessions.disconnect(sessions, partial=True))

    def lost(self, rows: Rows) -> None:
        """Record lost connections, after which their sessions may be resumed."""
        sessions = [connection.session for (connection,) in rows if connection.session is not None]
        self.ended(sessions, Ended.LOST, self.db.sessions.lost(sessions, partial=True))

    def refused(self, rows: Rows) -> None:
        """Report errors in their lines to clients."""
        for connection, reason in rows:
            self.refuse(connection, reason)

    # --- shared by the verbs ---

    def each(self, rows: Rows, work: Callable[..., object]) -> None:
        """Call ``work`` for each session; an error is reported to its client, and the others are still served."""
        for connection, *values in rows:
            try:
                work(connection.session, *values)
            except ts.TopicstoreError as failed:  # such as an ended session, whose client was notified by `on_end`
                self.refuse(connection, failed)

    def say(self, connection: Connection, *lines: bytes) -> None:
        """Add an answer that sends lines."""
        self.answers.append(partial(connection.say, *lines))

    def refuse(self, connection: Connection, reason: object) -> None:
        """Add an answer that ends a connection with an error line."""
        self.answers.append(partial(connection.end, b"ERROR " + str(reason).replace("\n", " ").encode()))

    def ended(self, sessions: Sequence[Session], why: Ended, failures: Sequence[ts.TopicstoreError | None]) -> None:
        """Call `on_end` for ended sessions: the database doesn't call it for ends that this object requested."""
        for session, failed in zip(sessions, failures, strict=True):
            if failed is None:
                self.on_end(session, why)
            elif not isinstance(failed, ts.SessionEndedError):  # the client's next CONNECT takes over the session
                print(failed, file=sys.stderr)

    def tick(self) -> float:
        """Handle expiry, keep alive and checkpoints that are due; return the seconds until the next call."""
        pause = 1.0
        try:
            pause = self.db.sessions.tick()
        except* ts.TopicstoreError as failed:  # a later tick tries again, so that a full disk doesn't end the broker
            print(*failed.exceptions, sep="\n", file=sys.stderr)
        return pause


def _by_session(rows: Rows) -> list[tuple[Session, int]]:
    return [(connection.session, packet_id) for connection, packet_id in rows]
