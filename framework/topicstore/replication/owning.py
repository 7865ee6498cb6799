"""The decisions of a shard's owner: before it sends an entry, and after the answer."""

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
    """The answer of the store to a PUT."""

    CREATED = enum.auto()
    EXISTS = enum.auto()
    """The index is taken. The entry there was read, or could not be found."""
    NONE = enum.auto()
    """No answer, or an error: the PUT may have taken effect, or may still do so."""


class Outcome(enum.Enum):
    """The outcome of a PUT."""

    WRITTEN = enum.auto()
    """The entry is in the log."""
    AGAIN = enum.auto()
    """Unknown: the same entry is sent again, to the same index, with the same id."""
    PASSED = enum.auto()
    """An entry of a lower epoch has the index and is void; the own entry is sent to the next index."""
    FENCED = enum.auto()
    """Another site owns the shard. All changes that were sent or queued fail."""


class Stage(enum.IntEnum):
    """The progress of one change towards its acknowledgement."""

    QUEUED = 0
    SENT = 1
    WRITTEN = 2
    APPLIED = 3


def after_put(own: Head, answer: Answer, found: Head | None) -> Outcome:
    """Return the outcome of a PUT of an entry or a fence; ``found`` is the header of the entry at a taken index.

    A store may answer "taken" although the object can't be read: a concurrent request won the race and then failed, or
    truncation has deleted the entry. This counts as no answer. Two owners never share an epoch, because each process
    start takes a new one; if they did, each would consider the other its successor and stop.
    """
    if answer is Answer.CREATED:
        return Outcome.WRITTEN
    if answer is Answer.NONE or found is None:
        return Outcome.AGAIN
    if found.id == own.id:
        return Outcome.WRITTEN
    return Outcome.PASSED if found.epoch < own.epoch else Outcome.FENCED


def again(own: Head) -> Head:
    """Return the entry to send after `Outcome.AGAIN`: the same one, so that its id shows if it was written before."""
    return own


def may_put(in_flight: int, queued: int) -> bool:
    """Return whether the queued changes may be sent as the next entry: only if no other PUT is in flight.

    With two PUTs in flight, the later one could be written after a successor's fence.
    """
    return in_flight == 0 and queued > 0


def may_acknowledge(stage: Stage) -> bool:
    """Return whether a change may be acknowledged: once it is in the log and applied on this site for readers."""
    return stage >= Stage.APPLIED


def may_release(in_flight: int, queued: int) -> bool:
    """Return whether the owner may write its release entry: when no change is in flight or queued."""
    return in_flight == 0 and queued == 0


def tail(applied: int, pending: Sequence[int]) -> int:
    """Return the last assigned position: of the last pending change or, without one, of the applied changes."""
    return pending[-1] if pending else applied


def seen(
    key: bytes, pending: Sequence[Mapping[bytes, bytes | None]], applied: Callable[[bytes], bytes | None]
) -> bytes | None:
    """Return the value of ``key`` for a compare-and-set: of the last pending change that sets it, or else as applied.

    Every pending change either enters the log before the change that is conditional on it, or fails together with it.
    """
    for change in reversed(pending):
        if key in change:
            return change[key]
    return applied(key)
