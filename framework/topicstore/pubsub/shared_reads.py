"""`Run`: a stretch of a shard that was read once, for everybody who stands in front of it."""

from __future__ import annotations

import functools

import attrs
import numpy as np

from topicstore.contract.batch import MessageBatch
from topicstore.contract.model import Message

__all__ = ["Run", "Stretch"]


class Stretch:
    """What one scan brought: all matching messages of a shard behind ``after``, up to ``position``."""

    __slots__ = ("__dict__", "__weakref__", "after", "batch", "position")

    def __init__(self, after: int, position: int, batch: MessageBatch) -> None:
        self.after = after
        self.position = position
        self.batch = batch

    @functools.cached_property
    def messages(self) -> list[Message]:
        """The messages as objects, made once for all who want them."""
        return self.batch.to_messages()

    def covers(self, after: int) -> bool:
        """Say whether who has read everything up to ``after`` can read on here."""
        return self.after <= after < self.position

    def view(self, after: int, limit: int) -> Run:
        """Return at most ``limit`` messages behind ``after``."""
        positions = self.batch.positions
        rows = len(self.batch)
        start = int(np.searchsorted(positions, np.uint64(after), side="right")) if after > self.after and rows else 0
        stop = min(start + limit, rows)
        end = self.position if stop == rows else int(positions[stop - 1])
        return Run(self, slice(start, stop), end)


@attrs.frozen(slots=False)
class Run:
    """The next matching messages of one shard, in order of position."""

    stretch: Stretch = attrs.field(repr=False)
    rows: slice
    """Those of the stretch that it is."""
    position: int
    """Everything up to here has been looked at; who goes on, goes on behind it."""
    caught_up: bool = False
    """Nothing more can be seen at this moment; listeners are told when there is."""
    dropped: tuple[int, ...] = ()
    """Generations that were dropped before this part of them could be read; some of it may have matched."""

    def __len__(self) -> int:
        return int(self.rows.stop) - int(self.rows.start)

    @functools.cached_property
    def batch(self) -> MessageBatch:
        """Return the messages as columns, with positions and shards."""
        return self.stretch.batch[self.rows]

    @functools.cached_property
    def messages(self) -> list[Message]:
        """Return the messages as objects, shared with everybody who reads them."""
        messages = self.stretch.messages
        return messages if len(self) == len(messages) else messages[self.rows]

    @functools.cached_property
    def positions(self) -> list[int]:
        """Return the messages' positions."""
        return [] if not len(self) else self.stretch.batch.positions[self.rows].tolist()
