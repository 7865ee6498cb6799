"""Options of the skipstream layout, and how its slabs are created and opened."""

from __future__ import annotations

import attrs
from topicstore.contract.engine import Engine, WriteBatch
from topicstore.contract.layout import Layout, Slab

from topicstore_layouts.shared.learned_topics import LearnedTopics, check_thresholds

from .slab import SkipstreamSlab

__all__ = ["SkipstreamLayout", "SkipstreamOptions"]


@attrs.frozen(kw_only=True)
class SkipstreamOptions:
    """Options of the skipstream layout, kept with each generation."""

    thresholds: tuple[int, ...] = attrs.field(default=(100, 10), validator=check_thresholds)
    """The number of children that a level of the learned topic structure gets before ``+`` takes the rest: for the
    first level, the second and so on; the last number is for all deeper levels. With 0 there is only ``+``.

    A message has an index entry for each ``+`` of its stream, and a replay reads stream by stream: higher numbers
    make storing and narrow filters faster, lower numbers make replays over many small streams faster.
    """


class SkipstreamLayout(Layout):
    """A layout with one value per message, and an inverted index over the topic levels that vary."""

    Options = SkipstreamOptions
    options: SkipstreamOptions

    def create(self, engine: Engine, shard: int, generation: int, parent: Slab | None, write: WriteBatch) -> None:
        """Persist the topic structure learned by the parent generation: streams are few from the first message on."""
        if isinstance(parent, SkipstreamSlab):
            parent.trie.pass_on(generation, self.options.thresholds, write)

    def open(self, engine: Engine, shard: int, generation: int) -> Slab:
        """Load the learned structure, which is small; everything else is read on demand."""
        return SkipstreamSlab(
            engine, shard, generation, LearnedTopics.load(engine, generation, self.options.thresholds)
        )
