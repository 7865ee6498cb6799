"""The messages of slabs counted by topic, to show them in the tree of what their layouts have learned."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator

from topicstore.contract.batch import MessageBatch
from topicstore.contract.columns import to_iterable
from topicstore.contract.topics import TopicFilter

from .storage import Storage

__all__ = ["counts_by_slab"]

_BATCH = 8_192
_Slab = tuple[int, int]
"""A shard and a generation."""


def counts_by_slab(
    storage: Storage,
    slabs: Iterable[_Slab],
    filters: Iterable[TopicFilter],
    progress: Callable[[int], object] = lambda _: None,
) -> Iterator[tuple[_Slab, Counter[str]]]:
    """Yield each slab with the number of messages of each topic that matches one of the filters, by reading them.

    A topic matches one filter at most. ``progress`` is called with the number of messages read so far.
    """
    done, wanted = 0, list(filters)
    for slab in slabs:
        found: Counter[str] = Counter()
        for batch in _batches(storage, slab, wanted):
            found.update(to_iterable(batch.topics))
            done += len(batch)
            progress(done)
        yield slab, found


def _batches(storage: Storage, slab: _Slab, filters: Iterable[TopicFilter]) -> Iterator[MessageBatch]:
    number, generation = slab
    shard = storage.shards[number]
    shard.end_epoch(generation, shard.watermark, wait=True)
    for topic_filter in filters:
        for stream in shard.slab(generation).cover(topic_filter):
            cursor = storage.begin(number, generation, stream, topic_filter, 0)
            ended = False
            while not ended:
                result = storage.read(cursor, _BATCH)
                yield result.batch
                cursor, ended = result.cursor, result.caught_up or result.end_of_stream
