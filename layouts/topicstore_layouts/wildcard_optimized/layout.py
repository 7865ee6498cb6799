"""Options of the wildcard_optimized layout, and how its slabs are made and opened."""

from __future__ import annotations

import attrs
from attrs.validators import ge, le
from topicstore.contract.engine import Engine, WriteBatch
from topicstore.contract.layout import Layout, Slab

from topicstore_layouts.shared.learned_topics import LearnedTopics, check_thresholds

from .slab import WildcardSlab
from .streams import KeyOptions

__all__ = ["WildcardOptimizedLayout", "WildcardOptimizedOptions"]


@attrs.frozen(kw_only=True)
class WildcardOptimizedOptions:
    """Options of the wildcard_optimized layout, kept with each generation."""

    bits_per_topic_level: int = attrs.field(default=64, validator=[ge(1), le(64)])
    """Bits of a key for each varying level. Fewer make keys shorter, and let more topics of no use
    through, which are then told apart by their names: results are the same."""
    epoch_bits: int = attrs.field(default=20, validator=[ge(0), le(40)])
    """An epoch has as many microseconds as this many bits count: 20 make a second, 40 twelve days.

    Until its epoch is over a message can't be read, unless no level of its topic's stream varies.
    Longer ones make filters leap further, shorter ones a late ``start`` find its place sooner.
    """
    topic_index_bytes: int = attrs.field(default=4, validator=[ge(1), le(8)])
    """Bytes of a key for the stream's number. Of n bytes, the last number serves the 256**n - 1st
    stream and all that follow: filters can't leap there, but nothing is lost."""
    thresholds: tuple[int, ...] = attrs.field(default=(100, 20), validator=check_thresholds)
    """Children that a level of the learned topic structure gets before ``+`` takes the rest: for
    the first level, the second and so on, the last for all below. 0: ``+`` at once."""


class WildcardOptimizedLayout(Layout):
    """Makes slabs of bit-field keys."""

    Options = WildcardOptimizedOptions
    options: WildcardOptimizedOptions

    def create(self, engine: Engine, shard: int, generation: int, parent: Slab | None, write: WriteBatch) -> None:
        """Persist what the parent's topics taught, so that streams stay few from the first message on."""
        if isinstance(parent, WildcardSlab):
            parent.trie.pass_on(generation, self.options.thresholds, write)

    def open(self, engine: Engine, shard: int, generation: int) -> Slab:
        """Load the learned structure, which is small; everything else is read when needed."""
        options = self.options
        trie = LearnedTopics.load(engine, generation, options.thresholds)
        keys = KeyOptions(
            index_bytes=options.topic_index_bytes,
            epoch_bits=options.epoch_bits,
            level_bits=options.bits_per_topic_level,
        )
        return WildcardSlab(engine, shard, generation, trie, keys)
