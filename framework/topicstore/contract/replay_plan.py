"""What ``topicstore_replay`` returns: which streams a replay reads, and in which order."""

from __future__ import annotations

from typing import Literal

import attrs

from .iterators import Iterator

__all__ = ["GenerationPlan", "Order", "ReplayPlan", "ShardPlan"]

Order = Literal["time"]


@attrs.frozen
class GenerationPlan:
    """One generation's part of a replay, within its shard."""

    iterators: list[Iterator]
    epoch: int
    """Positions within which its streams are not in order (`topicstore.contract.layout.Slab.epoch`)."""


@attrs.frozen(kw_only=True)
class ShardPlan:
    """One shard's part of a replay."""

    shard: int
    bound: int
    """The highest position to return."""
    generations: list[GenerationPlan]
    """In their order: one begins when the one before has ended."""


@attrs.frozen(kw_only=True)
class ReplayPlan:
    """What a replay reads. Fixed when the replay is asked for."""

    shards: list[ShardPlan]
    order: Order | None
    """``"time"`` merges everything by position; None gives each publisher's and topic's own order."""
    batch_size: int
    """Messages that are fetched at once."""
