"""Tests of damaged values: an error names the damaged part, and no message is read that was not stored."""

from __future__ import annotations

import random
from collections.abc import Iterator
from itertools import product
from typing import Any

import msgspec
import pytest
from topicstore import TopicFilter
from topicstore.contract.engine import Key, Keyspace
from topicstore.contract.errors import CorruptionError, NewerFormatError

from topicstore_conformance.conditions.tries import tries

from .fixtures import SHARD, Fixtures, Reader, Stored, numbered, rows_of
from .reading import TOPICS

__all__ = ["FINE", "Damages", "broken", "flipped", "outcome"]

Change = tuple[Keyspace[Any], Key, bytes | None]
TOLD = (CorruptionError, NewerFormatError)
"""The errors that report damage; a flipped bit in a format version may look like a newer version."""
FINE = (("told", "told"), ("right", "told"), ("right", "right"))
"""The allowed outcomes of a flipped bit, as pairs of that of readers and that of `verify`."""


def flipped(value: bytes, at: int, bit: int) -> bytes:
    """Return a value with one bit inverted."""
    return value[:at] + bytes((value[at] ^ 1 << bit,)) + value[at + 1 :]


def broken(value: bytes) -> Iterator[bytes]:
    """Yield every value that one inverted bit, truncation, or an additional byte makes of a value."""
    yield from (flipped(value, at, bit) for at in range(len(value)) for bit in range(8))
    yield from (value[:size] for size in range(len(value)))
    yield value + b"\0"


def told(stored: Stored, *places: str) -> str:
    """Return "told" if all ``places`` of reported damage name the slab or its learned topics, else the wrong places."""
    good = f"shard {SHARD}, generation {stored.generation}, ", "learned topics, key "
    return "told" if all(place.startswith(good) for place in places) else f"told at {places}"


def read(stored: Stored) -> str:
    """Open the slab again and read everything; return "right", "wrong", or the outcome of the reported damage."""
    try:
        stored.reopen()
        stored.read_all()
    except TOLD as error:
        return told(stored, error.place)
    except AssertionError:
        return "wrong"
    return "right"


def verified(stored: Stored) -> str:
    """Open the slab again and verify it; return "right", "fewer", or the outcome of the reported damage."""
    try:
        stored.reopen()
        good, damages = stored.verify()
    except TOLD as error:
        return told(stored, error.place)
    if damages:
        assert all(damage.reason for damage in damages)
        return told(stored, *(damage.place for damage in damages))
    return "right" if good == len(stored.rows) else "fewer"


def outcome(stored: Stored, change: Change) -> tuple[str, str]:
    """Change one value, return the outcomes of `read` and `verified`, and restore the value."""
    keyspace, key, changed = change
    good = stored.engine.get(keyspace, key)
    stored.replace(keyspace, key, changed)
    try:
        return read(stored), verified(stored)
    finally:
        stored.replace(keyspace, key, good)
        stored.reopen()


