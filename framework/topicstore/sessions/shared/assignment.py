"""The assignment of a group's slices to its members."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TypeVar

__all__ = ["moves"]

M = TypeVar("M")


def moves(owners: Sequence[M | None], members: Iterable[M], total: dict[M, int]) -> list[tuple[int, M]]:
    """Return the slices of a shard to reassign, with their new owners, to balance the members within one slice.

    As few slices as possible are moved. Remainder slices go first to the members with the fewest slices in all shards
    so far (``total``, which is updated).
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
