"""``topicstore serve`` as a child process, which the demo kills and restarts on the same port."""

from __future__ import annotations

import json
import selectors
import subprocess
import sys
from pathlib import Path

from topicstore.cli.terminal.exits import STORAGE, Failure

__all__ = ["PATIENCE", "Serving"]

PATIENCE = 120.0
"""The seconds without any progress after which the demo gives up; only a hanging server takes that long."""


class Serving:
    """A server process for the database ``path``, which runs from `start` to `kill` or `stop`."""

    def __init__(self, path: Path, log: Path) -> None:
        self._path, self._log = path, log
        self._process: subprocess.Popen[bytes] | None = None
        self.port = 0

    def start(self) -> None:
        """Start the server, and wait until it is ready. A restart uses the same port."""
        command = [sys.executable, "-m", "topicstore.cli", "serve", str(self._path), "--print-ready"]
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(  # noqa: S603 - this program
                [*command, "--listen", f"127.0.0.1:{self.port}"],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=log,
                start_new_session=True,  # Ctrl-C reaches only the demo, which then stops the server
            )
        self.port = int(json.loads(self._ready(self._process))["mqtt"][0].rpartition(":")[2])

    def _ready(self, process: subprocess.Popen[bytes]) -> bytes:
        assert process.stdout is not None  # noqa: S101 - it is a pipe
        with selectors.DefaultSelector() as selector:
            selector.register(process.stdout, selectors.EVENT_READ)
            line = process.stdout.readline() if selector.select(PATIENCE) else b""
        if not line:
            self.kill()
            raise Failure(f"the server did not start; see {self._log}", STORAGE)
        return line

    def kill(self) -> None:
        """Kill the server with SIGKILL, if it is running."""
        self._end(signal=9)

    def stop(self) -> None:
        """Stop the server with SIGTERM, and wait for its end."""
        self._end(signal=15)

    def _end(self, signal: int) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        with process:  # the context closes the pipe from the server's output
            process.send_signal(signal)
            try:
                process.wait(PATIENCE)
            except subprocess.TimeoutExpired:
                process.kill()
