"""What a site does that was named the owner of a shard, until it is: read, fence, look, own."""

from __future__ import annotations

import enum

from .heads import Head, Kind, Progress
from .owning import Outcome

__all__ = ["Step", "after_fence", "after_look", "after_reading", "at_end", "may_suspect"]


class Step(enum.Enum):
    """What comes next."""

    READ = enum.auto()
    """Apply what was found, and read the next entry."""
    FENCE = enum.auto()
    """Create the fence at the index at which nothing was found."""
    AGAIN = enum.auto()
    """Create the same fence again: there was no answer."""
    LOOK = enum.auto()
    """Look for cuts."""
    BASE = enum.auto()
    """Begin anew at the newest base."""
    OWN = enum.auto()
    """The shard is one's own; everything before the fence is applied."""
    STOP = enum.auto()
    """Another site has a higher epoch: follow."""


def after_reading(epoch: int, progress: Progress) -> Step:
    """With what one has applied, from the log or by taking a base: a higher epoch in it belongs to a later owner."""
    return Step.STOP if progress.epoch > epoch else Step.READ


def at_end() -> Step:
    """At an index at which there is no entry. It may be the log's end, or have been emptied: `after_look` tells."""
    return Step.FENCE


def after_fence(outcome: Outcome) -> Step:
    """After the PUT of the fence (`topicstore.replication.owning.after_put`)."""
    return {
        Outcome.WRITTEN: Step.LOOK,
        Outcome.AGAIN: Step.AGAIN,
        Outcome.PASSED: Step.READ,
        Outcome.FENCED: Step.STOP,
    }[outcome]


def after_look(fence: Head, cut: int) -> Step:
    """Given the highest cut that was found after the fence was created: above the fence, its index had been emptied."""
    return Step.BASE if cut > fence.index else Step.OWN


def may_suspect(last: Head | None, owner_epoch: int, silent: float, patience: float) -> bool:
    """Whether a replica should have itself named the owner.

    ``last`` is the last entry of the log; with ``silent``, the seconds for which the owner's beats have not moved by
    one's own monotonic clock, it says whether the owner has gone on purpose or seems to be dead. A wrong suspicion
    costs time and nothing else.
    """
    released = last is not None and last.kind is Kind.RELEASED and last.epoch >= owner_epoch
    return released or silent >= patience
