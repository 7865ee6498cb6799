"""A server as a program: it serves until a signal ends it."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import os
import signal
from collections.abc import Callable, Iterator, Mapping

import topicstore as ts

from .readiness import notify
from .server import Server
from .settings import ServerSettings

__all__ = ["INTERRUPTED", "serve"]

INTERRUPTED = 130
"""The exit code after a second signal, which ends the program at once."""

_FULL = 2
"""The oldest generation of the garbage collector."""
_THAWED = 86_400.0
"""Seconds after which a full collection looks at everything again."""

_log = logging.getLogger("topicstore.server")


async def serve(
    db: ts.Database,
    settings: ServerSettings,
    *,
    ready: Callable[[Server], object],
    read: Callable[[], ServerSettings] | None = None,
    storages: Mapping[str, ts.Database] | None = None,
) -> None:
    """Serve until SIGTERM or SIGINT, then drain and return. A second one ends the process at once.

    SIGHUP reads certificates again, and with ``read`` all settings. ``ready`` is called in the event loop once clients
    are accepted. The database is not closed. ``read`` and ``storages`` are those of `Server`. Raises what
    `Server.__aenter__` and `Server.wait` raise.
    """
    async with Server(db, settings, read=read, storages=storages) as server:
        over = asyncio.Event()
        with _signals(over, server), _collecting_rarely():
            ready(server)
            failing = asyncio.ensure_future(server.wait())
            ending = asyncio.ensure_future(over.wait())
            try:
                await asyncio.wait((failing, ending), return_when=asyncio.FIRST_COMPLETED)
                if failing.done():
                    failing.result()
                notify("STOPPING=1")
                await server.drain()
            finally:
                for task in (failing, ending):
                    task.cancel()
                await asyncio.gather(failing, ending, return_exceptions=True)


@contextlib.contextmanager
def _collecting_rarely() -> Iterator[None]:
    """Let the garbage collector look at less, and less often: it costs a third of the time of a busy server.

    What lives for long, connections, sessions and subscriptions, is in no circles. A full collection of millions of
    them would hold up everybody for seconds: so what one collection has left is not looked at by the next. Once a day
    all is, for the circles that have formed since.
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


@contextlib.contextmanager
def _signals(over: asyncio.Event, server: Server) -> Iterator[None]:
    loop = asyncio.get_running_loop()
    reloading: set[asyncio.Task[None]] = set()

    def end() -> None:
        if over.is_set():
            os._exit(INTERRUPTED)  # whatever hangs, hangs no longer; what was acknowledged is stored
        over.set()

    def reload() -> None:
        task = loop.create_task(_reload(server))
        reloading.add(task)
        task.add_done_callback(reloading.discard)

    loop.add_signal_handler(signal.SIGTERM, end)
    loop.add_signal_handler(signal.SIGINT, end)
    loop.add_signal_handler(signal.SIGHUP, reload)
    try:
        yield
    finally:
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            loop.remove_signal_handler(number)


async def _reload(server: Server) -> None:
    try:
        await (server.reread() if server.can_reread else server.reload(server.settings))
    except (ts.TopicstoreError, OSError) as bad:
        _log.error("settings and certificates stay as they were: %s", bad)
