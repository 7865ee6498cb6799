"""Tests that every way of reading undoes a transform exactly once."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import topicstore as ts
from topicstore import Message

from topicstore_conformance.faults.threads import PATIENCE
from topicstore_conformance.plugins.fixtures import Fixtures, Probe, cursor_over

__all__ = ["Reading"]

PAYLOADS = [b"", b"a", b"ab", b"\0", b"\1" + b"\xff" * 300]
Way = Callable[[ts.Database], list[bytes]]


def _cursors(db: ts.Database) -> list[bytes]:
    list(db.replay("#"))  # ends the epoch, if the layout has epochs
    found = list[bytes]()
    for stream in db.streams("t"):
        cursor, ended = db.cursor(stream, "t"), False
        while not ended:
            result = db.read(cursor, 2)
            found += [message.payload for message in result.batch.to_messages()]
            cursor, ended = result.cursor, result.caught_up or result.end_of_stream
    return found


def _arrow(db: ts.Database) -> list[bytes]:
    return [payload for batch in db.replay_arrow("t") for payload in batch.column("payload").to_pylist()]


def _arrow_alone(db: ts.Database) -> list[bytes]:
    found = db.replay_arrow("t", columns=["payload"])
    return [payload for batch in found for payload in batch.column("payload").to_pylist()]


def _sql(db: ts.Database) -> list[bytes]:
    pytest.importorskip("duckdb", reason='needs duckdb: pip install "topicstore[duckdb]"')
    table = db.sql("SELECT payload FROM messages WHERE topic = 't' ORDER BY position")
    return [bytes(payload) for payload in table["payload"].to_pylist()]


def _from_disk(db: ts.Database) -> list[bytes]:
    with db.subscribe("t", 0) as subscription:
        return _fetched(subscription)


def _fetched(subscription: ts.Subscription) -> list[bytes]:
    found: list[bytes] = []
    while len(found) < len(PAYLOADS):
        batch = subscription.fetch(timeout=PATIENCE)
        assert batch.messages
        found += [message.payload for message in batch.messages]
    return found


WAYS: dict[str, Way] = {
    "replay": lambda db: [message.payload for message in db.replay("t")],
    "in order of time": lambda db: [message.payload for message in db.replay("t", order="time")],
    "in order of timestamps": lambda db: [message.payload for message in db.replay("t", order="timestamp")],
    "in reverse": lambda db: [message.payload for message in db.replay("t", reverse=True)][::-1],
    "one by one": lambda db: [message.payload for message in db.replay("t", batch_size=1)],
    "limited": lambda db: [message.payload for message in db.replay("t", limit=len(PAYLOADS))],
    "as Arrow": _arrow,
    "as Arrow, without other columns": _arrow_alone,
    "by SQL": _sql,
    "with a cursor": _cursors,
    "with a subscription": _from_disk,
}


class Reading(Fixtures):
    """Tests that every way of reading undoes a transform exactly once."""

    @pytest.mark.parametrize("how", WAYS)
    def test_each_way_of_reading(self, db: ts.Database, how: str) -> None:
        """Each way of reading undoes the plugins exactly once, and returns the payloads that were stored."""
        db.store([Message("t", payload, "c") for payload in PAYLOADS])
        assert PAYLOADS == WAYS[how](db)

    @pytest.mark.parametrize("how", WAYS)
    def test_reading_again(self, db: ts.Database, how: str) -> None:
        """Reading the same messages again, after a read of another kind, returns the same payloads."""
        db.store([Message("t", payload, "c") for payload in PAYLOADS])
        first = WAYS[how](db)
        list(db.replay("#"))
        assert first == WAYS[how](db) == PAYLOADS

    def test_subscriptions(self, db: ts.Database) -> None:
        """Followers of equal and different filters receive new messages as they were stored, also from a cache."""
        filters = ("t", "#", "+", "#")
        subscriptions = [db.subscribe(text) for text in filters]
        db.store([Message("t", payload, "c") for payload in PAYLOADS])
        for subscription in subscriptions:
            with subscription:
                assert PAYLOADS == _fetched(subscription)

    def test_other_pieces(self, db: ts.Database) -> None:
        """Messages that were stored one by one can be read in one batch, and those of one batch one by one."""
        with db.writer(max_items=1) as writer:
            for payload in PAYLOADS:
                writer.put(Message("single", payload, "c"))
        db.store([Message("batch", payload, "c") for payload in PAYLOADS])
        assert PAYLOADS == [message.payload for message in db.replay("single", batch_size=100)]
        assert PAYLOADS == [message.payload for message in db.replay("batch", batch_size=1)]
        assert PAYLOADS == [m.payload for m in db.replay("single", reverse=True, batch_size=2)][::-1]

    def test_empty_reads(self, probed: ts.Database, probe: Probe) -> None:
        """A read that finds no messages returns an empty batch, and a cursor from which reading continues."""
        probed.store([Message("t", b"1", "c")])
        result = probed.read(cursor_over(probed, "t", "c"))
        again = probed.read(result.cursor)
        assert (1, 0) == (len(result.batch), len(again.batch))
        assert 2 <= len(probe.results)
        probed.store([Message("t", b"2", "c")])
        list(probed.replay("#"))  # ends the epoch, if the layout has epochs
        assert [b"2"] == [message.payload for message in probed.read(again.cursor).batch.to_messages()]
        assert [] == list(probed.replay("nothing"))

    def test_empty_reads_are_not_the_end(self, db: ts.Database) -> None:
        """A read that finds no message before its timeout doesn't report the end: later reads find all matches."""
        for number in range(40):
            last = number == 39
            db.store([Message("t/a" if last else f"t/b/{n}", b"%d" % number, "c") for n in range(1 if last else 50)])
        list(db.replay("#"))  # ends the epoch, if the layout has epochs
        found = list[bytes]()
        for stream in db.streams("t/a"):
            cursor, ended = db.cursor(stream, "t/a"), False
            while not ended:
                result = db.read(cursor, timeout=0)
                found += [message.payload for message in result.batch.to_messages()]
                cursor, ended = result.cursor, result.caught_up or result.end_of_stream
        assert [b"39"] == found

    def test_filters_deletes_and_counts(self, db: ts.Database) -> None:
        """Filters, deletes, counts of topics and clients, and `verify` find the same messages as without plugins."""
        db.store([Message(f"t/{number % 2}", b"%d" % number, f"c{number % 3}") for number in range(12)])
        assert {b"%d" % number for number in range(1, 12, 2)} == {m.payload for m in db.replay("+/1")}
        assert [("t/0", 6), ("t/1", 6)] == sorted((tally.topic, tally.messages) for tally in db.topics())
        assert [4, 4, 4] == [tally.messages for tally in db.clients()]
        assert [True, True] == [int(message.payload) in range(12) for message in db.latest()]
        assert 6 == db.delete("t/0")
        assert {b"%d" % number for number in range(1, 12, 2)} == {m.payload for m in db.replay("#")}
        assert (6, []) == ((report := db.verify()).messages, report.damages)
