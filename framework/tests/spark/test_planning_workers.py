"""Worker processes that PySpark's daemon starts to plan a query end without a traceback."""

from __future__ import annotations

import os
import socket
import struct
import subprocess
import sys
from pathlib import Path

import pytest
from topicstore_conformance.faults.threads import PATIENCE, wait_until

WORKER = """
import os
def main(infile, outfile):
    if "LOADS" in os.environ:
        import topicstore.spark.source
    try:
        while infile.read(1):  # until Java has closed the connection
            pass
    except OSError:
        pass
    outfile.write(b"rest")  # which the daemon flushes
"""


def runs(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    return True


@pytest.mark.parametrize("loads", [True, False])
def test_a_connection_that_is_closed_early_is_silent(tmp_path: Path, loads: bool) -> None:
    """A worker whose connection Java closes early ends silently if it has loaded the data source."""
    pytest.importorskip("pyspark", reason='needs pyspark: pip install "topicstore[spark]"')
    (tmp_path / "pyspark_worker_of_test.py").write_text(WORKER)
    how = {
        "PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path]),
        "PYTHON_WORKER_FACTORY_SECRET": "secret",
        "PYTHON_DAEMON_KILL_WORKER_ON_FLUSH_FAILURE": "1",
        **({"LOADS": "1"} if loads else {}),
    }
    with subprocess.Popen(
        [sys.executable, "-m", "pyspark.daemon", "pyspark_worker_of_test"],
        env={**os.environ, **how},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    ) as daemon:
        assert daemon.stdin is not None
        assert daemon.stdout is not None
        assert daemon.stderr is not None
        (port,) = struct.unpack("!i", daemon.stdout.read(4))
        with socket.create_connection(("127.0.0.1", port), PATIENCE) as java:
            java.sendall(struct.pack("!i", 6) + b"secret")
            answer = b""
            while len(answer) < 10:  # the worker's process id, then the length of "ok", then "ok"
                answer += java.recv(10 - len(answer))
            assert answer[4:] == struct.pack("!i", 2) + b"ok"
            # closing resets the connection, which discards unread data
            java.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        (worker,) = struct.unpack("!i", answer[:4])
        wait_until(lambda: not runs(worker), "the worker to end")
        daemon.stdin.close()  # closing its standard input ends the daemon
        told = daemon.stderr.read().decode()
    assert ("Error" in told) is not loads, told
