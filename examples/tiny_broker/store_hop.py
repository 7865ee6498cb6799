"""What happens in the thread of the store: many clients' requests are served together, with few commits."""

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
"""How many messages of QoS 1 and 2 a client is sent before it acknowledges them."""
MAX_BYTES = 262_144
"""How many bytes of messages a client is sent at once; if it doesn't read them, its session is paused."""
Rows = list[tuple]  # [(connection, "home/#", 1), …]: who sent a line of one verb, and its values


class StoreHop:
    """Uses the database, in one thread. ``opened`` is for the event loop, ``on_end`` is called here."""

    def __init__(
        self,
        db: ts.Database,
        opened: Callable[[Connection, Session], None],
        on_end: Callable[[Session, Ended], None],
    ) -> None:
        self.db, self.opened, self.on_end = db, opened, on_end
        self.answers: list[Callable[[], object]] = []
        """What the event loop does after this hop, in this order."""
        self.due = 0.0
        """When something depends on time again."""

    def serve(
        self, taken: dict[Connection, list[Request]]
    ) -> tuple[list[Callable[[], object]], list[tuple[Session, list[Publish | PubRel]]], float]:
        """Serve requests; return what to answer, what to deliver, and in how many seconds to come again at the latest.

        An answer to a message follows its commit, and a message is delivered after its packet id was committed.
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
            except ts.TopicstoreError as failed:  # such as a full disk: nothing was done, and clients try again
                for connection, *_ in rows:
                    self.refuse(connection, failed)
        if self.due <= time.monotonic():
            self.due = time.monotonic() + self.tick()
        delivered = self.db.sessions.deliver(max_bytes=MAX_BYTES)
        return self.answers, delivered, 0.0 if delivered else max(self.due - time.monotonic(), 0.0)

    # --- a method for each verb ---

    def connect(self, rows: Rows) -> None:
        """Open sessions; those of the same clients that were open are taken over."""
        connects = [
            Connect(client_id=name, expiry_interval=expiry, keep_alive=silence, receive_maximum=RECEIVE_MAXIMUM)
            for _, name, expiry, silence in rows
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
        """Publish everybody's messages with one commit, those of QoS 2 with their packet ids."""
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
        """Free packet ids of messages of QoS 2 that were published."""
        refused = self.db.sessions.pubrel(_by_session(rows), partial=True).refused
        for row, (connection, packet_id) in enumerate(rows):
            if row not in refused:
                self.say(connection, b"PUBCOMP %d" % packet_id)

    def puback(self, rows: Rows) -> None:
        """Note that messages of QoS 1 were received."""
        self.each(rows, Session.puback)

    def pubrec(self, rows: Rows) -> None:
        """Note that messages of QoS 2 were received; the next delivery has the PUBRELs."""
        self.db.sessions.pubrec(_by_session(rows), partial=True)

    def pubcomp(self, rows: Rows) -> None:
        """Note that packet ids were released."""
        self.each(rows, Session.pubcomp)

    def ping(self, rows: Rows) -> None:
        """Note that clients are there."""
        self.each(rows, Session.alive)
        for (connection,) in rows:
            self.say(connection, b"PONG")

    def disconnect(self, rows: Rows) -> None:
        """End connections, as their clients want it."""
        sessions = [connection.session for (connection,) in rows]
        self.ended(sessions, Ended.DISCONNECTED, self.db.sessions.disconnect(sessions, partial=True))

    def lost(self, rows: Rows) -> None:
        """End connections that are gone."""
        sessions = [connection.session for (connection,) in rows if connection.session is not None]
        self.ended(sessions, Ended.LOST, self.db.sessions.lost(sessions, partial=True))

    def refused(self, rows: Rows) -> None:
        """Tell clients what was wrong with their lines."""
        for connection, reason in rows:
            self.refuse(connection, reason)

    # --- what they have in common ---

    def each(self, rows: Rows, work: Callable[..., object]) -> None:
        """Do something with each session. Who it fails for is told, and the others are served."""
        for connection, *values in rows:
            try:
                work(connection.session, *values)
            except ts.TopicstoreError as failed:  # such as an ended session, whose client `on_end` has told
                self.refuse(connection, failed)

    def say(self, connection: Connection, *lines: bytes) -> None:
        """Have lines sent."""
        self.answers.append(partial(connection.say, *lines))

    def refuse(self, connection: Connection, reason: object) -> None:
        """Have a connection ended with an error. When it is gone, its session is lost."""
        self.answers.append(partial(connection.end, b"ERROR " + str(reason).replace("\n", " ").encode()))

    def ended(self, sessions: Sequence[Session], why: Ended, failures: Sequence[ts.TopicstoreError | None]) -> None:
        """Tell about ends that `on_end` doesn't tell of, because they were asked for here."""
        for session, failed in zip(sessions, failures, strict=True):
            if failed is None:
                self.on_end(session, why)
            elif not isinstance(failed, ts.SessionEndedError):  # the client's next CONNECT takes the session over
                print(failed, file=sys.stderr)

    def tick(self) -> float:
        """Do what is due: expiry, keep-alives, checkpoints. Return in how many seconds to call again."""
        pause = 1.0
        try:
            pause = self.db.sessions.tick()
        except* ts.TopicstoreError as failed:  # a later tick tries again: a full disk must not end the broker
            print(*failed.exceptions, sep="\n", file=sys.stderr)
        return pause


def _by_session(rows: Rows) -> list[tuple[Session, int]]:
    return [(connection.session, packet_id) for connection, packet_id in rows]
