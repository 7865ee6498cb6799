"""Hostile clients over real sockets: the server survives, other clients are served, and resources are released.

The tests count sockets of the server's process, and compare its memory after rounds of the same load.
"""

from __future__ import annotations

import contextlib
import random
import socket
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
from topicstore_conformance.conditions.directories import quick_directory
from topicstore_conformance.conditions.skipping import need
from topicstore_conformance.conditions.tries import tries
from topicstore_conformance.faults.threads import wait_until
from topicstore_conformance.mqtt import wire
from topicstore_conformance.mqtt.changed_packets import Changes, samples
from topicstore_conformance.mqtt.raw_client import NEVER, RawClient
from topicstore_conformance.mqtt.serving import Serving, serving

pytestmark = pytest.mark.slow

MB = 1 << 20
SETTINGS = """
[limits]
connect_timeout = "{timeout}s"
packet_size = "20MB"
subscriptions = {filters}
"""
FILTERS = tries(quick=2_000, full=10_000)
"""The limit on a client's filters."""
LARGE = 16 << 20
ROUNDS = 4


@contextmanager
def served(timeout: int) -> Iterator[Serving]:
    """Run a server whose clients have this many seconds to send a CONNECT."""
    need("rocksdb")
    with quick_directory() as directory:
        file = Path(directory) / "settings.toml"
        file.write_text(SETTINGS.format(filters=FILTERS, timeout=timeout))
        with serving(Path(directory) / "db", "--config", str(file)) as server:
            yield server


@pytest.fixture(scope="module")
def mqtt() -> Iterator[Serving]:
    """A server that cuts no client off, however slow this machine is."""
    with served(timeout=3600) as server:
        yield server


def accepted(server: Serving, client_id: str, version: int, clients: ExitStack) -> RawClient:
    """Connect a client until a CONNACK arrives, and return it; retry if the server cuts the connection off."""
    while True:
        client = clients.enter_context(server.client(version=version))
        client.send(wire.connect(client_id, version=version))
        if (packet := client.receive()) is not None:
            assert packet.reason == 0
            return client


@contextmanager
def bystanders(server: Serving, name: str) -> Iterator[Callable[[], None]]:
    """Connect two clients, and yield a check that one receives exactly the message that the other publishes."""
    with ExitStack() as clients:
        reader = accepted(server, f"{name}-reader", 5, clients)
        writer = accepted(server, f"{name}-writer", 4, clients)
        reader.subscribe(f"{name}/#", options=1)
        count = 0

        def check() -> None:
            nonlocal count
            count += 1
            writer.publish(f"{name}/x", b"%d" % count)
            packet = reader.expect("PUBLISH")
            assert (packet.topic, packet.payload) == (f"{name}/x", b"%d" % count)
            reader.acknowledge(packet)

        check()
        yield check
        check()


@pytest.fixture
def noticing(mqtt: Serving, name: str) -> Iterator[Callable[[], None]]:
    """Return a check that other clients are served; the check also runs at the end of the test."""
    with bystanders(mqtt, name) as check:
        yield check


