"""What the server says to a person who has started it: where it listens, who may, what is durable, how to try it."""

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
    """Return the text, some lines.

    durability: the database's, which says what a commit survives.
    stored_by:  its backend and layout, for people.
    persisted:  the filters of its rules of persistence.
    urls:       of all listeners.
    mqtt:       addresses of those listeners that ``mosquitto_pub`` needs no certificates for.
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
    """Return which messages are kept, so that nobody wonders where those are that nobody waited for."""
    if not persisted:
        return "and of other messages what waits for sessions"
    return f"what waits for sessions, and what is published to {', '.join(persisted)}"


def _who(settings: ServerSettings) -> list[str]:
    """Return who may come in and do something."""
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
    """Return commands to begin with. ``named``: whether every client needs a user name and a password."""
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
