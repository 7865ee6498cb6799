"""A server that runs short of file descriptors keeps serving, and accepts writes again afterwards."""

from __future__ import annotations

import contextlib
import itertools
import json
import resource
import socket
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
import topicstore as ts
from topicstore_conformance.conditions.skipping import need
from topicstore_conformance.faults.threads import wait_until
from topicstore_conformance.mqtt import wire
from topicstore_conformance.mqtt.raw_client import RawClient
from topicstore_conformance.mqtt.serving import Serving, serving

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="needs prlimit(2), which Linux has")

FILES = 256
"""The limit on the server's file descriptors."""
SETTINGS = """
[durable_storage.messages]
backend = "{backend}"
[durable_storage.messages.options.{backend}]
{small}
[[durable_sessions.persistence]]
topic_filter = "#"
[limits]
connect_timeout = "2s"
"""
SMALL = {
    "rocksdb": "write_buffer_bytes = 65536",
    "leveldb": "write_buffer_bytes = 65536",
    "duckdb": "log_bytes = 65536",
}


@contextlib.contextmanager
def short_of_files(tmp_path: Path, backend: str = "rocksdb") -> Iterator[Serving]:
    """Run a server with few descriptors, and with engine buffers so small that new files are soon needed."""
    (tmp_path / "settings.toml").write_text(SETTINGS.format(backend=backend, small=SMALL[backend]))
    limit = partial(resource.setrlimit, resource.RLIMIT_NOFILE, (FILES, FILES))
    with serving(
        tmp_path / "db", "--config", str(tmp_path / "settings.toml"), "--http", "127.0.0.1:0", preexec_fn=limit
    ) as server:
        yield server


def crowd(server: Serving, stack: contextlib.ExitStack) -> list[socket.socket]:
    """Open as many sockets as the server has descriptors, and send nothing on them."""
    return [stack.enter_context(socket.create_connection(("127.0.0.1", server.port))) for _ in range(FILES)]


def in_use(server: Serving) -> int:
    """Return the number of descriptors that the server has open."""
    return sum(1 for _ in Path(f"/proc/{server.pid}/fd").iterdir())


def stored(client: RawClient, topic: str) -> bool:
    """Publish a message; return whether the server stored it."""
    return client.publish(topic, bytes(9_000), 1).reason < 0x80


@pytest.mark.parametrize("backend", ["rocksdb", "leveldb", "duckdb"])
def test_sockets_that_say_nothing_leave_the_engine_its_files(tmp_path: Path, backend: str) -> None:
    """Idle sockets can't take the engine's descriptors: those above the limit are closed, and the log says so.

    A connected client can still publish.
    """
    need(backend)
    with short_of_files(tmp_path, backend) as server, server.client() as client, contextlib.ExitStack() as stack:
        client.connect("there")
        crowd(server, stack)
        for number in range(40):
            assert stored(client, f"a/{number}")
        assert in_use(server) < FILES
        wait_until(lambda: "connections were refused" in server.log(), "the log to say it")
        assert "limits.connections is 100000" in server.log()
        assert "takes no writes" not in server.log()


def test_sockets_that_say_nothing_are_closed_in_time(tmp_path: Path) -> None:
    """Sockets that send no CONNECT are closed after the connect timeout, so that other clients can connect."""
    with short_of_files(tmp_path) as server, contextlib.ExitStack() as stack:
        for one in crowd(server, stack):
            with contextlib.suppress(ConnectionResetError):
                assert one.recv(1) == b""
        with server.client() as client:
            assert client.connect("late").reason == 0


def test_clients_above_the_bound_are_refused_with_a_reason(tmp_path: Path) -> None:
    """Clients above the limit are refused with reason code 0x97."""
    with short_of_files(tmp_path) as server, contextlib.ExitStack() as stack:
        reasons = []
        for number in range(FILES):
            client = stack.enter_context(server.client())
            try:
                client.send(wire.connect(f"client {number}"))
                reasons.append(client.expect("CONNACK").reason)
            except (AssertionError, OSError):  # the server closed this connection for lack of descriptors
                break
        assert reasons[0] == 0
        assert len(reasons) > 20
        assert set(reasons) <= {0, 0x97}


def test_writing_goes_on_when_descriptors_come_back(tmp_path: Path) -> None:
    """When descriptors are free again, the server reopens the shard, logs it, and has all acknowledged messages."""
    with short_of_files(tmp_path) as server, server.client() as client:
        client.connect("there")
        acknowledged = [topic for number in range(20) if stored(client, topic := f"a/{number}")]
        used = in_use(server)
        resource.prlimit(server.pid, resource.RLIMIT_NOFILE, (used - 1, FILES))
        acknowledged += itertools.takewhile(partial(stored, client), (f"a/{number}" for number in range(20, 2_000)))
        assert len(acknowledged) < 2_000
        resource.prlimit(server.pid, resource.RLIMIT_NOFILE, (FILES, FILES))
        wait_until(lambda: stored(client, "after"), "writing to go on")
        wait_until(lambda: "was opened again at try" in server.log(), "the log to say it")
        server.stop()
        with ts.open(tmp_path / "db") as db:
            there = {message.topic for message in db.replay("#")}
            assert {*acknowledged, "after"} <= there


@pytest.mark.parametrize(
    ("wanted", "levels"), [("", ["info"]), ("connections = 9_000", ["warning"]), ("connections = 9", [])]
)
def test_the_log_says_what_the_descriptors_are_enough_for(tmp_path: Path, wanted: str, levels: list[str]) -> None:
    """The log warns if the settings allow more connections than there are file descriptors for.

    The log omits a lower limit, and states the default limit without a warning.
    """
    (tmp_path / "settings.toml").write_text(f"[limits]\n{wanted}\n")
    limit = partial(resource.setrlimit, resource.RLIMIT_NOFILE, (4_000, 4_000))
    with serving(tmp_path / "db", "--config", str(tmp_path / "settings.toml"), preexec_fn=limit) as server:
        server.stop()  # a thread writes the log; all of it is written when the server has ended
        lines = map(json.loads, server.log().splitlines())
        assert levels == [one["level"] for one in lines if one["event"].startswith("limits.connections is")]
