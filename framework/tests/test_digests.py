"""Digests of messages by topic: which differences a comparison reports."""

from __future__ import annotations

import msgspec
import pytest
from topicstore import Message
from topicstore.digests import TopicDigests

SOME = [Message(f"a/{n % 2}", b"%d" % (n // 2), "c", 1, False, n) for n in range(10)]
LAST = SOME[-1]


def digests(*parts: list[Message], times: bool = True) -> TopicDigests:
    made = TopicDigests(times=times)
    for part in parts:
        made.add(part)
    return made


@pytest.mark.parametrize(
    ("stored", "lost", "doubled", "changed"),
    [
        (SOME, 0, 0, []),
        ([*SOME[1::2], *SOME[::2]], 0, 0, []),  # each topic is compared separately
        (SOME[:-1], 1, 0, []),
        ([*SOME, SOME[0]], 0, 1, []),
        ([SOME[2], SOME[1], SOME[0], *SOME[3:]], 0, 0, ["a/0"]),
        ([*SOME[:-1], msgspec.structs.replace(LAST, topic="b")], 1, 1, []),
        *(
            ([*SOME[:-1], msgspec.structs.replace(LAST, **{field: value})], 0, 0, ["a/1"])
            for field, value in {"payload": b"", "client_id": "", "qos": 2, "retain": True, "timestamp": 77}.items()
        ),
    ],
)
def test_differences(stored: list[Message], lost: int, doubled: int, changed: list[str]) -> None:
    """A comparison counts lost and duplicated messages, and names topics whose messages changed or were reordered."""
    source, found = digests(SOME), digests(stored)
    differences = source.differences(found)
    assert (differences.lost, differences.doubled, differences.changed) == (lost, doubled, changed)
    assert differences.none == (source.digest() == found.digest())


def test_times_may_be_left_out() -> None:
    """Digests may omit times, for messages whose times the database sets."""
    timeless = [msgspec.structs.replace(message, timestamp=None) for message in SOME]
    assert digests(SOME, times=False).differences(digests(timeless, times=False)).none
    assert not digests(SOME).differences(digests(timeless)).none


def test_chains_go_on() -> None:
    """Messages that are added later extend digests, even digests created from stored counts and hashes."""
    first = digests(SOME[:5])
    kept = TopicDigests(first.counts, first.hashes)
    kept.add(SOME[5:])
    assert digests(SOME).digest() == digests(SOME[:5], SOME[5:]).digest() == kept.digest()
    assert 10 == kept.messages


def test_digests_of_the_topics_that_match_a_filter() -> None:
    """The digests of the topics that match a filter equal the digests of those topics' messages alone."""
    found = digests(SOME).matching("a/1")
    assert {"a/1": 5} == found.counts
    assert digests(SOME[1::2]).digest() == found.digest()
