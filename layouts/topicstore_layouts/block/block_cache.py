"""Keeps blocks that readers with small limits have begun, so that each block is decoded once."""

from __future__ import annotations

from collections.abc import Sequence

from .format import Block

__all__ = ["BlockCache"]

_KEPT = 8


class BlockCache:
    """The last decoded blocks that a reader's limit cut, at most eight. Any thread may use it.

    A block is reused only for exactly the bytes it was decoded from, so deletes need not invalidate it.
    """

    def __init__(self) -> None:
        self._blocks: dict[int, Block] = {}

    def get(self, last: int, value: bytes) -> Block | None:
        """Return the decoded block of a value whose key ends in ``last``, None if it isn't kept."""
        block = self._blocks.get(last)
        return block if block is not None and block.holds(value) else None

    def keep(self, blocks: Sequence[Block]) -> None:
        """Keep blocks, and drop the oldest ones."""
        kept = dict(self._blocks)
        for block in blocks:
            block.keep_payloads()
            kept.pop(block.last, None)
            kept[block.last] = block
        self._blocks = dict(list(kept.items())[-_KEPT:])
