"""What a connection of MQTT is at, between its socket and its session."""

from __future__ import annotations

import enum

__all__ = ["State"]


class State(enum.IntEnum):
    """In this order; a connection may skip some of them."""

    NEW = 0
    """Nothing has come yet."""
    OPENING = 1
    """The CONNECT has come, and the CONNACK wasn't sent."""
    OPEN = 2
    LEAVING = 3
    """The DISCONNECT has come."""
    OVER = 4
    """The last word was said; what still comes is dropped."""
