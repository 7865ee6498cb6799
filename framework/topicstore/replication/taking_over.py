"""The decisions of a site that was named owner of a shard: read the log, create a fence, look for cuts, own."""

from __future__ import annotations

import enum

from .heads import Head, Kind, Progress
from .owning import Outcome

__all__ = ["Step", "after_fence", "after_look", "after_reading", "at_end", "may_suspect"]


class Step(enum.Enum):
    """The next step of a takeover."""

    READ = enum.auto()
    """Apply the entries found, and read on."""
    FENCE = enum.auto()
    """Create the fence at the index at which no entry was found."""
    AGAIN = enum.auto()
    """Create the same fence again: there was no answer."""
    LOOK = enum.auto()
    """The fence is written: look for cuts."""
    BASE = enum.auto()
    """Start again from the newest base."""
    OWN = enum.auto()
    """This site owns the shard, and all entries before the fence are applied."""
    STOP = enum.auto()
    """Another site has a higher epoch: give up and follow."""


def after_reading(epoch: int, progress: Progress) -> Step:
    """Return the step after entries or a base were applied: `STOP` if they show a higher epoch, of a later owner."""
    return Step.STOP if progress.epoch > epoch else Step.READ


def at_end() -> Step:
    """Return the step at an index without an entry. `after_look` finds out if its entry was deleted by truncation."""
    return Step.FENCE


def after_fence(outcome: Outcome) -> Step:
    """Return the step after the PUT of the fence (`topicstore.replication.owning.after_put`)."""
    return {
        Outcome.WRITTEN: Step.LOOK,
        Outcome.AGAIN: Step.AGAIN,
        Outcome.PASSED: Step.READ,
        Outcome.FENCED: Step.STOP,
    }[outcome]


def after_look(fence: Head, cut: int) -> Step:
    """Return the step after looking for cuts; ``cut`` is the highest.

    A cut above the fence shows that truncation had deleted the entry at the fence's index.
    """
    return Step.BASE if cut > fence.index else Step.OWN


def may_suspect(last: Head | None, owner_epoch: int, silent: float, patience: float) -> bool:
    """Return whether a replica should try to become the owner: the shard is released, or the owner seems dead.

    ``last`` is the last entry of the log. ``silent`` is the time in seconds since the owner's last heartbeat, by the
    replica's own monotonic clock; ``patience`` is its limit. A wrong suspicion costs time only.
    """
    released = last is not None and last.kind is Kind.RELEASED and last.epoch >= owner_epoch
    return released or silent >= patience