class Damages(Fixtures):
    """Tests of damage, with values that are changed directly in the engine."""

    @pytest.fixture
    def damageable(self, stored: Stored) -> Stored:
        """Return a slab with values in all stored forms: compacted and not, in batches of several sizes."""
        for gap in (1, 5, 1):
            stored.put(numbered(TOPICS, 60), gap)
        stored.compact()
        stored.put(numbered(TOPICS, 30))
        stored.put(numbered(["g"], 3))
        if not stored.pairs():
            pytest.skip("the layout keeps no values that could be damaged")
        return stored

    def test_flipped_bits_are_reported(self, damageable: Stored) -> None:
        """A flipped bit in any value changes nothing, or readers and `verify` report it and name the damaged part."""
        draw, pairs = random.Random(1), [pair for pair in damageable.pairs() if pair[2]]
        flips = [
            (pair, draw.randrange(len(pair[2])), draw.randrange(8))
            for pair in draw.sample(pairs, min(len(pairs), tries(20, 120)))
        ]
        # Also flips bits of format versions, which may then look newer.
        for pair in {pair[0]: pair for pair in pairs}.values():
            flips += [(pair, at, bit) for at, bit in product((0, min(10, len(pair[2]) - 1)), (1, 4, 7))]
        found = [
            ((space.name, key, at, bit), outcome(damageable, (space, key, flipped(value, at, bit))))
            for (space, key, value), at, bit in flips
        ]
        assert [one for one in found if one[1] not in FINE] == []

    def test_other_values_of_messages_are_reported(self, damageable: Stored) -> None:
        """A value with messages is reported if it has a flipped bit, another length, or belongs to another key."""
        pairs, draw = [pair for pair in damageable.pairs() if len(pair[2]) > 20], random.Random(2)
        changes: list[Change] = []
        for space, key, value in draw.sample(pairs, min(len(pairs), tries(12, 60))):
            changes.append((space, key, flipped(value, draw.randrange(len(value)), draw.randrange(8))))
        for space, key, value in draw.sample(pairs, min(len(pairs), tries(6, 12))):
            cut = (value[:-1], value[: len(value) // 2], b"", value + b"\0", value[1:])
            changes += [(space, key, bad) for bad in cut]
        for _ in range(tries(8, 40)):
            (space, key, value), (_, _, other) = draw.sample(pairs, 2)
            changes += [(space, key, other)] if value != other else []
        assert {("told", "told")} == {outcome(damageable, change) for change in changes}

    def test_missing_values_are_missed(self, damageable: Stored) -> None:
        """If a value is missing, `verify` reports it or counts fewer messages."""
        pairs = damageable.pairs()
        for keyspace, key, _ in random.Random(4).sample(pairs, min(len(pairs), tries(12, 60))):
            assert outcome(damageable, (keyspace, key, None))[1] in ("told", "fewer")

    def test_damaged_structure_is_reported(self, damageable: Stored) -> None:
        """A flipped bit, a truncation or an extension of the learned structure is reported, or changes no read."""
        draw = random.Random(6)
        learned = damageable.learned_pairs()
        for keyspace, key, value in draw.sample(learned, min(len(learned), tries(10, 60))):
            at = draw.randrange(max(len(value), 1))
            for changed in (value[:-1], value + b"\0", flipped(value, at, draw.randrange(8))):
                assert outcome(damageable, (keyspace, key, changed))[0] in ("told", "right")

    def test_the_rest_stays_readable(self, stored: Stored) -> None:
        """A damaged value doesn't prevent reading the messages of the batches before and after it."""
        parts = [stored.put(numbered(["a/b"], 20), 3) for _ in range(5)]
        pairs = [pair for pair in stored.pairs() if len(pair[2]) > 20]
        if not pairs:
            pytest.skip("the layout keeps no values that could be damaged")
        keyspace, key, value = pairs[len(pairs) // 2]
        stored.replace(keyspace, key, value[:-1] + bytes((value[-1] ^ 1,)))
        stored.reopen()
        stored.check("#", bound=parts[0][-1][0])
        stored.check("#", first=parts[4][0][0])
        with pytest.raises(CorruptionError):
            stored.check("#")
        _, damages = stored.verify()
        assert len(damages) >= 1

    def test_missing_writes_change_no_message(self, stored: Stored) -> None:
        """If writes in the middle are lost, every readable message still has its own topic and client id."""
        draw = random.Random(8)
        for number in range(24):
            topics = [f"t/{number % 3}", f"u/{number // 2}/x", f"v{number // 6}", f"$SYS/{number // 4}"]
            messages = [msgspec.structs.replace(m, client_id=f"c{number // 2}") for m in numbered(topics, 8)]
            if 6 <= number < 18 and draw.randrange(2):
                stored.lose(messages)
            else:
                stored.put(messages)
        stored.end_epoch()
        try:
            stored.reopen()
        except TOLD:
            return
        by_position = dict(stored.rows)
        filters = [*stored.everything(), *sorted({message.topic for message in by_position.values()})]
        for topic_filter, (position, _) in product(filters, stored.rows[::5]):
            try:
                for stream in stored.slab.cover(TopicFilter(topic_filter), position):
                    step = Reader(stored, stream, topic_filter, position).step(stored.last, limit=2)
                    for at, message in rows_of(step.batch):
                        assert message == by_position.get(at), "not as it was stored"
            except TOLD:
                continue
