"""Options of the block layout, and how its slabs are created and opened."""

from __future__ import annotations

from typing import Literal

import attrs
from topicstore.contract.engine import Engine, WriteBatch
from topicstore.contract.layout import Layout, Slab

from topicstore_layouts.shared.learned_topics import LearnedTopics, check_thresholds

from .compression import CODECS, Compressor
from .slab import BlockSlab

__all__ = ["BlockLayout", "BlockOptions"]


@attrs.frozen(kw_only=True)
class BlockOptions:
    """Options of the block layout, kept with each generation."""

    thresholds: tuple[int, ...] = attrs.field(default=(100, 20), validator=check_thresholds)
    """The number of children that a level of the learned topic structure gets before ``+`` takes the rest: for the
    first level, the second and so on; the last number is for all deeper levels. With 0 there is only ``+``."""
    compression: Literal["lz4", "zstd", "none"] = attrs.field(default="lz4", validator=attrs.validators.in_(CODECS))
    """The compression of blocks as they are written. zstd makes them smaller than lz4, and storing slower."""
    merged_compression: Literal["lz4", "zstd", "none"] = attrs.field(
        default="zstd", validator=attrs.validators.in_(CODECS)
    )
    """The compression of merged segments, which are written once and read often."""
    level: int = attrs.field(default=1, validator=[attrs.validators.ge(-7), attrs.validators.le(19)])
    """The compression level of zstd."""


class BlockLayout(Layout):
    """A layout of compressed columnar blocks, one per batch, and of sorted segments merged from them."""

    # Format 2 stores the new names of a write as one record (`topicstore_layouts.shared.name_table`). Format 3 adds
    # frames of version 2 (`frames`).
    format = 3

    Options = BlockOptions
    options: BlockOptions

    def create(self, engine: Engine, shard: int, generation: int, parent: Slab | None, write: WriteBatch) -> None:
        """Persist the topic structure learned by the parent generation: streams are few from the first message on."""
        if isinstance(parent, BlockSlab):
            parent.trie.pass_on(generation, self.options.thresholds, write)

    def open(self, engine: Engine, shard: int, generation: int) -> Slab:
        """Load the learned structure, which is small; everything else is read on demand."""
        trie = LearnedTopics.load(engine, generation, self.options.thresholds)
        written = Compressor(self.options.compression, self.options.level)
        merged = Compressor(self.options.merged_compression, self.options.level)
        return BlockSlab(engine, shard, generation, trie, written, merged)
