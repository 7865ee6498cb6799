"""A server as a program: it serves until a signal ends it."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
from collections.abc import Callable, Iterator, Mapping

import topicstore as ts

from .listeners import Reserved
from .logs import reopen
from .readiness import notify
from .server import Server
from .settings import ServerSettings
from .signals import Signals

__all__ = ["serve"]

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
