"""Options of the wildcard_optimized layout, and how its slabs are created and opened."""

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
    """Bits of a key for each varying level. Fewer bits make keys shorter, but more topics that don't match are read
    and then sorted out by name. Results are the same."""
    epoch_bits: int = attrs.field(default=20, validator=[ge(0), le(40)])
    """The number of bits that count the microseconds of an epoch: 20 make a second, 40 twelve days.

    Until its epoch is over a message can't be read, unless no level of its topic's stream varies.
    Longer epochs make filters leap further; shorter ones make a late ``start`` find its place sooner.
    """
    topic_index_bytes: int = attrs.field(default=4, validator=[ge(1), le(8)])
    """Bytes of a key for the stream's number. With n bytes, the last number serves the (256**n - 1)-th stream and all
    later ones: filters can't leap there, but results are the same."""
    thresholds: tuple[int, ...] = attrs.field(default=(100, 20), validator=check_thresholds)
    """The number of children that a level of the learned topic structure gets before ``+`` takes the rest: for the
    first level, the second and so on; the last number is for all deeper levels. With 0 there is only ``+``."""


class WildcardOptimizedLayout(Layout):
    """A layout whose keys are bit fields: stream, epoch, and a hash of each topic level that varies."""

    Options = WildcardOptimizedOptions
    options: WildcardOptimizedOptions

    def create(self, engine: Engine, shard: int, generation: int, parent: Slab | None, write: WriteBatch) -> None:
        """Persist the topic structure learned by the parent generation: streams are few from the first message on."""
        if isinstance(parent, WildcardSlab):
            parent.trie.pass_on(generation, self.options.thresholds, write)

    def open(self, engine: Engine, shard: int, generation: int) -> Slab:
        """Load the learned structure, which is small; everything else is read on demand."""
        options = self.options
        trie = LearnedTopics.load(engine, generation, options.thresholds)
        keys = KeyOptions(
            index_bytes=options.topic_index_bytes,
            epoch_bits=options.epoch_bits,
            level_bits=options.bits_per_topic_level,
        )
        return WildcardSlab(engine, shard, generation, trie, keys)
