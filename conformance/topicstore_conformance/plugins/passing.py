"""Tests of the rows, state, requests and errors that a transform must pass on unchanged."""

from __future__ import annotations

import msgspec
import pytest
import topicstore as ts
from topicstore import Message, StateWrite

from topicstore_conformance.faults.clock import START
from topicstore_conformance.faults.threads import together
from topicstore_conformance.plugins.fixtures import Fixtures, Probe, cursor_over, fields, messages, payloads_of

__all__ = ["Passing"]


class Passing(Fixtures):
    """Tests of the rows, state, requests and errors that a transform must pass on unchanged."""

    def test_rows_are_stored_in_order(self, probed: ts.Database, probe: Probe) -> None:
        """A batch is passed on with its rows in order, and with all fields unchanged except payloads and properties."""
        given = ts.MessageBatch.from_messages(messages(40)[::-1])
        for batch in (given, given[:1], ts.MessageBatch.from_messages([Message("t", b"same", "c", 1)] * 5)):
            probed.store(batch)
            assert fields(batch) == fields(probe.stored[-1].batch)

    def test_rows_are_read_in_order(self, probed: ts.Database, probe: Probe) -> None:
        """A read returns the layout's rows in order, its cursor, and whether the stream ended or is caught up."""
        probed.store(messages(40)[::-1])
        probed.add_generation()  # seals the first generation, so that its streams end
        for stream in (stream for stream in probed.streams("#") if stream.sealed):
            cursor, ended = probed.cursor(stream, "#"), False
            while not ended:
                result = probed.read(cursor, 2)
                fetched = probe.results[-1]
                assert fetched.batch.ids() == result.batch.ids()
                assert fields(fetched.batch) == fields(result.batch)
                assert (fetched.cursor, fetched.end_of_stream) == (result.cursor, result.end_of_stream)
                assert fetched.caught_up == result.caught_up
                cursor, ended = result.cursor, result.end_of_stream

    def test_ids_are_in_the_given_order(self, db: ts.Database) -> None:
        """A store returns one id for each given message, in the order of the messages."""
        stored = messages(40)[::-1]
        result = db.store(stored)
        list(db.replay("#"))  # ends the epoch, if the layout has epochs
        read: dict[ts.MessageId, Message] = {}
        for stream in db.streams("#"):
            batch = db.read(db.cursor(stream, "#"), 1_000).batch
            read.update(zip(batch.ids(), batch.to_messages(), strict=True))
        assert len(stored) == result.count
        assert stored == [read[id_] for id_ in result.ids]

    def test_reads_ask_for_the_same(self, probed: ts.Database, probe: Probe) -> None:
        """A read's cursor, limit and bounds reach the layout unchanged."""
        probed.store(messages())
        stream = probed.streams("#")[0]
        cursor = probed.cursor(stream, "t/#")
        probed.read(cursor, 3, until=START + (1 << 40))
        assert (cursor, 3, START + (1 << 40)) == (probe.reads[-1].cursor, probe.reads[-1].limit, probe.reads[-1].until)

    def test_state_is_stored_with_messages(self, db: ts.Database) -> None:
        """State writes are committed together with the batch, byte for byte, and also without messages."""
        value = bytes(range(256))
        db.store([Message("t", b"1", "c")], state={0: [StateWrite(b"key", value)], 1: [StateWrite(b"key", b"")]})
        assert (value, b"") == (db.state(0).get(b"key"), db.state(1).get(b"key"))
        assert (value, [b"1"]) == (db.state(0).get(b"key"), [message.payload for message in db.replay("#")])
        db.store([], state={0: [StateWrite(b"key", None)]})
        assert db.state(0).get(b"key") is None

    def test_the_caller_keeps_its_batch(self, db: ts.Database) -> None:
        """A store changes nothing in the batch, the messages or the Arrow data that it was given."""
        stored = messages()
        batch = ts.MessageBatch.from_messages(stored)
        arrow = batch.to_arrow()
        before = arrow.to_pylist()
        for given in (stored, batch, arrow):
            db.store(given)
        assert messages() == stored == batch.to_messages()
        assert before == arrow.to_pylist()

    def test_reads_leave_the_fetched_batch(self, probed: ts.Database, probe: Probe) -> None:
        """A read changes nothing in the batch that was fetched, which the database may hand to other readers."""
        probed.store([Message("t", b"%d" % number, "c") for number in range(5)])
        forms = payloads_of(probe.stored[-1].batch)
        probed.read(cursor_over(probed, "t", "c"))
        assert forms == payloads_of(probe.results[-1].batch)

    def test_errors_reach_the_caller(self, db: ts.Database) -> None:
        """An error of a store or a read reaches the caller, and no message of a refused batch is stored."""
        with pytest.raises(ts.StateConflictError):
            db.store([Message("t", b"1", "c")], state={0: [StateWrite(b"key", b"new", b"other")]})
        assert ([], None) == (list(db.replay("#")), db.state(0).get(b"key"))
        db.store([Message("t", b"2", "c")])
        assert [b"2"] == [message.payload for message in db.replay("#")]
        cursor = cursor_over(db, "t", "c")
        db.add_generation()
        db.drop_generation(1)
        with pytest.raises(ts.GenerationDroppedError):
            db.read(cursor)

    def test_threads(self, db: ts.Database) -> None:
        """Threads that store and read at the same time each read back their own payloads."""

        def work(name: str) -> list[bytes]:
            for number in range(10):
                db.store([Message(name, f"{name} {number} {row}".encode(), name) for row in range(10)])
                assert (number + 1) * 10 == len(list(db.replay(name)))
            return [message.payload for message in db.replay(name, order="time")]

        for name, found in zip("abcd", together(*(lambda name=name: work(name) for name in "abcd")), strict=True):
            assert [f"{name} {number} {row}".encode() for number in range(10) for row in range(10)] == found

    def test_copies_of_messages(self, db: ts.Database) -> None:
        """A message that was read can be stored again, and is then read back as the same message."""
        db.store(messages(6))
        for message in list(db.replay("#")):
            db.store([msgspec.structs.replace(message, topic="again")])
        found = [message.payload for message in db.replay("again", order="time")]
        assert sorted(message.payload for message in messages(6)) == sorted(found)
