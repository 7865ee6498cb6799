"""Tests of messages that are kept outside the streams, and of parts of a database that deliver messages."""

from __future__ import annotations

from pathlib import Path

import topicstore as ts
from topicstore import Message
from topicstore.sessions import Publish, Session, Will

from topicstore_conformance.faults.clock import Clock
from topicstore_conformance.faults.threads import PATIENCE
from topicstore_conformance.plugins.fixtures import Fixtures, Probe, opened, payloads_of
from topicstore_conformance.subjects.pairs import Pair

__all__ = ["Kept"]

PAYLOAD = b"a payload that is kept"


def delivered(session: Session) -> list[bytes]:
    """Return the payloads of the messages that a session delivers until nothing is left."""
    found: list[bytes] = []
    while items := [item for item in session.deliver() if isinstance(item, Publish)]:
        found += [item.message.payload for item in items]
    return found


class Kept(Fixtures):
    """Tests of messages that are kept outside the streams, and of parts that deliver messages."""

    def test_retained_messages(self, db: ts.Database) -> None:
        """Retained messages are read back as they were published, whether they are also stored in a stream or not."""
        db.publish([Message("t/unstored", PAYLOAD, "c", 1, retain=True), Message("t/other", b"o", "d", retain=True)])
        db.persistence.add("s/#")
        db.publish([Message("s/stored", PAYLOAD, "c", 1, retain=True), Message("t/live", b"l", "c")])
        found = {message.topic: message.payload for message in db.retained("#")}
        assert {"t/unstored": PAYLOAD, "t/other": b"o", "s/stored": PAYLOAD} == found
        assert [PAYLOAD] == [message.payload for message in db.replay("#")]
        db.publish([Message("t/unstored", b"", retain=True)])
        assert ["s/stored", "t/other"] == [message.topic for message in db.retained("#")]

    def test_kept_messages_are_transformed(self, probed: ts.Database, probe: Probe) -> None:
        """A retained message is stored transformed if an ordinary message with the same payload is."""
        probed.store([Message("t", PAYLOAD, "c")])
        plain = payloads_of(probe.stored[-1].batch) == [PAYLOAD]
        probed.publish([Message("t", PAYLOAD, "c", retain=True)])
        kept = payloads_of(probe.stored[-1].batch)
        assert plain == (kept == [PAYLOAD])
        assert [PAYLOAD] == [message.payload for message in probed.retained("t")]

    def test_destinations_are_kept(self, probed: ts.Database, probe: Probe) -> None:
        """Each row of a batch is stored, retained or only delivered, as its publish requires."""
        probed.persistence.add("s/#")
        rows = [Message(f"{'st'[n % 2]}/{n}", b"%d" % n, f"c{n}", retain=n % 3 == 0) for n in range(12)]
        probed.publish(rows)
        assert {m.payload for m in rows if m.topic[0] == "s"} == {m.payload for m in probed.replay("#")}
        assert {m.payload for m in rows if m.retain} == {m.payload for m in probed.retained("#")}
        assert [m.topic for m in rows] == [m.topic for m in probe.stored[-1].batch.to_messages()]

    def test_wills(self, pair: Pair, directory: Path) -> None:
        """A delayed will is published with the content that the client set."""
        clock = Clock()
        with opened(pair, directory / "wills", clock=clock, monotonic=clock.monotonic) as db:
            db.persistence.add("will")
            will = Will(Message("will", PAYLOAD, "client", 1), delay=10)
            db.sessions.open("client", expiry_interval=100, will=will).lost()
            clock.now += 11_000_000
            db.sessions.tick()
            assert [PAYLOAD] == [message.payload for message in db.replay("will")]

    def test_sessions(self, db: ts.Database) -> None:
        """A durable session delivers stored, retained and repeated messages as they were published."""
        db.publish([Message("t/kept", PAYLOAD, "c", 1, retain=True)])
        session = db.sessions.open("client", expiry_interval=None)
        session.subscribe("t/#", 1)
        assert [PAYLOAD] == delivered(session)
        db.publish([Message("t/a", b"", "c", 1), Message("t/b", b"1", "c", 1)])
        assert [b"", b"1"] == delivered(session)
        session.lost()
        resumed = db.sessions.open("client", expiry_interval=None)
        assert [PAYLOAD, b"", b"1"] == delivered(resumed)

    def test_shared_subscriptions(self, db: ts.Database) -> None:
        """The members of a shared subscription together receive each message once, as it was published."""
        members = [db.sessions.open(name, expiry_interval=None) for name in ("a", "b")]
        for member in members:
            member.subscribe("$share/group/t/#", 1)
        sent = {b"%d" % number for number in range(40)}
        db.publish([Message(f"t/{payload.decode()}", payload, "c", 1) for payload in sent])
        list(db.replay("#"))  # ends the epoch, if the layout has epochs
        got = [payload for member in members for payload in delivered(member)]
        assert sent == set(got)
        assert len(sent) == len(got)

    def test_queues(self, db: ts.Database) -> None:
        """A queue of the database hands out the messages that were appended, in their order."""
        rows = [Message("t", payload, "c", timestamp=1) for payload in (b"1", b"", PAYLOAD)]
        queue = db.queues.open("queue")
        queue.append(rows)
        assert rows == queue.read().messages
        queue.rewind()
        assert rows == queue.read().messages

    def test_messages_that_are_stored_nowhere(self, probed: ts.Database, probe: Probe) -> None:
        """A message that is stored nowhere is delivered as it was published, without the plugins."""
        with probed.subscribe("t") as subscription:
            probed.publish([Message("t", PAYLOAD, "c")])
            assert [PAYLOAD] == [message.payload for message in subscription.fetch(timeout=PATIENCE).messages]
        assert [] == probe.stored

    def test_archives(self, db: ts.Database, directory: Path) -> None:
        """Messages of archived and of local generations are read back together, as they were stored."""
        db.store([Message("t", payload, "c") for payload in (b"1", b"", PAYLOAD)])
        db.add_generation()
        db.store([Message("t", b"2", "c")])
        db.archives.archive(directory / "export")
        assert [b"1", b"", PAYLOAD, b"2"] == [message.payload for message in db.replay("t")]
        assert [b"2", PAYLOAD, b"", b"1"] == [message.payload for message in db.replay("t", reverse=True)]
