"""Counters of packets in one direction, by type and reason code."""

from __future__ import annotations

from .packet_types import NAMES

__all__ = ["PacketCounts"]


class PacketCounts:
    """Numbers of packets by type and reason code. Counted in the event loop; may be read in any thread."""

    __slots__ = ("_others", "good")

    def __init__(self) -> None:
        self.good = [0] * len(NAMES)
        """By type, the number of packets with reason code 0 or without one."""
        self._others: dict[tuple[int, int], int] = {}

    def add(self, kind: int, reason: int = 0, packets: int = 1) -> None:
        """Count packets of a type."""
        if reason:
            key = kind, reason
            self._others[key] = self._others.get(key, 0) + packets
        else:
            self.good[kind] += packets

    @property
    def total(self) -> int:
        """The number of all packets."""
        return sum(self.good) + sum(self._others.copy().values())

    def rows(self) -> list[tuple[str, int, int]]:
        """Return rows of type name, reason code and number of packets, in a fixed order."""
        good = [(NAMES[kind], 0, packets) for kind, packets in enumerate(self.good) if packets]
        return good + [
            (NAMES[kind], reason, packets) for (kind, reason), packets in sorted(self._others.copy().items())
        ]
