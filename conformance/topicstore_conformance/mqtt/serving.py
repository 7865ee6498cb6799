"""``topicstore serve`` as a child process, which can be killed and started again on the same port."""

from __future__ import annotations

import contextlib
import os
import selectors
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec

from topicstore_conformance.conditions.ports import hold_port
from topicstore_conformance.faults.threads import PATIENCE

from .raw_client import RawClient

__all__ = ["Serving", "serving"]


class Serving:
    """A server process on a database, which is created if it doesn't exist. `start` starts the process.

    path:      the database's directory, or None for the directory in the settings.
    arguments: further arguments of the command.
    listen:    whether the server listens on `port` instead of the addresses in the settings.
    options:   options of `subprocess.Popen`, such as ``cwd`` and ``env``.
    """

    def __init__(self, path: Path | None, *arguments: str, listen: bool = True, **options: Any) -> None:
        self.path, self.arguments, self._listen, self._options = path, arguments, listen, options
        self._held, self.port = hold_port()
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 - closed by `close`
        self._process: subprocess.Popen[bytes] | None = None
        self.ready: dict[str, Any] = {}
        """The JSON object that the server printed when it was ready."""

    def command(self) -> list[str]:
        """Return the command that starts the server."""
        path = [] if self.path is None else [str(self.path)]
        listen = ["--listen", f"127.0.0.1:{self.port}"] if self._listen else []
        return [sys.executable, "-m", "topicstore.cli", "serve", *path, *listen, *self.arguments]

    def start(self) -> None:
        """Start the server, and return when it serves."""
        assert self._process is None, "the server runs already"
        self._process = process = subprocess.Popen(
            [*self.command(), "--print-ready"],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=self._log,
            **self._options,
        )
        assert process.stdout is not None
        with selectors.DefaultSelector() as selector:
            selector.register(process.stdout, selectors.EVENT_READ)
            assert selector.select(PATIENCE), f"the server isn't ready after {PATIENCE:.0f} seconds: {self.log()}"
        line = process.stdout.readline()
        assert line, f"the server ended before it was ready: {self.log()}"
        self.ready = msgspec.json.decode(line)
        assert self.ready["pid"] == process.pid

    @property
    def pid(self) -> int:
        """Return the process id of the server."""
        assert self._process is not None
        return self._process.pid

    @property
    def alive(self) -> bool:
        """Whether the process runs."""
        return self._process is not None and self._process.poll() is None

    @property
    def stopped(self) -> bool:
        """Whether the server was never started, or was killed or stopped by this object and not started again."""
        return self._process is None

    def log(self) -> str:
        """Return the standard error of all processes that this object has started."""
        size = os.fstat(self._log.fileno()).st_size
        return os.pread(self._log.fileno(), size, 0).decode(errors="replace")

    def signal(self, number: int) -> None:
        """Send a signal to the process."""
        assert self._process is not None
        self._process.send_signal(number)

    def kill(self) -> None:
        """Kill the process with SIGKILL."""
        if self._process is not None:
            self._process.kill()
            self._ended()

    def stop(self) -> int:
        """Stop the server with SIGTERM, and return its exit code."""
        assert self._process is not None
        self._process.terminate()
        return self._ended()

    def _ended(self) -> int:
        process, self._process = self._process, None
        assert process is not None
        try:
            with contextlib.closing(process.stdout or self._log):
                return process.wait(PATIENCE)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            raise

    def restart(self) -> None:
        """Kill the process, and start the server again on the same port and database."""
        self.kill()
        self.start()

    def client(self, *, version: int = 5) -> RawClient:
        """Return a new connection to the server, on which no packet was sent yet."""
        return RawClient(self.port, version=version)

    def close(self) -> None:
        """Kill the process if it runs, and release the port and the log."""
        self.kill()
        self._held.close()
        self._log.close()

    def memory(self) -> int:
        """Return the resident memory of the server in bytes."""
        return int(Path(f"/proc/{self.pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@contextmanager
def serving(path: Path | None, *arguments: str, listen: bool = True, **options: Any) -> Iterator[Serving]:
    """Serve a database during a ``with`` block. The block fails if the server ended by itself."""
    server = Serving(path, *arguments, listen=listen, **options)
    try:
        server.start()
        yield server
        assert server.alive or server.stopped, f"the server has ended: {server.log()}"
    except BaseException as error:
        error.add_note(f"The server's log:\n{server.log()[-4_000:]}")
        raise
    finally:
        server.close()
