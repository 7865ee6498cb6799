"""Tests of the broker in normal operation, when it is killed, and with misbehaving clients."""

# ruff: noqa: D102, D103, S101 - a test asserts
from __future__ import annotations

import ast
import asyncio
import contextlib
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from itertools import pairwise
from pathlib import Path

import pytest

HERE = Path(__file__).parent
CLIENTS = 1_000
KILLS = 3


class Client:
    """A client over a real socket."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer

    def send(self, *lines: str) -> None:
        self.writer.write("".join(f"{line}\n" for line in lines).encode())

    async def line(self) -> str:
        """Return the next line, or an empty string if the connection has ended."""
        try:
            return (await self.reader.readline()).decode().removesuffix("\n")
        except ConnectionError:  # the broker was killed before it had read everything
            return ""

    async def ask(self, line: str) -> str:
        self.send(line)
        return await self.line()

    async def lines(self, count: int) -> list[str]:
        return [await self.line() for _ in range(count)]

    async def hang_up(self) -> None:
        """Close the connection without DISCONNECT."""
        self.writer.transport.abort()
        with contextlib.suppress(ConnectionError):  # the broker has closed it before
            await self.writer.wait_closed()


class Running:
    """A broker in a process of its own."""

    def __init__(self, process: asyncio.subprocess.Process, port: int) -> None:
        self.process, self.port = process, port
        self.clients: list[Client] = []

    async def client(self, client_id: str = "", expiry: str = "never", keep_alive: int = 0) -> Client:
        """Connect and, if a client id is given, open its session."""
        client = Client(*await asyncio.open_connection("127.0.0.1", self.port, limit=1 << 20))
        self.clients.append(client)
        if client_id:
            assert (await client.ask(f"CONNECT {client_id} {expiry} {keep_alive}")).startswith("CONNECTED ")
        return client

    async def kill(self) -> None:
        self.process.kill()
        await self.process.wait()


@asynccontextmanager
async def broker(directory: Path) -> AsyncIterator[Running]:
    command = (sys.executable, str(HERE / "broker.py"), str(directory / "db"), "0")
    process = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)
    try:
        assert process.stdout is not None
        running = Running(process, int((await process.stdout.readline()).split()[-1]))
        try:
            yield running
        finally:
            for client in running.clients:
                await client.hang_up()
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


def served(directory: Path, test: Callable[[Running], Awaitable[None]]) -> None:
    """Run a test with a broker, and check that the broker still runs at the end."""

    async def run() -> None:
        async with broker(directory) as running:
            await test(running)
            assert running.process.returncode is None

    asyncio.run(run())


async def published(client: Client, first: int, last: int, topic: str = "log") -> None:
    """Publish numbered messages of QoS 1, and wait until all are acknowledged."""
    numbers = range(first, last)
    client.send(*[f"PUBLISH 1 {n % 65_535 + 1} {topic} {n}" for n in numbers])
    assert [f"PUBACK {n % 65_535 + 1}" for n in numbers] == await client.lines(len(numbers))


def test_every_verb_is_answered(tmp_path: Path) -> None:
    async def test(running: Running) -> None:
        client = await running.client()
        assert await client.ask("CONNECT me 60 30") == "CONNECTED new"
        assert await client.ask("SUBSCRIBE home/# 2") == "SUBSCRIBED 2 home/#"
        assert await client.ask("PING") == "PONG"
        assert await client.ask("PUBLISH 0 0 home/hall two words") == "MESSAGE 0 0 new home/hall two words"
        client.send("PUBLISH 1 7 home/hall")
        assert await client.lines(2) == ["PUBACK 7", "MESSAGE 1 1 new home/hall "]
        client.send("PUBACK 1", "PUBLISH 2 8 home/hall twice")
        assert await client.lines(2) == ["PUBREC 8", "MESSAGE 2 2 new home/hall twice"]
        client.send("PUBREL 8", "PUBREC 2")
        assert await client.lines(2) == ["PUBCOMP 8", "PUBREL 2"]
        client.send("PUBCOMP 2")
        assert await client.ask("UNSUBSCRIBE home/#") == "UNSUBSCRIBED home/#"
        client.send("PUBLISH 1 9 home/hall nobody", "DISCONNECT")
        assert await client.lines(3) == ["PUBACK 9", "ENDED it was disconnected", ""]

    served(tmp_path, test)


def test_a_lost_client_gets_what_it_missed(tmp_path: Path) -> None:
    async def test(running: Running) -> None:
        reader, writer = await running.client("reader"), await running.client("writer")
        await reader.ask("SUBSCRIBE log 1")
        await published(writer, 0, 10)
        assert await reader.lines(10) == [f"MESSAGE 1 {n + 1} new log {n}" for n in range(10)]
        reader.send(*[f"PUBACK {n + 1}" for n in range(4)])
        assert await reader.ask("PING") == "PONG"  # all requests before it were served
        await reader.hang_up()
        await published(writer, 10, 20)
        reader = await running.client()
        assert await reader.ask("CONNECT reader never 0") == "CONNECTED resumed"
        assert await reader.lines(6) == [f"MESSAGE 1 {n + 1} again log {n}" for n in range(4, 10)]
        assert [line.split()[4:] for line in await reader.lines(10)] == [["log", str(n)] for n in range(10, 20)]

    served(tmp_path, test)


class Publisher:
    """A publisher of numbered messages, which resends unacknowledged ones (MQTT 5, section 4.4)."""

    def __init__(self, qos: int, count: int) -> None:
        self.qos = qos
        self.unsent = {number + 1: f"PUBLISH {qos} {number + 1} log {number}" for number in range(count)}
        self.unreleased: dict[str, None] = {}

    async def run(self, running: Running) -> None:
        client = await running.client("publisher")
        client.send(*[f"PUBREL {packet_id}" for packet_id in self.unreleased], *self.unsent.values())
        while line := await client.line():
            verb, packet_id = line.split()
            if verb == "PUBCOMP":
                del self.unreleased[packet_id]
            elif self.unsent.pop(int(packet_id), None) and verb == "PUBREC":
                self.unreleased[packet_id] = None
                client.send(f"PUBREL {packet_id}")


class Receiver:
    """A subscriber that acknowledges messages and stores the unreleased packet identifiers of QoS 2."""

    def __init__(self, qos: int) -> None:
        self.qos = qos
        self.got: list[int] = []
        self.unreleased: set[str] = set()

    async def run(self, running: Running, until: int, *, released: bool) -> None:
        """Receive until ``until`` distinct messages have arrived and, with ``released``, none is unreleased."""
        client = await running.client("receiver")
        if not self.got:
            await client.ask(f"SUBSCRIBE log {self.qos}")
        while len(set(self.got)) < until or (released and self.unreleased):
            word, *values = (await client.line()).split()
            if word == "PUBREL":
                self.unreleased.discard(values[0])
                client.send(f"PUBCOMP {values[0]}")
            elif word == "MESSAGE":
                _, packet_id, _, _, number = values
                if packet_id not in self.unreleased:
                    self.got.append(int(number))
                if self.qos == 2:
                    self.unreleased.add(packet_id)
                client.send(f"{'PUBACK' if self.qos == 1 else 'PUBREC'} {packet_id}")


@pytest.mark.slow
@pytest.mark.parametrize("qos", [1, 2])
def test_nothing_is_lost_in_kills(tmp_path: Path, qos: int) -> None:
    """When the broker is killed repeatedly, all messages are delivered in order, with QoS 2 exactly once."""
    publisher, receiver = Publisher(qos, KILLS * 100 + 200), Receiver(qos)

    async def run() -> None:
        for until in range(100, KILLS * 100 + 1, 100):
            async with broker(tmp_path) as running, asyncio.TaskGroup() as tasks:
                receiving = tasks.create_task(receiver.run(running, until, released=False))
                tasks.create_task(publisher.run(running))
                await receiving
                await running.kill()  # while there are messages on their way
        async with broker(tmp_path) as running, asyncio.TaskGroup() as tasks:
            publishing = tasks.create_task(publisher.run(running))
            await receiver.run(running, KILLS * 100 + 200, released=True)
            publishing.cancel()

    asyncio.run(run())
    assert list(dict.fromkeys(receiver.got)) == list(range(KILLS * 100 + 200))
    assert qos == 1 or len(receiver.got) == KILLS * 100 + 200


def test_qos_2_comes_once_though_the_broker_is_killed_between_its_steps(tmp_path: Path) -> None:
    async def run() -> None:
        async with broker(tmp_path) as running:
            reader, writer = await running.client("reader"), await running.client("writer")
            await reader.ask("SUBSCRIBE log 2")
            assert await writer.ask("PUBLISH 2 5 log once") == "PUBREC 5"
            assert await reader.line() == "MESSAGE 2 1 new log once"
            await running.kill()
        async with broker(tmp_path) as running:
            reader, writer = await running.client("reader"), await running.client("writer")
            assert await reader.line() == "MESSAGE 2 1 again log once"
            assert await writer.ask("PUBLISH 2 5 log once") == "PUBREC 5"  # the broker knows the packet identifier
            assert await reader.ask("PUBREC 1") == "PUBREL 1"
            await running.kill()
        async with broker(tmp_path) as running:
            reader, writer = await running.client("reader"), await running.client("writer")
            assert await reader.line() == "PUBREL 1"
            assert await writer.ask("PUBREL 5") == "PUBCOMP 5"
            assert await writer.ask("PUBLISH 2 5 log another") == "PUBREC 5"
            reader.send("PUBCOMP 1")
            assert (await reader.line()).endswith(" new log another")

    asyncio.run(run())


def test_a_client_that_connects_again_takes_over(tmp_path: Path) -> None:
    async def test(running: Running) -> None:
        first = await running.client("me")
        second = await running.client("me")
        assert await first.lines(2) == ["ENDED its client connected again", ""]
        await second.ask("SUBSCRIBE log 1")
        await published(await running.client("writer"), 0, 1)
        assert await second.line() == "MESSAGE 1 1 new log 0"

    served(tmp_path, test)


def test_a_take_over_fails_only_its_own_requests(tmp_path: Path) -> None:
    """When a session is taken over, only its own requests fail, and not those of others in the same batch."""

    async def test(running: Running) -> None:
        writer, other = await running.client("writer"), await running.client("other")
        connections = [await running.client() for _ in range(20)]
        assert await connections[0].ask("CONNECT me never 0") == "CONNECTED new"
        for old, new in pairwise(connections):
            writer.send(*[f"PUBLISH 1 {n} log {n}" for n in range(1, 101)])  # meanwhile, the others' requests gather
            new.send("CONNECT me never 0")
            old.send("PING", "PUBACK 1", "UNSUBSCRIBE log", "PUBLISH 1 1 log x")
            other.send("PUBACK 1", "PING", "UNSUBSCRIBE log", "PUBLISH 1 1 log x")
            assert await new.line() == "CONNECTED resumed"
            assert await other.lines(3) == ["PONG", "UNSUBSCRIBED log", "PUBACK 1"]
            while line := await old.line():
                assert line in ("PONG", "UNSUBSCRIBED log", "PUBACK 1", "ENDED its client connected again")
            assert len(await writer.lines(100)) == 100

    served(tmp_path, test)


@pytest.mark.slow
def test_a_silent_client_is_let_go(tmp_path: Path) -> None:
    async def test(running: Running) -> None:
        client = await running.client("me", keep_alive=1)
        assert await client.lines(2) == ["ENDED its client was silent for longer than its keep-alive allows", ""]

    served(tmp_path, test)


BAD = {
    "HELLO": "ERROR the protocol has no such line",
    "": "ERROR the protocol has no such line",
    "CONNECT you never 0": "ERROR CONNECT comes first, and once",
    "SUBSCRIBE # 3": "ERROR a number from 0 to 2 is expected, not '3'",
    "SUBSCRIBE a#b 1": "ERROR ",
    "PUBLISH 1 0 log x": "ERROR a number from 1 to 65535 is expected, not '0'",
    "PUBLISH 1 70000 log x": "ERROR a number from 1 to 65535 is expected, not '70000'",
    "PUBLISH 1 1 log/+ x": "ERROR topic 'log/+' contains a wildcard",
    "PUBLISH 2 1 log/+ x": "ERROR topic 'log/+' contains a wildcard",
    "PUBACK " + "9" * 5_000: "ERROR a number from 1 to 65535 is expected, not ",
    "PUBLISH 1 1 log " + "x" * 300_000: "ERROR a line has at most 65536 bytes",
}


def test_a_bad_line_ends_its_own_connection_only(tmp_path: Path) -> None:
    async def test(running: Running) -> None:
        other = await running.client("other")
        await other.ask("SUBSCRIBE # 1")
        early = await running.client()
        assert await early.ask("PING") == "ERROR CONNECT comes first, and once"
        unnamed = await running.client()
        unnamed.writer.write(b"CONNECT \xff never 0\n")
        assert await unnamed.lines(2) == ["ERROR a name is not UTF-8", ""]
        for bad, error in BAD.items():
            client = await running.client("me")
            client.send("PUBLISH 1 1 before it", bad, "SUBSCRIBE after 1")
            assert await client.line() == "PUBACK 1"
            assert (await client.line()).startswith(error), bad[:30]
            assert await client.line() == ""
            assert (await other.line()).endswith(" new before it")
        assert await other.ask("PING") == "PONG"
        client = await running.client("me")
        client.send("PUBLISH 1 1 after x", "PING")
        assert await client.lines(2) == ["PUBACK 1", "PONG"]  # requests after a bad line were not served

    served(tmp_path, test)


@pytest.mark.slow
def test_a_thousand_clients(tmp_path: Path) -> None:
    """A thousand clients can connect at the same time, and each receives the message sent to it."""

    async def test(running: Running) -> None:
        async def opened(number: int) -> Client:
            client = await running.client(f"client-{number}")
            assert await client.ask(f"SUBSCRIBE to/{number} 1") == f"SUBSCRIBED 1 to/{number}"
            return client

        clients = await asyncio.gather(*map(opened, range(CLIENTS)))
        for number, client in enumerate(clients):
            client.send(f"PUBLISH 1 1 to/{(number + 1) % CLIENTS} from {number}")
        for number, client in enumerate(clients):
            lines = sorted(await client.lines(2))
            assert lines == [f"MESSAGE 1 1 new to/{number} from {(number - 1) % CLIENTS}", "PUBACK 1"]

    served(tmp_path, test)


def test_a_client_that_does_not_read_delays_no_other(tmp_path: Path) -> None:
    """Messages to a client that doesn't read, even of QoS 0, stay stored until it reads; others are not delayed."""

    async def test(running: Running) -> None:
        slow, fast, writer, live = [await running.client(name) for name in ("slow", "fast", "writer", "live")]
        for client in (slow, fast):
            await client.ask("SUBSCRIBE log 1")
        await live.ask("SUBSCRIBE log 0")
        for client in (slow, live):
            client.writer.transport.pause_reading()  # type: ignore[attr-defined]
        payload = "x" * 50_000
        for number in range(400):
            assert await writer.ask(f"PUBLISH 1 1 log {number} {payload}") == "PUBACK 1"
            line = await fast.line()
            assert line.split()[5:] == [str(number), payload]
            fast.send(f"PUBACK {line.split()[2]}")
        for client in (slow, live):
            client.writer.transport.resume_reading()  # type: ignore[attr-defined]
        for number in range(400):
            line = await slow.line()
            assert line.split()[5] == str(number)
            slow.send(f"PUBACK {line.split()[2]}")
        assert [line.split()[5] for line in await live.lines(400)] == [str(number) for number in range(400)]

    served(tmp_path, test)


def test_it_uses_public_names_only() -> None:
    """The broker imports only `topicstore` and `topicstore.sessions`, and uses no private names."""
    for file in ("broker.py", "store_thread.py", "connection.py", "lines.py"):
        tree = ast.parse((HERE / file).read_text())
        modules = [name.name for node in ast.walk(tree) if isinstance(node, ast.Import) for name in node.names]
        modules += [node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
        assert {name for name in modules if name.startswith("topicstore")} <= {"topicstore", "topicstore.sessions"}
        private = [node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute) and node.attr[0] == "_"]
        assert file == "connection.py" or not private
