"""Limits on the memory that all clients together can fill, and the choice of connections to close above them."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
import topicstore as ts
from topicstore.server import Server
from topicstore.server.config.model import Limits, ListenerSettings, ServerSettings
from topicstore.server.config.units import Duration, Size
from topicstore.server.resource_limits import MemoryBudget
from topicstore_conformance.faults.threads import PATIENCE, wait_until
from topicstore_conformance.mqtt import wire
from topicstore_conformance.mqtt.embedded import ANY_PORT, Embedded
from topicstore_conformance.mqtt.raw_client import RawClient
from websockets.asyncio.client import connect as websocket
from websockets.typing import Subprotocol

KB, MB = 1 << 10, 1 << 20
LIMITS = Limits(
    packet_size=Size(2 * MB),
    unfinished_packets=Size(8 * MB),
    packet_timeout=Duration(0),
    connect_timeout=Duration(3600),
)
QUOTA_EXCEEDED = "DISCONNECT", 0x97


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Embedded]:
    """A server that allows 8 MB of incomplete packets in total, and 2 MB for each packet."""
    with ts.open(tmp_path / "db", backend="memory") as db, Embedded(db, ServerSettings(limits=LIMITS)) as server:
        yield server


def begin(client: RawClient, size: int, of: int = 2 * MB - 64) -> None:
    """Send the first ``size`` bytes of a PUBLISH."""
    client.send(wire.publish("large", b"x" * of)[:size])


def test_all_unfinished_packets_have_one_bound_and_the_largest_go_above_it(server: Embedded) -> None:
    """All incomplete packets share one memory limit, above which connections with the largest packets are closed.

    Clients with small packets are served, even in the middle of a packet.
    """
    with ExitStack() as clients:
        small = clients.enter_context(server.client("small"))
        whole = wire.publish("small", b"x" * KB, qos=1, packet_id=1)
        small.send(whole[:KB])
        large = [clients.enter_context(server.client(f"large-{number}")) for number in range(12)]
        for client in large:
            begin(client, MB)
        budget = server.server.budgets["packets"]
        wait_until(lambda: budget.broken_off >= 4, "the largest to be ended")
        assert server.memory("packets") <= 8 * MB
        small.send(whole[KB:])
        assert small.expect("PUBACK").packet_id == 1
    wait_until(lambda: budget.held == 0, "all to be released")


def test_a_client_whose_packet_takes_too_much_gets_the_reason(server: Embedded) -> None:
    with ExitStack() as clients:
        first = clients.enter_context(server.client("first"))
        begin(first, 2 * MB - 100)
        for number in range(8):
            begin(clients.enter_context(server.client(f"others-{number}")), MB)
        assert first.farewell() == QUOTA_EXCEEDED


def test_before_clients_are_let_in_they_have_an_eighth_of_the_memory(server: Embedded) -> None:
    with ExitStack() as clients:
        budget = server.server.budgets["connects"]
        connect = wire.connect("me", user_name="u" * 60_000, password="p" * 60_000)
        for _ in range(12):
            clients.enter_context(server.client()).send(connect[:110_000])
        wait_until(lambda: budget.broken_off > 0, "one of them to be ended")
        assert server.memory("connects") <= MB


def test_a_packet_that_goes_on_too_slowly_ends_its_connection(tmp_path: Path) -> None:
    limits = Limits(packet_timeout=Duration(0.5))
    with (
        ts.open(tmp_path / "db", backend="memory") as db,
        Embedded(db, ServerSettings(limits=limits)) as server,
        server.client("slow") as client,
        server.client("silent") as silent,
    ):
        begin(client, 100)
        assert client.farewell() == QUOTA_EXCEEDED
        silent.send(wire.publish("a", b"", qos=1, packet_id=1))
        assert silent.expect("PUBACK").packet_id == 1, "between two packets a client may be silent for any time"


def test_a_client_that_waits_for_its_own_request_fills_no_memory_meanwhile(server: Embedded) -> None:
    """While a client's SUBSCRIBE is served, the server reads no more of its next packet."""
    with server.client("me") as client:
        client.send(wire.subscribe(1, [("a", 1)]) + wire.publish("large", b"x" * MB, qos=1, packet_id=2))
        assert client.expect("SUBACK").packet_id == 1
        assert client.expect("PUBACK").packet_id == 2


