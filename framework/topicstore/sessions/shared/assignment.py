"""Which member of a group is to have which slices."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TypeVar

__all__ = ["moves"]

M = TypeVar("M")


def moves(owners: Sequence[M | None], members: Iterable[M], total: dict[M, int]) -> list[tuple[int, M]]:
    """Return which slices of a shard get which new owner, so that the members have equal numbers, give or take one.

    As few as possible move. Who has fewer in all shards so far (``total``, which is counted on) is
    the first to get one that is left over.
    """
    held: dict[M, list[int]] = {member: [] for member in members}
    free: list[int] = []
    for number, owner in enumerate(owners):
        (free if owner is None or owner not in held else held[owner]).append(number)
    order = sorted(held, key=lambda member: (-len(held[member]), total[member]))
    each, left_over = divmod(len(owners), len(order))
    targets = {member: each + (place < left_over) for place, member in enumerate(order)}
    for member, target in targets.items():
        free += held[member][target:]
        total[member] += target
    found = []
    for member, target in targets.items():
        found += [(free.pop(), member) for _ in range(target - len(held[member]))]
    return found
