"""Reading a shard: which streams of it a replay reads, and the next messages of one of them."""

from __future__ import annotations

import time

from topicstore.contract.errors import CorruptionError, GenerationArchivedError, InvalidIteratorError
from topicstore.contract.iterators import Iterator
from topicstore.contract.layout import Slab, SlabStep
from topicstore.contract.replay_plan import GenerationPlan, ShardPlan
from topicstore.contract.topics import TopicFilter

from .commit_log import CommitLog
from .epochs import Epochs
from .generations import Generations

__all__ = ["Reads"]


class Reads:
    """How one shard is read."""

    def __init__(self, log: CommitLog, generations: Generations, epochs: Epochs) -> None:
        self._log = log
        self._generations = generations
        self._epochs = epochs

    def plan(
        self, database: bytes, topic_filter: TopicFilter, first: int, bound: int, *, since: float | None
    ) -> ShardPlan:
        """Plan to read the matching messages with positions from ``first`` to ``bound``.

        The generations in turn, each by the streams that its layout finds cheapest. Where the layout hides the
        epoch that is written and the bound lies in it, wait for its end, at most an epoch after ``since`` (of
        `time.monotonic`); with None don't wait, and lower the bound instead.
        """
        number, plans = self._log.number, []
        for record, slab in self._generations.with_slabs() if first <= bound else ():
            if record.first_position > bound or (record.last_position is not None and record.last_position < first):
                continue
            streams = slab.cover(topic_filter, first)
            if record.sealed is None and any(slab.visible(stream, self._log.watermark) < bound for stream in streams):
                if since is None:
                    bound = min(slab.visible(stream, self._log.watermark) for stream in streams)
                else:
                    self._epochs.end(record.number, bound, wait=True, since=since)
            if streams:
                text = topic_filter.text
                iterators = [
                    Iterator(database, number, record.number, stream, text, slab.begin(stream, topic_filter, first))
                    for stream in streams
                ]
                plans.append(GenerationPlan(iterators, slab.epoch))
        return ShardPlan(shard=number, bound=bound, generations=plans)

    def next(
        self,
        generation: int,
        stream: int,
        topic_filter: TopicFilter,
        place: bytes,
        *,
        limit: int,
        limit_bytes: int,
        bound: int | None,
        deadline: float | None,
        final: bool = False,
    ) -> tuple[SlabStep, bool]:
        """Read on in a stream; return the step, and whether it ended the stream for good.

        ``final``: the caller wants what is there up to ``bound``, and won't go on after it. Of a view of one
        moment it then gets the open epoch too.
        """
        log = self._log
        slab, record = self._generations.slab(generation), self._generations.records.get(generation)
        bound = log.watermark if bound is None else min(bound, log.watermark)
        if record is not None and record.sealed is None and not (final and log.read_only):
            bound = self._visible(generation, stream, bound)
        started = time.perf_counter()
        try:
            step = slab.next(
                stream,
                topic_filter,
                place,
                limit=limit,
                limit_bytes=limit_bytes,
                bound=bound,
                deadline=deadline,
            )
        except (KeyError, ValueError) as bad:
            raise InvalidIteratorError(f"the iterator's place is not of this stream: {bad}") from bad
        except CorruptionError:
            self._check_still(generation, slab)  # if not, it is no damage
            raise
        self._check_still(generation, slab)  # if not, what was read may be less than there was
        log.counters.reads += 1
        log.counters.read_messages += len(step.batch)
        log.counters.read_seconds += time.perf_counter() - started
        end = None if record is None else record.last_position
        return step, step.exhausted and end is not None and bound >= end

    def _check_still(self, generation: int, slab: Slab) -> None:
        """Raise if a generation was dropped or archived while its slab was read."""
        if self._generations.slab(generation) is not slab:
            raise GenerationArchivedError(
                f"generation {generation} of shard {self._log.number} was archived while it was read; begin anew"
            )

    def _visible(self, generation: int, stream: int, bound: int) -> int:
        """Return how far a stream of the generation being written may be read, at most to ``bound``."""
        slab = self._generations.slab(generation)
        if slab.visible(stream, self._log.watermark) < bound:
            self._epochs.end(generation, bound, wait=False)
        return min(bound, slab.visible(stream, self._log.watermark))
