"""Blocks that readers with small limits are in the middle of, so that each is decoded once."""

from __future__ import annotations

from collections.abc import Sequence

from .format import Block

__all__ = ["BlockCache"]

_KEPT = 8


class BlockCache:
    """The decoded blocks that were cut by a reader's limit last, eight at most; for any thread.

    A block is used again only for the very bytes it was decoded from, so deletes need no notice.
    """

    def __init__(self) -> None:
        self._blocks: dict[int, Block] = {}

    def get(self, last: int, value: bytes) -> Block | None:
        """Return the decoded block of the value under a key that ends in ``last``, if it was kept."""
        block = self._blocks.get(last)
        return block if block is not None and block.holds(value) else None

    def keep(self, blocks: Sequence[Block]) -> None:
        """Keep blocks, and let the oldest go."""
        kept = dict(self._blocks)
        for block in blocks:
            block.keep_payloads()
            kept.pop(block.last, None)
            kept[block.last] = block
        self._blocks = dict(list(kept.items())[-_KEPT:])
