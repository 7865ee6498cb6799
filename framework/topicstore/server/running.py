"""A server as a program that serves until a signal ends it."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
from collections.abc import Callable, Iterator, Mapping

import topicstore as ts

from .listeners import Reserved
from .logs import reopen
from .readiness import notify, notify_reloading
from .server import Server
from .settings import ServerSettings
from .signals import Signals

__all__ = ["serve"]

_FULL = 2
"""The number of the garbage collector's oldest generation."""
_THAWED = 86_400.0
"""Seconds between two full collections that scan all objects."""

_log = logging.getLogger("topicstore.server")


async def serve(
    db: ts.Database,
    settings: ServerSettings,
    *,
    ready: Callable[[Server], object],
    read: Callable[[], ServerSettings] | None = None,
    storages: Mapping[str, ts.Database] | None = None,
    reserved: Reserved | None = None,
    signals: Signals | None = None,
) -> None:
    """Serve until SIGTERM or SIGINT, then drain and return. A second signal ends the process at once.

    SIGHUP reads certificates again, and with ``read`` all settings, while the server serves. ``ready`` is called in the
    event loop once clients are accepted. The database is not closed. ``read``, ``storages`` and ``reserved`` are the
    arguments of `Server`. ``signals`` is an entered `Signals`, which may have received signals before the call; by
    default a new one is entered. Raises what `Server.__aenter__` and `Server.wait` raise.
    """
    over, hung_up = asyncio.Event(), asyncio.Event()
    with contextlib.ExitStack() as entered:
        signals = signals if signals is not None else entered.enter_context(Signals())
        entered.enter_context(signals.handled(asyncio.get_running_loop(), end=over.set, reload=hung_up.set))
        if over.is_set():
            return
        async with Server(db, settings, read=read, storages=storages, reserved=reserved) as server:
            with _collecting_rarely():
                if not over.is_set():
                    ready(server)
                await _until(over, hung_up, server)
                notify("STOPPING=1")
                await server.drain()


async def _until(over: asyncio.Event, hung_up: asyncio.Event, server: Server) -> None:
    """Serve until ``over`` is set; raise what `Server.wait` raises."""
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
        notify("READY=1")  # also after a reload that failed: the server goes on with what it had
