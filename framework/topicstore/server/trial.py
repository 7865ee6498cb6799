"""The commands and the program by which somebody tries a server."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any

__all__ = ["trial"]


def trial(host: str, port: int, *, login: tuple[str, str] | None = None, authority: Path | None = None) -> list[str]:
    """Return lines with example commands of mosquitto and an example program with paho-mqtt.

    login:     the user and the password; None for an anonymous client.
    authority: the certificate of the authority that clients trust; None for a listener without TLS.
    """
    at = ["-h", host, "-p", str(port)]
    options: dict[str, Any] = {"hostname": host, "port": port}
    if authority is not None:
        at += ["--cafile", str(authority)]
    if login is not None:
        at += ["-u", login[0], "-P", login[1]]
        options["auth"] = {"username": login[0], "password": login[1]}
    if authority is not None:
        options["tls"] = {"ca_certs": str(authority)}
    written = ", ".join(f"{name}={value!r}" for name, value in options.items())
    return [
        "Try it: the first of these keeps a session for the client 'display', also while that is away.",
        f"    mosquitto_sub {shlex.join(at)} -i display -c -q 1 -t 'home/#' -v",
        f"    mosquitto_pub {shlex.join(at)} -q 1 -t home/hall -m '21 degrees'",
        "Or from Python, with paho-mqtt:",
        "    from paho.mqtt import publish",
        f"    publish.single('home/hall', '22 degrees', qos=1, {written})",
    ]
