"""The command ``topicstore serve``."""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import msgspec

from .command import check_installed, keep_option, naming, with_rules

if TYPE_CHECKING:
    from topicstore.server import Address, Server
    from topicstore.server.config.model import ListenerSettings, ServerSettings
    from topicstore.server.signals import Signals

__all__ = ["serve"]

_log = logging.getLogger("topicstore.server")

_DIRECTORY = Path("topicstore-data")
_EPILOG = """\b
Exit codes:
    0  served, and ended in order
    2  wrong usage, bad settings, or an address that can't be had
    3  not a database, or one that was created differently
    4  the database is open elsewhere
    5  storage failed: the engine, a full disk, corruption
  130  ended at once, by a second signal

SIGTERM and Ctrl-C end it in order, also while it starts: no more clients, DISCONNECT to all, commit, close. SIGHUP
reads the settings and certificates again, once it serves.
"""


@click.command(epilog=_EPILOG)
@click.argument("path", type=click.Path(path_type=Path), required=False)
@click.option(
    "--config",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="Settings in TOML; 'topicstore config init' prints them all.",
)
@click.option(
    "--listen",
    "listen",
    multiple=True,
    metavar="HOST:PORT",
    help="Listen there, instead of where the settings say; ws://HOST:PORT/mqtt for WebSocket. Port 0 takes a free "
    "one.  [default: 127.0.0.1:1883]",
)
@click.option(
    "--http",
    multiple=True,
    metavar="HOST:PORT",
    help="Serve HTTP there, instead of where the settings say; port 0 takes a free one. With --listen and without "
    "this option HTTP isn't served.  [default: 127.0.0.1:18083]",
)
@click.option(
    "--store",
    multiple=True,
    metavar="FILTER",
    help="Store all messages published to FILTER, whether or not a session waits for them; '#' for all. The rule "
    "stays in the database until it is removed on the page or over HTTP.",
)
@keep_option("Without --store, a TIME alone stores all messages.")
@click.option(
    "--cluster",
    metavar="URL",
    help="Share the messages with other servers through the log store at URL, such as s3://bucket/prefix or "
    "file:///directory; with --site.",
)
@click.option("--site", metavar="NAME", help="The name of this server in the cluster.")
@click.option("--print-ready", is_flag=True, help="Print one line of JSON once it serves, and nothing else.")
def serve(
    path: Path | None,
    config: Path | None,
    listen: tuple[str, ...],
    http: tuple[str, ...],
    store: tuple[str, ...],
    keep: tuple[str, ...],
    cluster: str | None,
    site: str | None,
    *,
    print_ready: bool,
) -> None:
    """Serve the database PATH to clients of MQTT 3.1.1 and 5, and over HTTP.

    PATH is a directory, created where there is none; by default it is topicstore-data in the current directory. Without
    settings only clients on this machine can connect, without a password.

    \b
    Examples:
      topicstore serve
      topicstore serve data --keep 30d --keep 'alarms/#=infinity'
      topicstore serve data --store 'sensors/#' --keep 1w
      topicstore serve --config server.toml
      topicstore serve data --cluster s3://bucket/plant --site hall-1
    """  # noqa: D301 - click wants the character
    from topicstore.server.signals import Signals

    with Signals() as signals:
        check_installed()
        with _importing():
            from topicstore.server.config.load import Variable, read_settings

        given = (("--cluster", "url", cluster), ("--site", "site", site))
        options = [Variable(name, ("cluster", key), value) for name, key, value in given if value is not None]

        def read(*, empty_ok: bool = False) -> ServerSettings:
            found = _with_arguments(read_settings(config, empty_ok=empty_ok, options=options), listen, http)
            sessions = with_rules(found.durable_sessions, store, keep)
            return msgspec.structs.replace(found, durable_sessions=sessions)

        settings = read(empty_ok=True)

        where = path or settings.messages.data_dir or _DIRECTORY
        _run(settings, read, config, where, signals, print_ready=print_ready)


@contextmanager
def _importing() -> Iterator[None]:
    """Disable the garbage collector, which would scan imported modules many times; exempt their objects at the end."""
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


