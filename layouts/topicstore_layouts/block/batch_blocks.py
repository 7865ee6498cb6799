"""Blocks as they were written: one per batch, or one per stream where a batch touches few streams.

They are stored in order of position, not of stream. The positions of one batch's blocks may interleave, so
these blocks are read together.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from topicstore import MessageBatch
from topicstore.contract.columns import Column
from topicstore.contract.engine import DATA, Reader
from topicstore.contract.errors import CorruptionError, NewerFormatError

from .block_cache import BlockCache
from .compression import Compressor
from .format import Block, Columns, block_seed, encode_block, encode_message

__all__ = ["BatchBlocks", "Pairs"]

_RUN = 0
Pairs = list[tuple[tuple[int, int, int], bytes]]
"""Keys and values of blocks."""


class BatchBlocks:
    """The batch blocks of a slab: their keys, their values, and reading them."""

    def __init__(self, shard: int, generation: int, compress: Compressor) -> None:
        self.cache = BlockCache()
        self.end = generation, _RUN + 1, 0
        """The key that follows the last possible block."""
        self._shard = shard
        self._generation = generation
        self._slab = shard << 32 | generation
        self._compress = compress

    def key(self, last: int) -> tuple[int, int, int]:
        """Return the key of the block that ends at a position."""
        return self._generation, _RUN, last

    def encode(self, columns: Columns[Column], stream: int, base: int, last: int) -> bytes:
        """Return the value of a block that ends at a position."""
        return encode_block(columns, stream, base, block_seed(last, self._slab), self._compress)

    def encode_message(self, message: MessageBatch, topic: int | str, client_id: int | str, stream: int) -> bytes:
        """Return the value of a block of one message; see `encode_message` in `topicstore_layouts.block.format`."""
        _, last = message.span
        return encode_message(message, topic, client_id, stream, block_seed(last, self._slab), self._compress)

    def decode(self, last: int, value: bytes) -> Block:
        """Check and decode a block's header. Raises `CorruptionError` or `NewerFormatError` that names the block."""
        try:
            return Block(value, last, block_seed(last, self._slab))
        except (CorruptionError, NewerFormatError) as bad:
            raise type(bad)(bad.reason, self.place(last)) from bad

    def place(self, last: int) -> str:
        """Return a description of a block's place, for error messages."""
        return f"shard {self._shard}, generation {self._generation}, block that ends at position {last}"

    def pairs(self, reader: Reader, first: int, before: int | None = None, *, reverse: bool = False) -> Iterator[Pairs]:
        """Yield the stored blocks that end at positions from ``first`` to below ``before``; None stands for the end."""
        return reader.scan(DATA, self.key(first), self.end if before is None else self.key(before), reverse=reverse)

    def batches(
        self, reader: Reader, first: int, bound: int, chunks: Iterable[Pairs] | None = None
    ) -> Iterator[list[Block]]:
        """Yield the blocks that may hold positions from ``first`` to ``bound``, in one list for each batch.

        ``chunks`` are the pairs of keys and blocks from ``first`` on, in order; by default, all pairs are scanned.
        """
        together: list[Block] = []
        for chunk in self.pairs(reader, first) if chunks is None else chunks:
            for key, value in chunk:
                block = self.cache.get(key[2], value) or self.decode(key[2], value)
                if together and block.base != together[0].base:
                    yield together
                    together = []
                if block.base > bound:
                    return
                together.append(block)
                # Its rows fill the batch's positions, so the batch has no other block.
                if block.rows == block.last - block.base + 1:
                    yield together
                    together = []
        if together:
            yield together
