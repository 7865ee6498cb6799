"""Tests of the documented limits of messages (sizes, counts, times, positions), and of names that are nearly equal."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from topicstore import Message, Properties
from topicstore.contract.engine import Engine
from topicstore.contract.model import MAX_PAYLOAD
from topicstore.contract.positions import MAX_TIME
from topicstore.contract.topics import MAX_TOPIC_BYTES

from topicstore_conformance.conditions.tries import MODE, full, tries
from topicstore_conformance.oracle.limits import COLLIDING, MEGABYTE, TIMES, counts, sizes, unlike
from topicstore_conformance.subjects.subject import LayoutSubject

from .fixtures import Fixtures, Stored, numbered

__all__ = ["Limits"]

BASES = (0, (1 << 31) - 20, (1 << 32) - 20, (1 << 53) - 20, (1 << 63) - 20, (MAX_TIME << 11) - (1 << 20))
"""Positions before the first message, near the ends of widths and near the last one that a message may have."""


def compacted(stored: Stored, *filters: str) -> None:
    """Compare all messages, and those of some filters, with the list: as stored, reopened, and compacted twice."""
    for change in (lambda: None, stored.reopen, stored.compact, stored.reopen, stored.compact):
        change()
        stored.check_all()
        for text in filters:
            stored.check(text)


class Limits(Fixtures):
    """Tests of messages at the documented limits and at those of integers of 1, 2, 4 and 8 bytes, compacted or not."""

    def test_payloads_of_every_size(self, stored: Stored) -> None:
        """A payload of any size, also near limits of integers and buffers, is read back whole, alone or with others."""
        some = sizes(MEGABYTE + 1)
        stored.put([Message(f"t/{size % 3}", unlike(size, at), "c") for at, size in enumerate(some)])
        for at, size in enumerate(some[::2]):
            stored.put([Message("u", unlike(size, at), "c"), Message("v", b"", "c")])
        compacted(stored, "t/1", "u")
        stored.check("#", limit_bytes=1)

    def test_one_payload_of_many_sizes(self, stored: Stored) -> None:
        """A message of a batch with payloads of many sizes is read whole by its own topic, whether small or large."""
        some = sizes(65_537)
        filler = [Message("filler", b"%d" % number, "c") for number in range(4 * len(some))]
        stored.put([*filler, *(Message(f"t/{size}", unlike(size, at), "c") for at, size in enumerate(some)), *filler])
        compacted(stored, *(f"t/{size}" for size in some if size in (0, 255, 256, 32_768, 65_535, 65_536, 65_537)))

    def test_a_payload_past_every_buffer(self, stored: Stored) -> None:
        """A payload of more than 16 MB is read back whole, together with small ones, before and after compaction."""
        self._large(stored, 16 * MEGABYTE + 1)

    @full
    @pytest.mark.parametrize("size", [*sizes(64 * MEGABYTE + 1, 16 * MEGABYTE), MAX_PAYLOAD])
    def test_the_largest_payloads(self, stored: Stored, size: int) -> None:
        """A payload of up to 256 MB is read back whole, together with small ones, before and after compaction."""
        self._large(stored, size)

    @staticmethod
    def _large(stored: Stored, size: int) -> None:
        near = Message("t", b"near", "c")
        stored.put([near, Message("t", unlike(size, 3), "c"), near])
        stored.put([Message("t", unlike(1_000), "c")] * 3)
        stored.check("t")
        stored.compact()
        stored.check("t", limit=1)
        assert stored.verify() == (6, [])

    def test_texts_of_every_size(self, stored: Stored) -> None:
        """Topics, client ids and strings in properties, of any size up to 65,535 bytes, are read back unchanged."""
        lengths = (
            sizes(MAX_TOPIC_BYTES, 1) if MODE != "quick" else [1, 127, 128, 255, 256, 257, 1_000, 4_097, 32_768, 65_535]
        )
        for length in lengths:
            text = ("x" * (length - 1) + "y")[:length]
            other = ("x" * (length - 1) + "z")[:length]
            stored.put([Message(text, b"1", text), Message(other, b"2", other), Message("t", b"3", text)])
            properties = Properties(0, 1, text, other, text.encode(), ((text, other), (other, ""), ("", text)))
            stored.put([Message("p", b"4", "c", properties=properties), Message("p", b"5", other)])
        compacted(stored, "p", "t", "x" * 254 + "y", "x" * 65_534 + "z")

    def test_any_number_of_user_properties(self, stored: Stored) -> None:
        """A message may have any number of user properties, also equal ones, whose order is kept."""
        for count in counts(1_001):
            repeated = (("a", "1"), ("b", ""), ("a", "1"), ("", "2"), ("a", "2"))
            properties = Properties(user_properties=tuple(repeated[n % 5] for n in range(count)))
            stored.put([Message("p", b"%d" % count, "c", properties=properties), Message("q", b"", "c")])
        compacted(stored, "p")

    # --- counts ---

    def test_batches_of_every_count(self, fresh: Callable[[], Stored], subject: LayoutSubject) -> None:
        """A batch of any number of messages is stored and counted whole, of one topic or of several."""
        stored = fresh()
        for count in counts(tries(1_025, 10_001, subject.backend_capabilities), 1):
            if MODE == "quick" and count not in (1, 2, 3, 15, 16, 17, 255, 256, 257, 1_000, 1_001, 1_025):
                continue
            for topics in (["one"], ["f/x/1", "f/x/2", "f/y/1", "g"]):
                rows = stored.put(numbered(topics, count), 1 + count % 3)
                stored.check("#", first=rows[0][0])
                stored.check("f/+/1", first=rows[-1][0])
        compacted(stored, "one", "f/x/2")

    def test_more_rows_than_two_bytes_count(self, fresh: Callable[[], Stored], subject: LayoutSubject) -> None:
        """More than 65,535 equal messages are kept and counted, merged or not."""
        count = tries(65_537, 140_000, subject.backend_capabilities)
        stored = fresh()
        stored.put([Message("same", b"same", "same", timestamp=7)] * count)
        stored.put([Message("same", b"same", "same", timestamp=7), Message("other", b"same", "same", timestamp=7)])
        stored.check("other")
        stored.compact()
        stored.check("same")
        assert stored.verify() == (count + 2, [])

    def test_many_runs_are_merged(self, fresh: Callable[[], Stored], subject: LayoutSubject) -> None:
        """Compaction, in one round or several, keeps every message of any number of batches, also of equal batches."""
        for every, equal in ((1_000_000, False), (1_000_000, True), (50, False)):
            stored, most = fresh(), tries(257, 1_025, subject.backend_capabilities)
            for number in range(most):
                text = b"same" if equal else b"%d" % number
                stored.put([Message("a", text, "c", timestamp=9), Message(f"b/{number % 5}", text, "d", timestamp=9)])
                if number + 1 in (2, 3, 16, 17, 64, 65, 255, 256) or number % every == every - 1:
                    stored.compact(whole=number % 3 == 0)
                    assert len(stored.rows) == stored.verify()[0], f"{number + 1} batches"
            stored.compact()
            stored.check_all()
            stored.check("b/3")

    def test_more_names_than_any_cache_holds(self, fresh: Callable[[], Stored], subject: LayoutSubject) -> None:
        """Any number of topics and client ids stay distinct and are found, however long ago they were used."""
        count = tries(10_100, 70_000, subject.backend_capabilities)
        stored = fresh()
        stored.put([Message(f"f/{n % 7}/{n}", b"%d" % n, f"client {n}") for n in range(count)])
        some = [0, 1, 255, 256, 257, 999, 1_000, 1_024, count // 2, count - 1]
        for _ in range(2):
            stored.put([Message(f"f/{n % 7}/{n}", b"again", f"client {count - n}") for n in some])
            for n in some:
                stored.check(f"f/+/{n}")
            stored.reopen()
        stored.compact()
        stored.check_all()
        for n in some:
            stored.check(f"f/{n % 7}/{n}")

    # --- times and positions ---

    def test_times_at_their_limits(self, stored: Stored) -> None:
        """Timestamps from 0 to the last one that a message may have are read back, in any order within a batch."""

        def rows(times: tuple[int, ...]) -> list[Message]:
            return [Message(f"t/{n % 3}", b"%d" % n, "c", timestamp=time) for n, time in enumerate(times)]

        for times in (
            TIMES,
            TIMES[::-1],
            (0, MAX_TIME, 0),
            (MAX_TIME, 1),
            (1, MAX_TIME),
            (1, MAX_TIME, 1),
            (5,) * 9,
            (MAX_TIME,),
        ):
            stored.put(rows(times))
        compacted(stored, "t/1", "t/+")

    @pytest.mark.parametrize("base", BASES)
    def test_positions_at_their_limits(self, subject: LayoutSubject, engine: Engine, base: int) -> None:
        """Positions near the limits of integers, with any gaps between them, are kept, bound reads, and are deleted."""
        stored = Stored(subject, engine, last=base)
        stored.create()
        for gap in (1, 3, 1, 1 << 10, 1):
            stored.put([Message(f"t/{n % 3}", b"%d" % n, "c", timestamp=1) for n in range(12)], gap)
        if base < 1 << 63:
            stored.put([Message(f"t/{n % 3}", b"far", "c", timestamp=1) for n in range(5)], (1 << 32) + 1)
            stored.put([Message("t/1", b"farther", "c", timestamp=1)] * 2, 1 << 53)
        for _ in range(2):
            stored.check_all()
            for position, _ in stored.rows[::7]:
                stored.check("t/1", position)
                stored.check("#", 0, position)
                stored.check("#", position, position)
            stored.compact()
        stored.delete("t/+", stored.rows[13][0], stored.rows[-2][0])
        stored.reopen()
        stored.check_all()

    @pytest.mark.parametrize("shard", [0, 1, 255, 256, 65_535])
    def test_any_number_of_the_shard(self, subject: LayoutSubject, engine: Engine, shard: int) -> None:
        """A slab's messages have its shard's number, whatever it is, before and after reopening and compaction."""
        stored = Stored(subject, engine, shard=shard)
        stored.create()
        stored.put(numbered(["a", "b/c"], 20))
        compacted(stored, "b/+")

    # --- identity ---

    def test_names_with_equal_hashes_stay_apart(self, stored: Stored) -> None:
        """Topics, levels and client ids with equal hashes, or with nearly equal texts, are distinguished."""
        near = [
            *COLLIDING,
            ("é", "e\u0301"),
            ("K", "\u212a"),
            ("k", "k "),
            ("a", "A"),
            ("x", "x\ufeff"),
            ("ß", "ss"),
            ("1", "01"),
        ]
        for turn in range(3):
            for number, (one, other) in enumerate(near):
                for name, unlike_ in ((one, other), (other, one)):
                    payload = f"{turn} {name}".encode()
                    topics = (name, f"t/{name}", f"{name}/t", f"t/{name}/t", f"{name}/{unlike_}")
                    stored.put([Message(topic, payload, name if number % 2 else unlike_) for topic in topics])
            if turn == 1:
                stored.compact()
        for _ in range(2):
            stored.check_all()
            for two in near:
                for name in two:
                    for text in (name, f"t/{name}", f"{name}/+", f"+/{name}/#", f"{name}/#"):
                        stored.check(text)
            stored.reopen()
            stored.compact()

    def test_payloads_and_fields_are_byte_for_byte(self, stored: Stored) -> None:
        """Empty, equal and unusual payloads, and fields that are empty or missing, are read back as they were."""
        payloads = [
            b"",
            b"\0",
            b"\xff",
            b"null",
            b"\x28\xb5\x2f\xfd\0",
            b"\x78\x9c\1",
            b"\x1f\x8b\x08",
            b"same",
            b"same",
        ]
        fields = [None, Properties(), Properties(0), Properties(content_type=""), Properties(correlation_data=b"")]
        fields += [Properties(user_properties=(("", ""),)), Properties(1, 0), Properties(response_topic="a/b")]
        for turn in range(2):
            for properties in fields:
                stored.put(
                    [
                        Message("t", payload, "" if n % 2 else "c", n % 3, n % 2 == 0, 5, properties)
                        for n, payload in enumerate(payloads)
                    ]
                )
            if not turn:
                stored.compact()
        compacted(stored, "t")
