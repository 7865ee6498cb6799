"""A checker of histories: the recorded operations of a shared database's clients, with their results.

A history is recorded by several processes with one clock, as Jepsen's tests do. Each message has a number that no other
message has. The checker reads the operations and the messages that are stored in the end, and lists violated
guarantees.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from typing import Literal

import attrs

__all__ = ["Operation", "violations"]


@attrs.frozen
class Operation:
    """One operation of a client. Times are in seconds of a clock that all processes share."""

    kind: Literal["store", "replay"]
    began: float
    ended: float
    numbers: tuple[int, ...]
    """The numbers of the messages that were stored, in their order, or that the replay returned."""
    outcome: Literal["stored", "refused", "unknown"] = "stored"
    """The outcome: a store was acknowledged, refused, or ended with an error that leaves this unknown."""
    publisher: str = ""


def violations(
    operations: Sequence[Operation], stored: Sequence[int], positions: Mapping[int, Sequence[int]]
) -> list[str]:
    """Return the violations of the guarantees that a history shows, as sentences.

    stored:    the numbers of all messages that are stored in the end.
    positions: for each shard, the positions of its messages in the order in which a replay returns them.

    The guarantees: every acknowledged message is stored, and no message twice. Refused messages are not stored. Each
    batch is stored as a whole or not at all. A publisher's messages are stored in the order of its calls. Positions
    rise. A replay has all messages whose store was acknowledged before the replay began.
    """
    return [
        *_lost_or_repeated(operations, stored),
        *_out_of_order(operations, stored),
        *_missed(operations),
        *(
            f"the positions of shard {shard} don't rise"
            for shard, found in positions.items()
            if any(one >= following for one, following in pairwise(found))
        ),
    ]


def _lost_or_repeated(operations: Iterable[Operation], stored: Sequence[int]) -> Iterable[str]:
    counts = Counter(stored)
    yield from (f"message {number} is stored {count} times" for number, count in counts.items() if count > 1)
    for store in operations:
        there = [number for number in store.numbers if number in counts]
        if store.kind != "store":
            continue
        if store.outcome == "stored" and len(there) < len(store.numbers):
            yield f"messages {sorted({*store.numbers} - {*there})} were acknowledged, and are not stored"
        elif store.outcome == "refused" and there:
            yield f"messages {there} were refused, and are stored"
        elif 0 < len(there) < len(store.numbers):
            yield f"of one store, messages {there} are stored and the others are not"


def _out_of_order(operations: Iterable[Operation], stored: Sequence[int]) -> Iterable[str]:
    place = {number: index for index, number in enumerate(stored)}
    last: dict[str, tuple[int, int]] = {}
    for store in sorted(operations, key=lambda one: one.began):
        for number in store.numbers if store.kind == "store" else ():
            if number not in place:
                continue
            before = last.get(store.publisher)
            if before is not None and place[number] < before[0]:
                yield f"message {number} of {store.publisher} lies before message {before[1]}, which was stored first"
            last[store.publisher] = place[number], number


def _missed(operations: Iterable[Operation]) -> Iterable[str]:
    stores = [one for one in operations if one.kind == "store" and one.outcome == "stored"]
    for replay in operations:
        if replay.kind == "replay":
            found = set(replay.numbers)
            missed = [n for store in stores if store.ended < replay.began for n in store.numbers if n not in found]
            if missed:
                yield f"a replay that began at {replay.began} misses messages {missed[:5]}, acknowledged before it"
