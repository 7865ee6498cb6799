"""A server as a program: it serves until a signal ends it."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
from collections.abc import Callable, Mapping

import topicstore as ts

from .listeners import Reserved
from .logs import reopen
from .readiness import notify
from .server import Server
from .settings import ServerSettings
from .signals import Signals

__all__ = ["serve"]

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
    """Serve until SIGTERM or SIGINT, then drain and return. A second one ends the process at once.

    SIGHUP reads certificates again, and with ``read`` all settings. It is heeded once the server serves, and until it
    ends. ``ready`` is called in the event loop once clients are accepted. The database is not closed. ``read``,
    ``storages`` and ``reserved`` are those of `Server`. ``signals`` are entered ones, which may have come already.
    Raises what `Server.__aenter__` and `Server.wait` raise.
    """
    over, hung_up = asyncio.Event(), asyncio.Event()
    with contextlib.ExitStack() as entered:
        signals = signals if signals is not None else entered.enter_context(Signals())
        entered.enter_context(signals.handled(asyncio.get_running_loop(), end=over.set, reload=hung_up.set))
        if over.is_set():
            return
        async with Server(db, settings, read=read, storages=storages, reserved=reserved) as server:
            _collect_rarely()
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


def _collect_rarely() -> None:
    """Let the garbage collector look at less, and less often: it costs a third of the time of a busy server.

    What lives for long, connections and sessions, is in no circles; what does is found all the same, some time later.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(10_000, 10, 10)


async def _reload(hung_up: asyncio.Event, server: Server) -> None:
    """Reload after each SIGHUP, and after several that come during a reload once more."""
    while True:
        await hung_up.wait()
        hung_up.clear()
        reopen()
        try:
            await (server.reread() if server.can_reread else server.reload(server.settings))
        except (ts.TopicstoreError, OSError) as bad:
            _log.error("settings and certificates stay as they were: %s", bad)
        except Exception as fault:  # noqa: BLE001 - it is logged, and the next SIGHUP may go well
            _log.error("settings and certificates could not be read again", exc_info=fault)
