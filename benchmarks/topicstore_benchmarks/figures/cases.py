"""The stored messages: 128 bytes each, in batches of 1,000, over various numbers of topics and streams."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping

import attrs
import msgspec
from topicstore import Message

__all__ = ["CASES", "PAYLOADS", "Case", "batches"]

BATCH = 1_000
PAYLOAD = 128


@attrs.frozen(kw_only=True)
class Case:
    """One shape of topics, with the least ratios that it should reach."""

    name: str
    topics: tuple[str, ...]
    thresholds: tuple[int, ...]
    """The thresholds of the learned topic structure that make ``streams`` streams."""
    streams: int
    least: Mapping[str, tuple[float, float]]
    """The least store rate, as a multiple of the engine's own put rate, and the least replay rate, as a multiple of
    its scan rate, by backend."""


CASES = (
    Case(
        name="1 topic",
        topics=("fleet/eu/bus-7/speed",),
        thresholds=(100, 20),
        streams=1,
        least={"rocksdb": (1.2, 1.5), "leveldb": (1.1, 0.9)},
    ),
    Case(
        name="1 stream, 1,000 topics",
        topics=tuple(f"fleet/eu/bus-{number}/speed" for number in range(1_000)),
        thresholds=(100, 20, 0, 20),
        streams=1,
        least={"rocksdb": (0.8, 1.1)},
    ),
    Case(
        name="100 streams",
        topics=tuple(f"fleet/line-{number % 100}/bus-{number}/speed" for number in range(1_000)),
        thresholds=(100, 100, 0, 20),
        streams=100,
        least={"rocksdb": (0.5, 0.5), "leveldb": (0.45, 0.4)},
    ),
)


def _json_payload(source: random.Random) -> bytes:
    reading = {
        "bus": f"bus-{source.randrange(1_000)}",
        "speed": round(source.uniform(0, 90), 1),
        "lat": round(source.uniform(30, 31), 5),
        "lon": round(source.uniform(-98, -97), 5),
        "heading": source.randrange(360),
        "doors": source.choice(["open", "closed"]),
        "n": source.randrange(10**9),
    }
    return msgspec.json.encode(reading).ljust(PAYLOAD)[:PAYLOAD]


PAYLOADS: dict[str, Callable[[random.Random], bytes]] = {
    "json": _json_payload,
    "random": lambda source: source.randbytes(PAYLOAD),
}
"""Kinds of payloads: a reading as JSON, and bytes that no codec can shrink."""


def batches(case: Case, payload: str, messages: int) -> list[list[Message]]:
    """Return ``messages`` messages in batches of 1,000; a topic's messages have one publisher."""
    source = random.Random(7)  # noqa: S311 - the same messages in every run
    make, topics = PAYLOADS[payload], case.topics
    made = [
        Message(topics[number % len(topics)], make(source), f"gateway-{number % len(topics) % 10}", 1)
        for number in range(messages)
    ]
    return [made[start : start + BATCH] for start in range(0, messages, BATCH)]
