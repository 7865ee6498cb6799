"""MQTT servers that are measured: `topicstore serve`, and those that are installed beside it."""

from __future__ import annotations

import shutil
import socket
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import attrs
import msgspec
from topicstore_conformance.conditions.ports import hold_port

from topicstore_benchmarks.contenders import nats
from topicstore_benchmarks.contenders.server import Server

__all__ = ["OURS", "SERVERS", "MqttServer", "missing_servers"]

OURS = "topicstore"


@attrs.frozen(kw_only=True)
class MqttServer:
    """How a server is started."""

    name: str
    command: Callable[[Path, int, bool], list[str]]
    """Takes a directory, a port, and whether what is acknowledged must be on disk."""
    syncs: bool
    """Whether it can promise that."""
    missing: Callable[[], str | None]
    """Returns what to install, or None."""

    @contextmanager
    def running(self, *, sync: bool = False) -> Iterator[tuple[int, int]]:
        """Run the server on an empty directory; yields its port and process id."""
        with tempfile.TemporaryDirectory(prefix="topicstore-bench-") as name:
            directory = Path(name)
            held, port = hold_port()
            try:
                server = Server(self.command(directory, port, sync), directory / "server.log")
                try:
                    server.wait_for(lambda: _Reached(port)).close()
                    yield port, server.pid
                finally:
                    server.stop()
            finally:
                held.close()


class _Reached:
    """A connection that shows that a server listens."""

    def __init__(self, port: int) -> None:
        self._socket = socket.create_connection(("127.0.0.1", port), 60)

    def begin(self) -> None:
        """Say nothing."""

    def close(self) -> None:
        self._socket.close()


def _topicstore(directory: Path, port: int, sync: bool) -> list[str]:
    settings = directory / "settings.toml"
    settings.write_text('[durable_storage.messages]\ndurability = "sync"\n' if sync else "")
    options = ["--config", str(settings), "--listen", f"127.0.0.1:{port}"]
    return [sys.executable, "-m", "topicstore.cli", "serve", str(directory / "db"), *options]


def _mosquitto_program() -> str | None:
    return shutil.which("mosquitto") or shutil.which("/usr/sbin/mosquitto")


def _mosquitto(directory: Path, port: int, _sync: bool) -> list[str]:
    lines = [
        f"listener {port} 127.0.0.1",
        "allow_anonymous true",
        "max_inflight_messages 1000",
        "max_queued_messages 0",
        "set_tcp_nodelay true",
    ]
    (directory / "mosquitto.conf").write_text("\n".join(lines) + "\n")
    return [str(_mosquitto_program()), "-c", str(directory / "mosquitto.conf")]


def _nats(directory: Path, port: int, _sync: bool) -> list[str]:
    settings = {
        "host": "127.0.0.1",
        "port": -1,
        "server_name": "measured",
        "jetstream": {"store_dir": str(directory / "jetstream")},
        "mqtt": {"host": "127.0.0.1", "port": port, "max_ack_pending": 1_000},
    }
    file = directory / "nats.conf"
    file.write_bytes(msgspec.json.encode(settings))
    return [str(nats.program()), "--config", str(file)]


SERVERS = [
    MqttServer(name=OURS, command=_topicstore, syncs=True, missing=lambda: None),
    MqttServer(
        name="mosquitto",
        command=_mosquitto,
        syncs=False,
        missing=lambda: None if _mosquitto_program() else "needs mosquitto: apt-get install mosquitto",
    ),
    MqttServer(name="NATS", command=_nats, syncs=False, missing=nats.why_missing),
]


def missing_servers() -> dict[str, str]:
    """Return what to install for each server that isn't there."""
    return {server.name: reason for server in SERVERS if (reason := server.missing()) is not None}
