"""What a base says of itself, and what of a log may be deleted.

The order is: a base, then a cut at or below it, then the entries below the cut. So whoever finds an index emptied, or
something else in it, finds the cut as well.
"""

from __future__ import annotations

from collections.abc import Iterable

from .heads import Head, Kind, Progress

__all__ = ["base_progress", "cut_at", "may_delete"]


def base_progress(applied: Progress, log_end: int) -> Progress:  # noqa: ARG001 - what it must not go by
    """Return where a base that is made of the local state stands.

    ``log_end`` is the index behind the last entry that is known to be in the log. It may lie further on, since entries
    are applied after they are written; what is not applied is not in the base.
    """
    return applied


def cut_at(bases: Iterable[int], oldest_reader: int, cut: int) -> int:
    """Return where the log may be cut: at the highest base that no reader who is to be spared needs to take.

    ``bases`` are the indexes of those that are whole; ``oldest_reader`` is the lowest index that a replica, or the
    patience with those that are away, still needs. The result is ``cut``, the highest cut so far, if it stays.
    """
    return max((base for base in bases if cut < base <= oldest_reader), default=cut)


def may_delete(head: Head, cut: int) -> bool:
    """Whether an entry may be deleted. Fences stay for ever.

    An owner that was paused in mid-sentence goes on with the index of the fence that followed its last entry. If that
    were free again, it would write, and acknowledge, into a part of the log that nobody reads any more. It has one PUT
    in flight, so there is nothing else that it could write.
    """
    return head.index < cut and head.kind is not Kind.FENCE
