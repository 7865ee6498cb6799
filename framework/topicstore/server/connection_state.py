"""The states of an MQTT connection."""

from __future__ import annotations

import enum

__all__ = ["State"]


class State(enum.IntEnum):
    """The state of an MQTT connection. States follow in this order; a connection may skip some."""

    NEW = 0
    """No packet was received."""
    OPENING = 1
    """The CONNECT was received, and the CONNACK not sent yet."""
    OPEN = 2
    LEAVING = 3
    """The DISCONNECT was received, and the session not disconnected yet."""
    OVER = 4
    """The last packet was sent; packets that still arrive are dropped."""