def sockets(server: Serving) -> int:
    """Return the number of sockets of the server's process."""
    found = 0
    for descriptor in Path(f"/proc/{server.pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # the descriptor was closed meanwhile
            found += str(descriptor.readlink()).startswith("socket:")
    return found


def rounds(server: Serving, work: Callable[[], None], most: int = 24 * MB) -> None:
    """Repeat the same work, and check that all sockets are released and memory doesn't grow with the rounds."""
    if not Path(f"/proc/{server.pid}/fd").is_dir():
        pytest.skip("needs /proc, where sockets and memory of a process are counted")
    before = sockets(server)
    used = []
    for _ in range(ROUNDS):
        work()
        wait_until(lambda: sockets(server) <= before, "the server has closed all connections")
        used.append(server.memory())
    assert used[-1] - used[0] < most, [one // MB for one in used]


def ended(client: RawClient) -> None:
    """Close the sending side, and read until the server closes the connection."""
    with contextlib.suppress(OSError):  # the server closed the connection first
        client.socket.shutdown(socket.SHUT_WR)
    drain(client)


def drain(client: RawClient) -> None:
    """Read until the server has closed the connection, whatever it sends."""
    with contextlib.suppress(ConnectionError):
        while client.socket.recv(1 << 16):
            pass


@pytest.mark.parametrize("version", [4, 5])
def test_changed_packets(mqtt: Serving, noticing: Callable[[], None], version: int) -> None:
    """Packets changed at random disturb no other client, after a CONNECT and in place of one."""
    source, changes = random.Random(version), Changes(samples(version), version)
    for number in range(tries(quick=150, full=5_000)):
        with mqtt.client(version=version) as client:
            client.send(wire.connect(f"changed-{number}", version=version) if number % 4 else changes.packet())
            packets = later(version)
            source.shuffle(packets)
            client.send(*[changes.packet() if source.random() < 0.3 else one for one in packets])
            ended(client)
        if number % 25 == 0:
            noticing()


def later(version: int) -> list[bytes]:
    """Return packets of all types that a client may send after its CONNECT."""
    return [one for one in samples(version) if one[0] not in (0x10, 0xE0)]


@pytest.mark.parametrize("version", [4, 5])
def test_truncated_packets(mqtt: Serving, noticing: Callable[[], None], version: int) -> None:
    """Clients that disconnect within a packet, at any byte, disturb no other client."""
    for data in later(version):
        for end in range(1, len(data), max(1, len(data) // tries(quick=4, full=40))):
            with mqtt.client(version=version) as client:
                client.send(wire.connect("truncating", version=version), data[:end])
                ended(client)
    noticing()


def test_garbage(mqtt: Serving, noticing: Callable[[], None]) -> None:
    """Bytes of other protocols and random bytes disturb no other client."""
    source = random.Random(1)
    garbage = [
        b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n",
        bytes.fromhex("16030100c8010000c40303"),  # the beginning of a TLS handshake
        b"SSH-2.0-OpenSSH_9.2\r\n",
        b"\xff" * 1_000,
        b"\0" * 1_000,
        *[source.randbytes(200) for _ in range(tries(quick=20, full=1_000))],
    ]
    for data in garbage:
        with mqtt.client() as client:
            client.send(data)
            ended(client)
    noticing()


def test_connections_that_never_say_who_they_are(name: str) -> None:
    """Connections without a complete CONNECT are closed in time, and other clients are served."""
    with served(timeout=1) as server, bystanders(server, name) as check:

        def many() -> None:
            first = wire.connect("slow", user_name="u" * 100)
            with ExitStack() as clients:
                slow = [clients.enter_context(server.client()) for _ in range(200)]
                for number, client in enumerate(slow):
                    client.send(first[: number % len(first)])
                check()
                for client in slow:
                    drain(client)

        rounds(server, many)


def test_half_open_connections(mqtt: Serving, noticing: Callable[[], None], name: str) -> None:
    """Clients that are silent after their CONNECT are disconnected by their keep alive; their wills are published."""
    with mqtt.client() as watcher, ExitStack() as clients:
        watcher.connect()
        watcher.subscribe(f"wills/{name}/#")
        silent = [clients.enter_context(mqtt.client()) for _ in range(100)]
        for number, client in enumerate(silent):
            will = wire.Will(topic=f"wills/{name}/{number}")
            client.connect(f"{name}-{number}", keep_alive=1, will=will)
        noticing()
        topics = {packet.topic for packet in watcher.publishes(100)}
        assert topics == {f"wills/{name}/{number}" for number in range(100)}
        for client in silent:
            drain(client)
    noticing()


@pytest.mark.parametrize("qos", [0, 1])
def test_a_client_that_does_not_read(mqtt: Serving, noticing: Callable[[], None], name: str, qos: int) -> None:
    """Messages for a client that doesn't read fill no memory: QoS 0 is dropped, QoS 1 waits in the store."""
    payload, count = bytes(64 << 10), tries(quick=2_400, full=16_000)
    with mqtt.client() as idle, mqtt.client() as writer:
        idle.connect(name)
        idle.subscribe(f"much/{name}", options=qos)
        window = min(100, writer.connect().properties.get("receive_maximum", 65_535))  # type: ignore[type-var]
        used = []
        for _ in range(0, count, window):  # type: ignore[arg-type]
            numbers = range(1, window + 1)  # type: ignore[operator]
            writer.send(*[wire.publish(f"much/{name}", payload, qos=qos, packet_id=number) for number in numbers])
            if qos:
                assert [writer.expect("PUBACK").packet_id for _ in numbers] == list(numbers)
            else:
                writer.ping()
            used.append(mqtt.memory())
        # The first half fills the engine's own buffers; keeping the messages would take 64 KB each.
        half = len(used) // 2
        assert max(used[half:]) - used[half] < count // 2 * len(payload) // 2, [one // MB for one in used]
        noticing()


@pytest.mark.parametrize("qos", [0, 1, 2])
def test_large_payloads(mqtt: Serving, noticing: Callable[[], None], name: str, qos: int) -> None:
    """Payloads of 16 MB arrive unaltered; a packet above the limit ends its sender's connection."""
    payload = random.Random(qos).randbytes(LARGE)
    with mqtt.client() as reader, mqtt.client() as writer:
        reader.connect()
        reader.subscribe(f"large/{name}", options=qos)
        most = writer.connect().properties["maximum_packet_size"]
        for _ in range(2):
            writer.publish(f"large/{name}", payload, qos)
            packet = reader.expect("PUBLISH")
            assert packet.payload == payload
            reader.acknowledge(packet)
        noticing()
        assert isinstance(most, int)
        writer.send(b"\x30" + wire.variable(most) + wire.binary("large") + b"\0")
        assert writer.farewell() == ("DISCONNECT", 0x95)


def test_a_large_packet_that_never_ends(mqtt: Serving, noticing: Callable[[], None]) -> None:
    """Connections that announce 16 MB and send a little cost no more memory than they send."""

    def many() -> None:
        with ExitStack() as clients:
            for number in range(100):
                client = clients.enter_context(mqtt.client())
                client.connect(f"never-{number}")
                client.send(b"\x30" + wire.variable(LARGE) + wire.binary("large") + b"\0" + b"x" * 1_000)
            noticing()

    rounds(mqtt, many)


def test_long_topics(mqtt: Serving, noticing: Callable[[], None]) -> None:
    """The server's memory for the topics of a client's publishes is bounded, however many and long they are."""
    if not Path(f"/proc/{mqtt.pid}/statm").is_file():
        pytest.skip("needs /proc, where memory of a process is counted")
    with mqtt.client() as writer:
        writer.connect("long-topics")
        for number in range(2_000):  # fills the table, of 64 MB
            writer.publish(f"{number:05d}" + "x" * 65_000)
        before = mqtt.memory()
        for number in range(2_000, 3_000):
            writer.publish(f"{number:05d}" + "x" * 65_000)
        assert mqtt.memory() - before < 24 * MB
        noticing()


def test_connect_storms(mqtt: Serving, noticing: Callable[[], None]) -> None:
    """Many clients that connect and disconnect, properly or not, leave no sockets, and memory doesn't grow."""
    each = tries(quick=400, full=2_500)

    def storm() -> None:
        for first in range(0, each, 100):
            with ExitStack() as clients:
                many = [clients.enter_context(mqtt.client()) for _ in range(100)]
                for number, client in enumerate(many, first):
                    expiry = NEVER if number % 2 else 0
                    client.send(wire.connect(f"storm-{number}", session_expiry_interval=expiry, clean=number % 4 < 2))
                for client in many:
                    assert client.expect("CONNACK").reason == 0
                for client in many[::3]:
                    client.send(wire.disconnect())
            noticing()

    rounds(mqtt, storm)


def test_take_over_storms(mqtt: Serving, noticing: Callable[[], None], name: str) -> None:
    """If many connections use one client id in turn, the last connection keeps the session."""
    with ExitStack() as clients:
        many = [clients.enter_context(mqtt.client()) for _ in range(100)]
        for client in many:
            client.send(wire.connect(name, clean=False, session_expiry_interval=NEVER))
        for client in many:
            assert client.expect("CONNACK").reason == 0
        noticing()
        staying = clients.enter_context(mqtt.client())
        staying.connect(name, keep=True)
        for client in many:
            assert client.farewell() == ("DISCONNECT", 0x8E)
        staying.ping()


def test_subscribe_storms(mqtt: Serving, noticing: Callable[[], None], name: str) -> None:
    """A client may subscribe up to the limit in each new session; a filter above the limit is refused."""

    def storm() -> None:
        with mqtt.client() as client:
            client.connect(f"{name}-client")
            for first in range(0, FILTERS, 1_000):
                filters = [f"storm/{number}/+/{name}" for number in range(first, first + 1_000)]
                assert set(client.subscribe(*filters, options=1)) == {1}
            assert client.subscribe(f"storm/more/{name}") == (0x97,)
            noticing()
            client.leave()

    rounds(mqtt, storm)


def test_a_publisher_that_does_not_read_its_answers(mqtt: Serving, noticing: Callable[[], None], name: str) -> None:
    """The server stops reading from a publisher that doesn't read its answers; other clients are served."""
    with mqtt.client() as writer:
        writer.connect(name)
        writer.socket.setblocking(False)
        sent, data = 0, wire.PINGREQ * 50_000
        try:
            while sent < 200 * MB:
                sent += writer.socket.send(data)
        except BlockingIOError:
            pass
        except ConnectionError:  # the server may also close the connection
            pass
        noticing()
        assert mqtt.alive
