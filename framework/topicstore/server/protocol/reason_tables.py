"""The reason codes that the standard permits for each packet type.

Source: MQTT Version 5.0 (OASIS Standard), sections 3.2.2.2, 3.4.2.1, 3.5.2.1, 3.6.2.1, 3.7.2.1, 3.9.3, 3.11.3 and
3.14.2.1.
"""

from __future__ import annotations

from .reason import ReasonCode

__all__ = [
    "ACK_REASONS",
    "CLIENT_AUTH_REASONS",
    "CLIENT_DISCONNECT_REASONS",
    "CONNACK_REASONS",
    "SERVER_DISCONNECT_REASONS",
    "SUBACK_REASONS",
    "UNSUBACK_REASONS",
    "permitted",
]

_OUTCOMES = frozenset((0x00, 0x10, 0x80, 0x83, 0x87, 0x90, 0x91, 0x97, 0x99))
_RELEASES = frozenset((0x00, 0x92))

ACK_REASONS = {4: _OUTCOMES, 5: _OUTCOMES, 6: _RELEASES, 7: _RELEASES}
"""The reason codes of PUBACK, PUBREC, PUBREL and PUBCOMP, by packet type."""

CONNACK_REASONS = frozenset((0x00, *range(0x80, 0x8B), 0x8C, 0x90, 0x95, 0x97, *range(0x99, 0x9E), 0x9F))
SUBACK_REASONS = frozenset((0x00, 0x01, 0x02, 0x80, 0x83, 0x87, 0x8F, 0x91, 0x97, 0x9E, 0xA1, 0xA2))
UNSUBACK_REASONS = frozenset((0x00, 0x11, 0x80, 0x83, 0x87, 0x8F, 0x91))
CLIENT_AUTH_REASONS = frozenset((0x18, 0x19))

CLIENT_DISCONNECT_REASONS = frozenset((0x00, 0x04, *range(0x80, 0x84), 0x90, *range(0x93, 0x9A)))
SERVER_DISCONNECT_REASONS = frozenset(
    (0x00, *range(0x80, 0x84), 0x87, 0x89, 0x8B, *range(0x8D, 0x91), *range(0x93, 0xA3))
)


def permitted(reason: int, reasons: frozenset[int]) -> int:
    """Return ``reason`` if it is one of ``reasons``, else `ReasonCode.UNSPECIFIED_ERROR`."""
    return reason if reason in reasons else ReasonCode.UNSPECIFIED_ERROR
