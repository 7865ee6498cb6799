"""A placeholder for a slab that can't be opened, so that the rest of the database can be."""

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
    """A slab whose methods that read or store messages raise the error with which opening it failed.

    The generation can be dropped, and another begun. The other generations are read and written as usual.
    """

    def __init__(self, error: CorruptionError) -> None:
        self.counters = ReadCounters()
        self.error = error

    def _refuse(self) -> NoReturn:
        raise CorruptionError(self.error.reason, self.error.place) from self.error

    def store(self, batch: MessageBatch, write: WriteBatch) -> None:
        """Raise."""
        self._refuse()

    def committed(self) -> None:
        """Raise."""
        self._refuse()

    def streams(self, topic_filter: TopicFilter) -> list[StreamInfo]:
        """Raise."""
        self._refuse()

    def begin(self, stream: int, topic_filter: TopicFilter, position: int) -> bytes:
        """Raise."""
        self._refuse()

    def next(self, stream: int, topic_filter: TopicFilter, place: bytes, limits: ReadLimits) -> SlabStep:
        """Raise."""
        self._refuse()

    def delete(
        self, topic_filter: TopicFilter, first: int, last: int, spare: Sequence[TopicFilter] = ()
    ) -> Iterator[DeleteStep]:
        """Raise."""
        self._refuse()

    def info(self) -> SlabInfo:
        """Return no streams, and the damage."""
        return SlabInfo(streams=0, details={"damage": str(self.error)})

    def verify(self, bound: int) -> Iterator[Damage | int]:
        """Yield the damage."""
        yield Damage(place=self.error.place, reason=self.error.reason)
