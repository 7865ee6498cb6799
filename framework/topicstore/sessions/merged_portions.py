"""`MergedPortion`: messages that are delivered once for all subscriptions of a session that they match.

A message has the highest QoS and all identifiers of the subscriptions that it matches (MQTT 5, section 3.3.4), and its
RETAIN flag is kept if one of them has ``retain_as_published``.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import repeat

import attrs
import numpy as np
import numpy.typing as npt

from topicstore.contract.model import Message
from topicstore.contract.positions import Positions, time_of
from topicstore.pubsub.message_expiry import left_of
from topicstore.pubsub.read_cache import ReadSlice

from .inflight import Flight
from .model import SubscribeOptions
from .portions import Portion, Traits, rows_in
from .records import Matched

__all__ = ["Matching", "MergedPortion", "Part", "merged", "merged_live"]

_BITS = 63
"""Largest number of subscriptions whose sets fit into NumPy's 64-bit integers as bit masks."""

Matching = tuple[str, SubscribeOptions]
"""A subscription that a message matches: its filter, and the options that hold for the message."""


@attrs.frozen
class Part:
    """The messages of one subscription in a range of positions."""

    matching: Matching
    read_slice: ReadSlice
    stop: int
    """The end of the part, exclusive, as a row of the read batch."""


@attrs.define
class MergedPortion(Portion):
    """Messages of several subscriptions, in order of their positions, each message once."""

    matched: tuple[Matched, ...] = ()
    """The sets of subscriptions that messages matched."""
    sets: Mapping[int, int] = attrs.field(factory=dict)
    """By `id` of a message, the index of its set in `matched`; also valid for a portion with only some messages."""

    def identifiers(self) -> tuple[int, ...] | list[tuple[int, ...]]:
        """Return the subscription identifiers to send: one tuple for all messages, or a list with a tuple for each."""
        if len(self.matched) == 1:
            return self.matched[0].identifiers
        return [self.matched[self.sets[id(message)]].identifiers for message in self.messages]

    def flight(self, ids: Sequence[int]) -> Flight:
        """Return the messages that need a packet id as a flight with these ids, which has no number yet."""
        flight = super().flight(ids)
        qos = repeat(self.qos) if isinstance(self.qos, int) else self.qos
        flight.matched = self.matched
        flight.which = [self.sets[id(message)] for message, one in zip(self.messages, qos, strict=False) if one]
        return flight


def merged(parts: Sequence[Part], shard: int, client_id: str, now: int) -> MergedPortion:
    """Return the messages of all parts of one shard, without expired ones and those that ``no_local`` excludes."""
    rows = [rows_in(part.read_slice, part.stop, part.matching[1], client_id, now) for part in parts]
    traits = [Traits.of(part.read_slice.whole) for part in parts]
    all_ = np.concatenate([one.positions[some] for one, some in zip(traits, rows, strict=True)])
    positions, first, places = np.unique(all_, return_index=True, return_inverse=True)
    masks = np.zeros(len(positions), np.uint64 if len(parts) <= _BITS else object)
    start = 0
    for number, some in enumerate(rows):
        masks[places[start : start + len(some)]] |= (
            masks.dtype.type(1 << number) if masks.dtype != object else 1 << number
        )
        start += len(some)
    found = [
        message for part, some in zip(parts, rows, strict=True) for message in _at(part.read_slice.whole.messages, some)
    ]
    messages = list(map(found.__getitem__, first.tolist()))
    different, which = np.unique(masks, return_inverse=True)
    sets = [
        tuple(part.matching for number, part in enumerate(parts) if mask >> number & 1) for mask in different.tolist()
    ]
    expiry = None
    if any(one.expiry is not None for one in traits):
        expiry = [
            left_of(message, time_of(position), now)
            for message, position in zip(messages, positions.tolist(), strict=True)
        ]
    return _portion(shard, messages, sets, which.tolist(), positions, expiry)


def _at(messages: Sequence[Message], rows: npt.NDArray[np.intp]) -> Sequence[Message]:
    return list(map(messages.__getitem__, rows.tolist()))


def merged_live(
    shard: int, messages: Iterable[tuple[Message, tuple[Matching, ...]]], expiry: list[int | None]
) -> MergedPortion:
    """Return a portion of messages that are not stored, each with its matching subscriptions, delivered at QoS 0."""
    rows = list(messages)
    sets = {matchings: number for number, matchings in enumerate(dict.fromkeys(matchings for _, matchings in rows))}
    which = [sets[matchings] for _, matchings in rows]
    return _portion(shard, [message for message, _ in rows], list(sets), which, None, expiry)


def _portion(
    shard: int,
    messages: list[Message],
    sets: Sequence[tuple[Matching, ...]],
    which: list[int],
    positions: Positions | None,
    expiry: list[int | None] | None,
) -> MergedPortion:
    matched = tuple(map(_matched, sets))
    qos: int | list[int] = 0
    if positions is not None:
        highest = [max(options.qos for _, options in matchings) for matchings in sets]
        all_ = [min(message.qos, highest[number]) for message, number in zip(messages, which, strict=True)]
        qos = all_[0] if len(set(all_)) == 1 else all_ or 0
    retain: bool | list[bool] = False
    if any(one.retain_as_published for one in matched):
        retain = [
            message.retain and matched[number].retain_as_published
            for message, number in zip(messages, which, strict=True)
        ]
    first = next(iter(sets), (("#", SubscribeOptions()),))[0]
    return MergedPortion(
        first[0],
        shard,
        first[1],
        messages,
        qos,
        None if qos == 0 else positions,
        None,
        retain,
        expiry if expiry is not None and any(left is not None for left in expiry) else None,
        matched=matched,
        sets=dict(zip(map(id, messages), which, strict=True)),
    )


def _matched(matchings: tuple[Matching, ...]) -> Matched:
    return Matched(
        matchings[0][0],
        tuple(options.identifier for _, options in matchings if options.identifier),
        any(options.retain_as_published for _, options in matchings),
    )
