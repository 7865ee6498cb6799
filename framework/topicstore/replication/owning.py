"""What the owner of a shard does: before it sends an entry, and after the answer."""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping, Sequence

from .heads import Head

__all__ = [
    "Answer",
    "Outcome",
    "Stage",
    "after_put",
    "again",
    "may_acknowledge",
    "may_put",
    "may_release",
    "seen",
    "tail",
]


class Answer(enum.Enum):
    """What the store said of a PUT."""

    CREATED = enum.auto()
    EXISTS = enum.auto()
    """The index is taken. The entry there was read, or was not found when it was asked for."""
    NONE = enum.auto()
    """Nothing, or an error: it may have taken effect, and may still do so."""


class Outcome(enum.Enum):
    """What a PUT came to."""

    WRITTEN = enum.auto()
    """The entry is in the log."""
    AGAIN = enum.auto()
    """Nobody knows: the same entry is sent again, to the same index, with the same id."""
    PASSED = enum.auto()
    """An entry of a lower epoch has the index. It is void; one's own goes to the next."""
    FENCED = enum.auto()
    """Another site owns the shard. Nothing that was sent or queued is acknowledged any more."""


class Stage(enum.IntEnum):
    """How far a change has come."""

    QUEUED = 0
    SENT = 1
    WRITTEN = 2
    APPLIED = 3


def after_put(own: Head, answer: Answer, found: Head | None) -> Outcome:
    """Say what to do after a PUT of an entry, or of a fence, given what lies at its index if that is taken.

    A store may say "taken" and have nothing there: a race was lost to a request that then failed, or truncation has
    removed the entry. So that is no answer. Two owners never have one epoch, since each start of a process takes a new
    one; if they had, each would take the other for its successor and stop.
    """
    if answer is Answer.CREATED:
        return Outcome.WRITTEN
    if answer is Answer.NONE or found is None:
        return Outcome.AGAIN
    if found.id == own.id:
        return Outcome.WRITTEN
    return Outcome.PASSED if found.epoch < own.epoch else Outcome.FENCED


def again(own: Head) -> Head:
    """Return the entry to send after `Outcome.AGAIN`: the same, with its id, by which it is known if it was written."""
    return own


def may_put(in_flight: int, queued: int) -> bool:
    """Whether what is queued becomes the next entry: one at a time, or a successor's fence could be passed by."""
    return in_flight == 0 and queued > 0


def may_acknowledge(stage: Stage) -> bool:
    """Whether a change is told to be stored: when it is in the log, and applied here, where it is read."""
    return stage >= Stage.APPLIED


def may_release(in_flight: int, queued: int) -> bool:
    """Whether the owner may write that it goes: when nothing is left that would have to come after that."""
    return in_flight == 0 and queued == 0


def tail(applied: int, pending: Sequence[int]) -> int:
    """Return the last position: of the last pending change, or of what is applied if none is pending."""
    return pending[-1] if pending else applied


def seen(
    key: bytes, pending: Sequence[Mapping[bytes, bytes | None]], applied: Callable[[bytes], bytes | None]
) -> bytes | None:
    """Return the value that a condition is compared with: of the last pending change that sets it, else the applied.

    All that is pending either comes into the log before the change that looks at it, or fails with it.
    """
    for change in reversed(pending):
        if key in change:
            return change[key]
    return applied(key)
