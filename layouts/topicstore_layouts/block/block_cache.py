"""A cache of decoded blocks that readers have read in part, so that their next calls don't decode the blocks again."""

from __future__ import annotations

from collections.abc import Sequence

from .format import Block

__all__ = ["BlockCache"]

_KEPT = 8


class BlockCache:
    """The last eight decoded blocks that a reader's limit cut short. Thread-safe.

    A cached block is used only if the stored bytes are those from which it was decoded, so deletes need not evict it.
    """

    def __init__(self) -> None:
        self._blocks: dict[int, Block] = {}

    def get(self, last: int, value: bytes) -> Block | None:
        """Return the decoded block of a value whose key ends in ``last``, or None if it isn't cached."""
        block = self._blocks.get(last)
        return block if block is not None and block.holds(value) else None

    def keep(self, blocks: Sequence[Block]) -> None:
        """Cache blocks, and evict the oldest ones."""
        kept = dict(self._blocks)
        for block in blocks:
            block.keep_payloads()
            kept.pop(block.last, None)
            kept[block.last] = block
        self._blocks = dict(list(kept.items())[-_KEPT:])
