"""Notifications that the server is ready, reloads or ends: a line for scripts, datagrams for systemd."""

from __future__ import annotations

import logging
import os
import socket
import time
from collections.abc import Iterable, Sequence
from typing import Any

import msgspec

__all__ = ["notify", "notify_reloading", "ready_line"]

_log = logging.getLogger("topicstore.server")


def ready_line(listeners: Iterable[tuple[str, Sequence[str]]]) -> str:
    """Return a line of JSON with the addresses by URL scheme, and the process id.

    ``listeners`` are schemes (``mqtt``, ``mqtts``, ``ws``, ``wss``, ``http``) with the bound addresses. The keys
    ``mqtt``, ``ws`` and ``http`` are always present, with an empty list if there is no such listener.
    """
    document: dict[str, Any] = {"mqtt": [], "ws": [], "http": []}
    for scheme, addresses in listeners:
        document.setdefault(scheme, []).extend(addresses)
    return msgspec.json.encode({**document, "pid": os.getpid()}).decode()


def notify_reloading() -> bool:
    """Notify the service manager that a reload has begun; ``READY=1`` reports its end. Return whether it was sent.

    A service of ``Type=notify-reload`` must send the monotonic time too, in microseconds (systemd.service(5)).
    """
    return notify(f"RELOADING=1\nMONOTONIC_USEC={time.monotonic_ns() // 1_000}")


def notify(state: str) -> bool:
    """Send a state such as ``READY=1`` to the service manager (sd_notify(3)); return whether it was sent.

    Without a service manager nothing is sent. If its socket can't be written to, the error is only logged.
    """
    path = os.environ.get("NOTIFY_SOCKET", "")
    if not path or not hasattr(socket, "AF_UNIX"):
        return False
    address = f"\0{path[1:]}" if path.startswith("@") else path
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender:
            sender.connect(address)
            sender.send(state.encode())
    except OSError as bad:
        _log.warning("the service manager's socket %r can't be written to: %s", path, bad)
        return False
    return True
