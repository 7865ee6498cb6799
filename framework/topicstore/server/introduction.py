"""The text that the server prints at its start: addresses, access, durability, and commands to try."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from .addresses import Address, is_loopback
from .settings import ServerSettings

__all__ = ["introduction"]


def introduction(
    settings: ServerSettings,
    path: Path,
    *,
    durability: str,
    stored_by: str,
    persisted: Sequence[str],
    urls: Sequence[str],
    mqtt: Sequence[str],
) -> str:
    """Return the text in several lines.

    durability: the database's durability, ``commit`` or ``sync``.
    stored_by:  names of its backend and layout.
    persisted:  topic filters of its persistence rules.
    urls:       URLs of all listeners.
    mqtt:       addresses of the listeners for which ``mosquitto_pub`` needs no certificates.
    """
    survives = "power loss" if durability == "sync" else "the death of this process, not power loss"
    lines = [
        "topicstore serves MQTT 3.1.1 and 5 at",
        *(f"    {url}" for url in urls),
        "",
        f"It keeps sessions, retained messages, {_kept(persisted)} in {path}",
        f"({stored_by}). What it has acknowledged survives {survives}.",
        "",
        *_who(settings),
        "",
    ]
    if mqtt:
        lines += _trial(Address(mqtt[0]), named=settings.authentication.anonymous == "never")
    return "\n".join([*lines, "Ctrl-C ends it in order."])


def _kept(persisted: Sequence[str]) -> str:
    """Describe which messages are stored, because by default messages without a waiting session are not."""
    if not persisted:
        return "and of other messages what waits for sessions"
    return f"what waits for sessions, and what is published to {', '.join(persisted)}"


def _who(settings: ServerSettings) -> list[str]:
    """Describe which clients may connect, and what they may do."""
    found = {
        "loopback": "Clients on this machine need no password",
        "never": "Every client needs a password or a certificate",
        "always": "No client needs a password",
    }[settings.authentication.anonymous]
    rights = settings.authorization
    if rights.unlisted is not None or rights.rules or rights.plugins:
        rest = "what they may do, the section [authorization] says."
    elif all(is_loopback(one.listen.host) for one in settings.listeners.values()):
        rest = "they may do everything. Nobody else can connect."
    else:
        rest = "those on this machine may do everything. Others may do nothing until [[authorization.rules]] allow it."
    return [f"{found}; {rest}"]


def _trial(address: Address, *, named: bool) -> list[str]:
    """Return example commands. ``named``: whether every client needs a user name and a password."""
    everywhere = {"0.0.0.0": "127.0.0.1", "::": "::1"}  # noqa: S104 - it is read, not bound
    host = everywhere.get(address.host, address.host)
    at = f"-h {host} -p {address.port}" + " -u USER -P PASSWORD" * named
    auth = ", auth={'username': 'USER', 'password': 'PASSWORD'}" if named else ""
    return [
        "Try it: the first of these keeps a session for the client 'display', also while that is away.",
        f"    mosquitto_sub {at} -i display -c -q 1 -t 'home/#' -v",
        f"    mosquitto_pub {at} -q 1 -t home/hall -m '21 degrees'",
        "Or from Python, with paho-mqtt:",
        "    from paho.mqtt import publish",
        f"    publish.single('home/hall', '22 degrees', qos=1, hostname='{host}', port={address.port}{auth})",
        "",
    ]
