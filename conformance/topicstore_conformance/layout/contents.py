"""Promises about messages: every field, any topic, any payload, and batches of any size and form come back."""

from __future__ import annotations

import random

from topicstore import Message

from topicstore_conformance.oracle import strategies

from .fixtures import Fixtures, Stored, numbered

__all__ = ["Contents"]


class Contents(Fixtures):
    """Promises about messages."""

    def test_hostile_topics(self, stored: Stored) -> None:
        """Topics at the edges of MQTT 5 come back and stay distinct: empty levels, any Unicode, 65,535 bytes."""
        messages = [Message(topic, b"%d" % n, f"c{n}") for n, topic in enumerate(strategies.EDGE_TOPICS)]
        for part in (messages[:5], messages[5:20], messages[20:]):
            stored.put(part, 10)
        stored.reopen()
        stored.check_all()
        for topic in strategies.EDGE_TOPICS:
            stored.check(topic)

    def test_large_payloads(self, stored: Stored) -> None:
        """Payloads of megabytes come back beside small ones, whatever the limit of bytes."""
        draw = random.Random(3)
        sizes = [10, 3 << 20, 0, 70_000, 2 << 20, 1, 1, 1 << 20]
        stored.put([Message(f"t/{n % 3}", draw.randbytes(size), "c") for n, size in enumerate(sizes)])
        stored.put([Message("t/big", bytes(5 << 20), "c")])
        for limit_bytes in (1, 1 << 20, 1 << 30):
            stored.check("#", limit_bytes=limit_bytes)
        stored.check("t/big")
        assert stored.verify() == (9, [])

    def test_a_large_batch(self, stored: Stored) -> None:
        """A batch of 20,000 messages comes back, by filters that match all, some and few of it."""
        topics = [f"f/{place}/{device}/s" for place in "xyz" for device in range(40)]
        stored.put(numbered(topics, 20_000), 3)
        for topic_filter in ("#", "f/+/7/s", "f/y/+/s", "f/z/11/s", "f/z/11", "f/no/+/s"):
            stored.check(topic_filter, limit=4_096)
        stored.reopen()
        stored.check("f/x/#", stored.rows[9_000][0], stored.rows[9_900][0])
        assert stored.verify() == (20_000, [])
