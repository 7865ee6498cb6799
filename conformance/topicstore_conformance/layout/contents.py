"""Tests that messages are read back as stored: every field, any topic, any payload, batches of any size and form."""

from __future__ import annotations

import random
from collections.abc import Callable

from hypothesis import given, settings
from hypothesis import strategies as st
from topicstore import Message, MessageBatch, Properties, TopicFilter

from topicstore_conformance.conditions.profiles import COSTLY
from topicstore_conformance.conditions.tries import tries
from topicstore_conformance.oracle import strategies
from topicstore_conformance.subjects.subject import LayoutSubject

from .fixtures import Fixtures, Stored, numbered, plenty

__all__ = ["Contents"]


class Contents(Fixtures):
    """Tests that messages are read back as they were stored."""

    def test_every_field_comes_back(self, stored: Stored) -> None:
        """Each field and property of a message is read back as it was stored, also if it is empty or missing."""
        whole = Properties(1, 2**32 - 1, "text/plain", "answer/here", b"\0\xff", (("a", "1"), ("a", "2"), ("", "")))
        for properties in (None, Properties(), whole):
            for qos, retain in ((0, False), (1, True), (2, False)):
                for client, payload in (("", b""), ("c\U0001f68c", b"\0" * 300), ("c", b"41.5")):
                    stored.put([Message("a/b", payload, client, qos, retain, 2**40 + qos, properties)])
        stored.put([row[1] for row in stored.rows])
        stored.reopen()
        stored.check_all()

    def test_any_messages_come_back(self, subject: LayoutSubject, fresh: Callable[[], Stored]) -> None:
        """Any messages are read back by any filter, from any position, up to any bound, with any limit of rows."""

        @settings(COSTLY, max_examples=tries(18, 100, subject.backend_capabilities))
        @given(
            st.lists(
                st.lists(strategies.messages(times=st.integers(1, 2**40)), min_size=1, max_size=12),
                min_size=1,
                max_size=4,
            ),
            strategies.filters(),
            st.sampled_from([1, 3, 700]),
            st.integers(-2, 60),
            st.integers(-2, 60),
            st.sampled_from([1, 3, 100]),
            st.sampled_from([1, 300, 1 << 30]),
            st.booleans(),
        )
        def try_it(
            batches: list[list[Message]],
            topic_filter: str,
            gap: int,
            first: int,
            bound: int,
            limit: int,
            limit_bytes: int,
            reopened: bool,
        ) -> None:
            stored = fresh()
            start = stored.last
            for batch in batches:
                stored.put(batch, gap, arrow=reopened)
            if reopened:
                stored.reopen()
            stored.check_all()
            stored.check(topic_filter, limit=limit, limit_bytes=limit_bytes)
            stored.check(topic_filter, start + first * gap, start + bound * gap, limit=limit)
            stored.check(topic_filter, deadline=0.0)

        try_it()

    def test_batches_are_the_same_in_arrow(self, stored: Stored) -> None:
        """A batch that is read has the same messages in Arrow: whole or selected, with equal or different payloads."""
        of_sizes = (8, 8, 8), (0, 100, 255), (200, 256, 300), (255, 256, 65_535), (256, 300, 65_535), (65_536, 70_000)
        properties = None, Properties(1, 2, "text/plain", "answer", b"\0", (("a", "1"), ("a", "2")))
        for number, sizes in enumerate(of_sizes):
            payloads = [bytes((number, at)) * (size // 2) + b"x" * (size % 2) for at, size in enumerate(sizes * 3)]
            stored.put(
                Message(f"t/{at % 4}", payload, f"c{at % 2}", at % 3, at % 2 == 0, 2**40 + at, properties[at % 5 == 4])
                for at, payload in enumerate(payloads)
            )
        for change in (stored.end_epoch, stored.reopen, stored.compact):
            change()
            for topic_filter in map(TopicFilter, ("#", "t/1")):
                for stream in stored.slab.cover(topic_filter):
                    self._check_arrow(stored, stream, topic_filter)

    @staticmethod
    def _check_arrow(stored: Stored, stream: int, topic_filter: TopicFilter) -> None:
        place, exhausted = stored.slab.begin(stream, topic_filter, 0), False
        while not exhausted:
            step = stored.slab.next(stream, topic_filter, place, plenty(stored.last, limit=10))
            place, exhausted = step.place, step.exhausted
            arrow = step.batch.to_arrow()
            assert step.batch.to_messages() == MessageBatch.from_arrow(arrow).to_messages()

    def test_hostile_topics(self, stored: Stored) -> None:
        """Unusual topics that MQTT 5 allows stay unchanged and distinct: empty levels, any Unicode, 65,535 bytes."""
        messages = [Message(topic, b"%d" % n, f"c{n}") for n, topic in enumerate(strategies.EDGE_TOPICS)]
        for part in (messages[:5], messages[5:20], messages[20:]):
            stored.put(part, 10)
        stored.reopen()
        stored.check_all()
        for topic in strategies.EDGE_TOPICS:
            stored.check(topic)

    def test_large_payloads(self, stored: Stored) -> None:
        """Payloads of megabytes are read back together with small ones, with any limit of bytes."""
        draw = random.Random(3)
        sizes = [10, 3 << 20, 0, 70_000, 2 << 20, 1, 1, 1 << 20]
        stored.put([Message(f"t/{n % 3}", draw.randbytes(size), "c") for n, size in enumerate(sizes)])
        stored.put([Message("t/big", bytes(5 << 20), "c")])
        for limit_bytes in (1, 1 << 20, 1 << 30):
            stored.check("#", limit_bytes=limit_bytes)
        stored.check("t/big")
        assert stored.verify() == (9, [])

    def test_a_large_batch(self, stored: Stored) -> None:
        """A batch of 20,000 messages is read back, by filters that match all, some or few of them."""
        topics = [f"f/{place}/{device}/s" for place in "xyz" for device in range(40)]
        stored.put(numbered(topics, 20_000), 3)
        for topic_filter in ("#", "f/+/7/s", "f/y/+/s", "f/z/11/s", "f/z/11", "f/no/+/s"):
            stored.check(topic_filter, limit=4_096)
        stored.reopen()
        stored.check("f/x/#", stored.rows[9_000][0], stored.rows[9_900][0])
        assert stored.verify() == (20_000, [])

    def test_no_message_of_many_is_lost(self, stored: Stored) -> None:
        """No message of hundreds of small batches is lost, in any order of their topics."""
        draw = random.Random(5)
        topics = [f"t/{n % 7}/{n}" for n in range(60)]
        for _ in range(600):
            stored.put(numbered(draw.sample(topics, 5), draw.randrange(1, 6)), draw.choice([1, 1, 30]))
        stored.check_all()
        for topic in topics[::11]:
            stored.check(topic)
        stored.reopen()
        stored.check_all()