def _with_arguments(settings: ServerSettings, listen: tuple[str, ...], http: tuple[str, ...]) -> ServerSettings:
    """Return settings in which the options of the command line override the file."""
    from topicstore.server.config.model import HttpSettings

    if listen:
        listeners: dict[str, ListenerSettings] = {}
        for number, text in enumerate(listen):
            one = _listener(text)
            name = f"{one.protocol}@{one.listen}"
            listeners[name if name not in listeners else f"{name}#{number}"] = one
        settings = msgspec.structs.replace(settings, listeners=listeners, http=None)
    if http:
        from topicstore.server.config.units import Addresses

        section = settings.http if settings.http is not None else HttpSettings()
        section = msgspec.structs.replace(section, listen=Addresses.read([_address(one, "--http") for one in http]))
        settings = msgspec.structs.replace(settings, http=section)
    return settings


def _listener(text: str) -> ListenerSettings:
    from topicstore.server.config.model import ListenerSettings

    scheme, separator, rest = text.rpartition("://")
    place, slash, path = rest.partition("/")
    if (separator and scheme not in ("mqtt", "ws")) or (slash and scheme != "ws"):
        hint = "; a listener with TLS is one of the settings (--config)" if scheme in ("mqtts", "wss") else ""
        raise click.BadParameter(
            f"{text!r} is neither HOST:PORT nor ws://HOST:PORT/PATH{hint}", param_hint="'--listen'"
        )
    address = _address(place, "--listen")
    if scheme == "ws":
        return ListenerSettings(listen=address, protocol="websocket", path=f"/{path}" if path else "/mqtt")
    return ListenerSettings(listen=address)


def _address(text: str, option: str) -> Address:
    from topicstore.server.config.units import Address

    with naming(option):
        return Address(text)


def _run(
    settings: ServerSettings,
    read: Callable[[], ServerSettings],
    config: Path | None,
    path: Path,
    signals: Signals,
    *,
    print_ready: bool,
) -> None:
    with _importing():
        import asyncio

        from topicstore.server import running
        from topicstore.server import running as readiness
        from topicstore.server.config.model import MESSAGES
        from topicstore.server.databases import opened, places
        from topicstore.server.listeners import Reserved
        from topicstore.server.logs import logging_to
        from topicstore.server.reload import check_files
        from topicstore.server.resource_limits import raise_limit
        from topicstore.server.running import banner
        from topicstore.storage.directory.manifest import read_manifest

    with ExitStack() as entered:
        entered.enter_context(logging_to(settings.log))
        raise_limit()  # of open files, before engines open any
        reserved = entered.enter_context(Reserved(settings))
        if any(read_manifest(directory) is None for _, _, directory in places(settings, path)):
            check_files(settings)  # an invalid file must not leave a new, empty database
        if signals.ended:
            return
        cluster = None
        if settings.cluster is not None:
            from topicstore.server.cluster import cluster_of

            cluster = cluster_of(settings, reserved)
        storages = entered.enter_context(opened(settings, path, cluster))
        db = storages[MESSAGES]

        def ready(server: Server) -> None:
            found: list[tuple[str, Sequence[str]]] = [(one.via.scheme, one.addresses) for one in server.listeners]
            if server.http is not None:
                found.append((server.http.scheme, server.http.addresses))
            if print_ready:
                text = readiness.ready_line(found)
            else:
                manifest = db.manifest
                text = banner(
                    settings,
                    path.absolute(),
                    durability=manifest.durability,
                    kept=db.info().kept,
                    stores=bool(db.persistence),
                    cluster=None if settings.cluster is None else (settings.cluster.site, settings.cluster.url),
                    stored_by=f"backend {manifest.backend}, layout {manifest.layout}, durability {manifest.durability}",
                    urls=[url for one in server.listeners for url in one.urls] + server.urls_of_http,
                    mqtt=[address for scheme, addresses in found if scheme == "mqtt" for address in addresses],
                )
            try:
                click.echo(text)
            except BrokenPipeError:  # the lost line is only information
                _log.warning("what is said to whoever started the server can't be written: nobody reads it")
            readiness.notify("READY=1")

        with asyncio.Runner(loop_factory=_loop_factory()) as runner:
            runner.run(
                running.serve(
                    db,
                    settings,
                    ready=ready,
                    read=read,
                    file=config,
                    storages=storages,
                    reserved=reserved,
                    signals=signals,
                )
            )


def _loop_factory() -> Any:
    """Return uvloop's loop factory if uvloop is installed; None for asyncio's event loop."""
    try:
        import uvloop
    except ImportError:
        return None
    return uvloop.new_event_loop
