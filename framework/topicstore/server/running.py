"""A server as a program that serves until a signal ends it.

At its start it prints a banner: addresses, access, durability, and commands to try. When it is ready, and when it ends,
it prints a line for scripts and sends a datagram to systemd.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import os
import shlex
import socket
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

import topicstore as ts

from .config.model import ServerSettings
from .config.units import Address, is_loopback
from .listeners import Reserved
from .logs import reopen
from .server import Server
from .signals import Signals

__all__ = ["access", "banner", "notify", "notify_reloading", "ready_line", "serve", "trial"]


def banner(
    settings: ServerSettings,
    path: Path,
    *,
    durability: str,
    cluster: tuple[str, str] | None = None,
    stored_by: str,
    kept: Sequence[str],
    stores: bool,
    urls: Sequence[str],
    mqtt: Sequence[str],
) -> str:
    """Return the lines that a server prints when it starts: its addresses, its durability, and who may connect.

    durability: the database's durability, ``commit`` or ``sync``.
    cluster:    the name of the server among the sites of its cluster, and the URL of their log store, if there is one.
    stored_by:  the names of the database's backend and layout.
    kept:       `DatabaseInfo.kept`: the rules by which messages are stored, and how long they stay.
    stores:     whether the database has persistence rules.
    urls:       URLs of all listeners.
    mqtt:       addresses of the listeners for which ``mosquitto_pub`` needs no certificates.
    """
    survives = "power loss" if durability == "sync" else "the death of this process, not power loss"
    shares = None
    if cluster is not None:
        shares, survives = (
            f"It is site {cluster[0]} of the cluster at {cluster[1]}.",
            "whatever that log store survives",
        )
    lines = [
        "topicstore serves MQTT 3.1.1 and 5 at",
        *(f"    {url}" for url in urls),
        "",
        f"It keeps messages, sessions and retained messages in {path}",
        f"({stored_by}). What it has acknowledged survives {survives}.",
        *([] if shares is None else [shares]),
        *(f"    {sentence[:1].upper()}{sentence[1:]}." for sentence in kept),
        *([] if stores else ["To store all messages for 30 days: topicstore serve --keep 30d"]),
        "",
        access(settings),
        "",
    ]
    if mqtt:
        everywhere = {"0.0.0.0": "127.0.0.1", "::": "::1"}  # noqa: S104 - it is read, not bound
        address = Address(mqtt[0])
        login = ("USER", "PASSWORD") if settings.authentication.anonymous == "never" else None
        lines += [*trial(everywhere.get(address.host, address.host), address.port, login=login), ""]
    return "\n".join([*lines, "Ctrl-C ends it in order."])


def access(settings: ServerSettings) -> str:
    """Return which clients may connect, and their permissions, as sentences."""
    usual = settings.authentication.anonymous
    [anonymous, *others] = dict.fromkeys(one.anonymous or usual for one in settings.listeners.values())
    found = {
        "loopback": "Clients on this machine need no password",
        "never": "Every client needs a password or a certificate",
        "always": "No client needs a password",
    }[anonymous]
    if others:
        found = "Each listener says which clients need a password"
    rights = settings.authorization
    if rights.unlisted is not None or rights.rules or rights.plugins:
        rest = "what they may do, the section [authorization] says."
    elif all(is_loopback(one.listen.host) for one in settings.listeners.values()):
        rest = "they may do everything. Nobody else can connect."
    else:
        rest = "those on this machine may do everything. Others may do nothing until [[authorization.rules]] allow it."
    return f"{found}; {rest}"


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
    """Notify the service manager that a reload has begun; return whether the notification was sent.

    ``READY=1`` reports the end of the reload. A service of ``Type=notify-reload`` must send the monotonic time too, in
    microseconds (systemd.service(5)).
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


_FULL = 2
"""The number of the garbage collector's oldest generation."""
_THAWED = 86_400.0
"""Seconds between two full collections that scan all objects."""


async def serve(
    db: ts.Database,
    settings: ServerSettings,
    *,
    ready: Callable[[Server], object],
    read: Callable[[], ServerSettings] | None = None,
    file: Path | None = None,
    storages: Mapping[str, ts.Database] | None = None,
    reserved: Reserved | None = None,
    signals: Signals | None = None,
) -> None:
    """Serve until SIGTERM or SIGINT, then drain and return. A second signal ends the process at once.

    SIGHUP reads certificates again, and with ``read`` all settings, while the server serves. ``ready`` is called in the
    event loop once clients are accepted. The database is not closed. ``read``, ``file``, ``storages`` and ``reserved``
    are the arguments of `Server`. ``signals`` is an entered `Signals`, which may have received signals before the call;
    by default a new one is entered. Raises the errors of `Server.__aenter__` and `Server.wait`.
    """
    over, hung_up = asyncio.Event(), asyncio.Event()
    with contextlib.ExitStack() as entered:
        signals = signals if signals is not None else entered.enter_context(Signals())
        entered.enter_context(signals.handled(asyncio.get_running_loop(), end=over.set, reload=hung_up.set))
        if over.is_set():
            return
        async with Server(db, settings, read=read, file=file, storages=storages, reserved=reserved) as server:
            with _collecting_rarely():
                if not over.is_set():
                    ready(server)
                await _until(over, hung_up, server)
                notify("STOPPING=1")
                await server.drain()


async def _until(over: asyncio.Event, hung_up: asyncio.Event, server: Server) -> None:
    """Serve until ``over`` is set. Raises the errors of `Server.wait`."""
    failing = asyncio.ensure_future(server.wait())
    ending = asyncio.ensure_future(over.wait())
    reloading = asyncio.ensure_future(_reload(hung_up, server))
    try:
        await asyncio.wait((failing, ending), return_when=asyncio.FIRST_COMPLETED)
        if failing.done():
            failing.result()
    finally:
        for task in (failing, ending, reloading):
            task.cancel()
        await asyncio.gather(failing, ending, reloading, return_exceptions=True)


@contextlib.contextmanager
def _collecting_rarely() -> Iterator[None]:
    """Reduce the work of the garbage collector, which otherwise takes a third of a busy server's time.

    Long-lived objects such as connections, sessions and subscriptions are in no reference cycles. A full collection of
    millions of them would block the event loop for seconds. So objects that survive a full collection are frozen
    (`gc.freeze`). Once a day they are unfrozen, to collect cycles that have formed since.
    """

    def keep(phase: str, info: dict[str, int]) -> None:
        if phase == "stop" and info["generation"] == _FULL:
            gc.freeze()

    async def thaw() -> None:
        while True:
            await asyncio.sleep(_THAWED)
            gc.unfreeze()

    before, thawing = gc.get_threshold(), asyncio.ensure_future(thaw())
    gc.callbacks.append(keep)
    gc.collect()
    gc.set_threshold(5_000, 5, 2)
    try:
        yield
    finally:
        thawing.cancel()
        gc.callbacks.remove(keep)
        gc.set_threshold(*before)


async def _reload(hung_up: asyncio.Event, server: Server) -> None:
    """Reload after each SIGHUP; several signals during a reload cause one more."""
    while True:
        await hung_up.wait()
        hung_up.clear()
        notify_reloading()
        reopen()
        try:
            await (server.reread() if server.can_reread else server.reload(server.settings))
        except (ts.TopicstoreError, OSError) as bad:
            _log.error("settings and certificates stay as they were: %s", bad)
        except Exception as fault:  # noqa: BLE001 - it is logged, and the next SIGHUP may go well
            _log.error("settings and certificates could not be read again", exc_info=fault)
        notify("READY=1")  # after a failed reload, too: the server continues with its earlier settings


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
