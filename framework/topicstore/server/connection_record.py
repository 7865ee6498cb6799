"""The record that the log has of an ended connection."""

from __future__ import annotations

import msgspec

__all__ = ["ConnectionRecord"]


class ConnectionRecord(msgspec.Struct, kw_only=True):
    """The log record of one connection, from the socket's opening to its end. It contains no secrets."""

    client_id: str = ""
    """Empty if there was no CONNECT."""
    listener: str
    address: str
    version: int = 0
    """4 for MQTT 3.1.1, 5 for MQTT 5, 0 if there was no CONNECT."""
    reason: str = "the client closed the connection"
    code: int | None = None
    """The reason code with which the connection ended, if there was one."""
    session_present: bool = False
    packets_in: int = 0
    packets_out: int = 0
    messages_in: int = 0
    messages_out: int = 0
    bytes_in: int = 0
    bytes_out: int = 0
    seconds: float = 0.0