@pytest.mark.anyio
async def test_frames_of_websockets_that_are_not_whole_count_too(tmp_path: Path) -> None:
    listeners = {"web": ListenerSettings(listen=ANY_PORT, protocol="websocket")}
    settings = ServerSettings(listeners=listeners, limits=LIMITS)
    with ts.open(tmp_path / "db", backend="memory") as db:
        async with Server(db, settings) as server, asyncio.timeout(PATIENCE):
            budget = server.budgets["packets"]
            made = []
            for number in range(12):
                client = await websocket(server.listeners[0].urls[0], subprotocols=[Subprotocol("mqtt")])
                made.append(client)
                await client.send(wire.connect(f"client-{number}"))
                await client.recv()
                header = b"\x82\xff" + (2 * MB - 64).to_bytes(8) + b"\0\0\0\0"
                client.transport.write(header + wire.publish("a", b"x" * MB)[: MB - 1])
            while budget.broken_off < 4:
                await asyncio.sleep(0.01)
            assert budget.held <= 8 * MB
            for client in made:
                client.transport.abort()
            while budget.held:
                await asyncio.sleep(0.01)


@pytest.mark.anyio
async def test_a_websocket_without_a_whole_handshake_is_closed_soon(tmp_path: Path) -> None:
    listeners = {"web": ListenerSettings(listen=ANY_PORT, protocol="websocket")}
    settings = ServerSettings(listeners=listeners, limits=LIMITS)
    with ts.open(tmp_path / "db", backend="memory") as db:
        async with Server(db, settings) as server, asyncio.timeout(PATIENCE):
            host, _, port = server.addresses[0].rpartition(":")
            reader, writer = await asyncio.open_connection(host, int(port))
            writer.write(b"GET /mqtt HTTP/1.1\r\n" + b"a: %b\r\n" % (b"x" * 1_000) * 80)
            with contextlib.suppress(ConnectionError):
                assert await reader.read() == b""
            writer.close()


class Held:
    """A stand-in for a connection with a client's address, which records why it was closed."""

    def __init__(self, host: str, *, breakable: bool = True) -> None:
        self.host, self.breakable = host, breakable
        self.work: object = 1
        self.reasons: list[str] = []

    def break_off(self, why: str) -> None:
        self.reasons.append(why)


def test_the_address_that_holds_most_gives_way_first() -> None:
    """The address whose connections hold the most memory is cut off first, even if others sent larger packets."""
    budget = MemoryBudget(1_000)
    honest, others = Held("honest"), [Held("other") for _ in range(10)]
    budget.hold(honest, 400)
    for one in others:
        budget.hold(one, 100)
    assert not honest.reasons
    assert (budget.held, budget.broken_off) == (1_000, 4)


def test_what_does_not_wait_for_its_client_is_not_ended() -> None:
    budget = MemoryBudget(100)
    served, stalled = Held("a", breakable=False), Held("a")
    budget.hold(served, 90)
    budget.hold(stalled, 50)
    assert (served.reasons, len(stalled.reasons), budget.held) == ([], 1, 90)


def test_a_packet_that_grows_in_time_goes_on() -> None:
    budget, client = MemoryBudget(MB), Held("a")
    for second in range(10):
        budget.hold(client, (second + 1) * 16 * KB)
        budget.end_slow(1.0, float(second))
    assert not client.reasons
    budget.end_slow(1.0, 20.0)
    assert client.reasons == ["a packet wasn't whole in time: 163,840 bytes of it came"]
