"""The decisions of truncation: the progress that a base records, and the entries that may be deleted.

Truncation creates a base, then a cut at or below its index, and then deletes the entries below the cut. So a reader
that finds an index empty, or with another entry, finds the cut as well.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

from .heads import Progress

__all__ = ["base_progress", "cut_at", "may_delete"]


def base_progress(applied: Progress, log_end: int) -> Progress:  # noqa: ARG001 - what it must not go by
    """Return the progress that a base of the local state records: always the applied progress.

    ``log_end`` is the index after the last known entry of the log. It may be higher than the applied progress, because
    entries are applied after they are written; a base does not contain entries that are not applied.
    """
    return applied


def cut_at(bases: Iterable[int], oldest_reader: int, cut: int) -> int:
    """Return the index below which the log may be truncated: the highest base that is not above ``oldest_reader``.

    ``bases`` are the indexes of complete bases. ``oldest_reader`` is the lowest index that must be kept for replicas,
    including absent ones that are still expected back. Without a suitable base, the result is ``cut``, the highest cut.
    """
    return max((base for base in bases if cut < base <= oldest_reader), default=cut)


def may_delete(index: int, cut: int, fences: Collection[int]) -> bool:
    """Return whether the object at an index of the log may be deleted. Fences stay for ever.

    An owner that was paused resumes with the index of the fence that followed its last entry. If this index were free,
    the owner would write and acknowledge an entry below the cut, where no reader looks. The owner has only one PUT in
    flight, so it can't write anywhere else.

    ``fences`` are the indexes of the fences that a base at or above the cut lists. A fence that a site has created in
    the place of a deleted entry is not among them: its creator finds the cut and doesn't own the shard by it.
    """
    return index < cut and index not in fences
