"""A placeholder for a slab that can't be opened, with which the rest of the database stays usable."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NoReturn

from topicstore.contract.batch import MessageBatch
from topicstore.contract.engine import WriteBatch
from topicstore.contract.errors import CorruptionError
from topicstore.contract.layout import (
    Damage,
    DeleteStep,
    ReadCounters,
    ReadLimits,
    Slab,
    SlabInfo,
    SlabStep,
    StreamInfo,
)
from topicstore.contract.topics import TopicFilter

__all__ = ["DamagedSlab"]


class DamagedSlab(Slab):
    """A slab that couldn't be opened: all methods that read or store messages raise the error of opening it.

    Its generation can be dropped, and a new one added. The other generations work as usual.
    """

    def __init__(self, error: CorruptionError) -> None:
        self.counters = ReadCounters()
        self.error = error

    def _refuse(self) -> NoReturn:
        raise CorruptionError(self.error.reason, self.error.place) from self.error

    def store(self, batch: MessageBatch, write: WriteBatch) -> None:
        """Raise the error with which opening the slab failed."""
        self._refuse()

    def committed(self) -> None:
        """Raise the error with which opening the slab failed."""
        self._refuse()

    def streams(self, topic_filter: TopicFilter) -> list[StreamInfo]:
        """Raise the error with which opening the slab failed."""
        self._refuse()

    def begin(self, stream: int, topic_filter: TopicFilter, position: int) -> bytes:
        """Raise the error with which opening the slab failed."""
        self._refuse()

    def next(self, stream: int, topic_filter: TopicFilter, place: bytes, limits: ReadLimits) -> SlabStep:
        """Raise the error with which opening the slab failed."""
        self._refuse()

    def delete(
        self, topic_filter: TopicFilter, first: int, last: int, spare: Sequence[TopicFilter] = ()
    ) -> Iterator[DeleteStep]:
        """Raise the error with which opening the slab failed."""
        self._refuse()

    def info(self) -> SlabInfo:
        """Return statistics with no streams and the description of the damage."""
        return SlabInfo(streams=0, details={"damage": str(self.error)})

    def verify(self, bound: int) -> Iterator[Damage | int]:
        """Yield the damage that prevented the opening."""
        yield Damage(place=self.error.place, reason=self.error.reason)
