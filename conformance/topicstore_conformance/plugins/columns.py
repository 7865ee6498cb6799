"""Tests that messages of any content come back from a database with transforms."""

from __future__ import annotations

import topicstore as ts
from hypothesis import given
from hypothesis import strategies as st
from topicstore import Message

from topicstore_conformance.conditions.profiles import COSTLY
from topicstore_conformance.conditions.tries import MODE
from topicstore_conformance.faults.clock import START
from topicstore_conformance.oracle.limits import COLLIDING
from topicstore_conformance.plugins.fixtures import Fixtures, Probe, messages, payloads_of

__all__ = ["Columns"]

LENGTHS = (1, 2, 15, 16, 17, 255, 256, 257, 4_095, 4_096, 65_535, 65_536, 1 << 20)
PAYLOADS = st.binary(max_size=40) | st.sampled_from(
    [b"", b"\0", b"a\0", b" a", b"a\n", b"\xff", b"\xef\xbb\xbfa", b"\x1f\x8b"]
)
LARGE = (*LENGTHS, 1 << 24, (1 << 24) + 1)


def payloads(db: ts.Database, topic_filter: str = "#") -> list[bytes]:
    """Return the payloads of a replay in order of time."""
    return [message.payload for message in db.replay(topic_filter, order="time")]


class Columns(Fixtures):
    """Tests that messages of any content come back."""

    def test_every_field(self, db: ts.Database) -> None:
        """A replay returns each message as it was stored, with all its fields."""
        stored = messages()
        db.store(stored)
        assert stored == sorted(db.replay("#"), key=lambda message: message.timestamp or 0)

    def test_empty_payloads(self, db: ts.Database) -> None:
        """An empty payload is read back as an empty payload, whether alone in its batch or together with others."""
        for batch in ([b""], [b"", b""], [b"a", b"", b"b"], [b"", b"a"], [b"a", b""]):
            db.store([Message("t", payload, "c") for payload in batch])
        assert [b"", b"", b"", b"a", b"", b"b", b"", b"a", b"a", b""] == payloads(db)

    def test_equal_payloads(self, db: ts.Database) -> None:
        """Messages whose payloads are all equal are read back with that payload, each as often as it was stored."""
        for number, payload in enumerate((b"", b"same", b"\0")):
            db.store([Message(f"t/{number}", payload, "c")] * 50)
            assert [payload] * 50 == payloads(db, f"t/{number}")

    def test_payloads_with_equal_hashes(self, db: ts.Database) -> None:
        """Payloads that differ in few bytes, or whose hashes are equal, are read back unchanged."""
        rows = [text.encode() for pair in COLLIDING for text in pair]
        rows += [bytes(1_000) + bytes((byte,)) for byte in range(4)]
        db.store([Message("t/together", payload, "c") for payload in rows])
        for payload in reversed(rows):
            db.store([Message("t/alone", payload, "c")])
        assert rows == payloads(db, "t/together")
        assert rows[::-1] == payloads(db, "t/alone")

    def test_payloads_of_any_length(self, db: ts.Database) -> None:
        """Payloads of every length are read back byte for byte, with each byte value at each end."""
        for length in LENGTHS if MODE == "quick" else LARGE:
            content = (bytes(range(256)) * (length // 256 + 1))[:length]
            db.store([Message("t/long", payload, "c") for payload in (content, content[::-1], b"x")])
            assert [content, content[::-1], b"x"] == payloads(db, "t/long")
            db.delete("t/long")
        db.store([Message("t/byte", bytes((byte,)) * 2, "c") for byte in range(256)])
        assert [bytes((byte,)) * 2 for byte in range(256)] == payloads(db, "t/byte")

    def test_payloads_that_are_stored_forms(self, probed: ts.Database, probe: Probe) -> None:
        """A payload that equals the stored form of another payload, or a part of it, is read back unchanged."""
        given_, expected = [b"", b"a", b"some payload"], list[bytes]()
        for _ in range(3):
            probed.store([Message("t", payload, "c") for payload in given_])
            expected += given_
            forms = payloads_of(probe.stored[-1].batch)
            given_ = [*forms, *(form[:1] for form in forms), *(form[:-1] for form in forms), *(2 * f for f in forms)]
        assert expected == payloads(probed)

    def test_any_payloads(self, db: ts.Database) -> None:
        """Any batch of payloads is read back as it was stored, whatever was stored before."""

        @COSTLY
        @given(st.lists(PAYLOADS, min_size=1, max_size=9), st.booleans())
        def check(batch: list[bytes], arrow: bool) -> None:
            rows = ts.MessageBatch.from_messages([Message("any", payload, "c") for payload in batch])
            db.store(rows.to_arrow() if arrow else rows)
            assert batch == payloads(db, "any")
            db.delete("any")

        check()

    def test_arrow(self, db: ts.Database) -> None:
        """Messages that were stored as Arrow data are read back as if they had been stored as objects."""
        stored = messages()
        db.store(ts.MessageBatch.from_messages(stored[:6]).to_arrow())
        db.store(ts.MessageBatch.from_messages(stored[6:]).to_arrow())
        assert stored == sorted(db.replay("#"), key=lambda message: message.timestamp or 0)

    def test_parts_of_arrow(self, db: ts.Database) -> None:
        """Of Arrow data that is a part of larger data, exactly the part's messages are stored."""
        whole = ts.MessageBatch.from_messages(
            [Message("t", b"%d" % number, "c", timestamp=START) for number in range(20)]
        )
        db.store(whole.to_arrow().slice(5, 10))
        db.store(whole[15:18])
        assert [b"%d" % number for number in range(5, 18)] == payloads(db)
