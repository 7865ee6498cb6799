"""The MQTT servers that are measured: `topicstore serve`, and other servers that may be installed."""

from __future__ import annotations

import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import attrs
from topicstore_conformance.conditions.ports import hold_port

__all__ = ["OURS", "SERVERS", "MqttServer"]

OURS = "topicstore"


@attrs.frozen(kw_only=True)
class MqttServer:
    """An MQTT server that can be started."""

    name: str
    command: Callable[[Path, int, bool], list[str]]
    """Returns the command for a directory, a port, and whether acknowledged messages must be fsynced."""
    syncs: bool
    """Whether the server can fsync messages before it acknowledges them."""
    missing: Callable[[], str | None]
    """Returns a text that names the package to install, or None if the server is installed."""

    @contextmanager
    def running(self, *, sync: bool = False) -> Iterator[tuple[int, int]]:
        """Run the server on an empty directory, at most as long as this process; yield its port and process id."""
        with tempfile.TemporaryDirectory(prefix="topicstore-bench-") as name:
            directory, (held, port) = Path(name), hold_port()
            log = directory / "server.log"
            with held, log.open("wb") as output:
                process = subprocess.Popen(  # noqa: S603 - the commands are defined below
                    ["/bin/sh", "-c", _WATCHED, "sh", *self.command(directory, port, sync)],
                    stdin=subprocess.PIPE,
                    stdout=output,
                    stderr=output,
                    start_new_session=True,  # Ctrl-C must not reach the server
                )
                try:
                    while not _listens(port):
                        if process.poll() is not None:
                            raise RuntimeError(f"{self.name} has ended: {log.read_text(errors='replace')}")
                        time.sleep(0.01)
                    yield port, process.pid
                finally:
                    process.terminate()
                    process.communicate(b"\n")


# The shell replaces itself by the server, so the server's process id is $$. A background shell waits for a line on a
# pipe. If the pipe ends without a line, because the benchmark's process was killed, that shell kills the server.
_WATCHED = 'exec 3<&0 </dev/null; (read -r line <&3 || kill -9 $$) >/dev/null 2>&1 & exec 3<&-; exec "$@"'


def _listens(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


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


SERVERS = [
    MqttServer(name=OURS, command=_topicstore, syncs=True, missing=lambda: None),
    MqttServer(
        name="mosquitto",
        command=_mosquitto,
        syncs=False,
        missing=lambda: None if _mosquitto_program() else "needs mosquitto: apt-get install mosquitto",
    ),
]
