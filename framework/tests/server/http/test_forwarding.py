"""Requests that a site of a cluster forwards to others."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
import topicstore as ts
from litestar.exceptions import HTTPException
from topicstore.replication.site import ShardOwner, Site
from topicstore.server.cluster import SiteTls
from topicstore.server.http.forwarding import Call, Forwarder
from topicstore_conformance.conditions.skipping import need
from topicstore_conformance.faults.threads import PATIENCE

CALL = Call("POST", "/", {}, b"x" * 200_000)


class Answer(msgspec.Struct):
    """The answer of the other site."""

    count: int


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    """A site of a cluster that waits long for its log store."""
    need("rocksdb")
    cluster = ts.Cluster((tmp_path / "log").as_uri(), store_timeout=2 * PATIENCE)
    with ts.open(tmp_path / "a", cluster=cluster, site="a") as db:
        assert db.cluster is not None
        yield db.cluster


def owner_at(address: tuple[str, int], name: str = "b") -> ShardOwner:
    return ShardOwner(name, "", f"http://{address[0]}:{address[1]}")


async def answered(forwarder: Forwarder, answer: bytes) -> Answer | HTTPException:
    """Forward a request to a site that sends some bytes and closes the connection; return the result."""

    async def respond(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        await reader.readexactly(len(CALL.body))
        writer.write(answer)
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(respond, "127.0.0.1", 0)
    async with server:
        owner = owner_at(server.sockets[0].getsockname())
        [found] = await asyncio.wait_for(forwarder.ask({owner: CALL}, Answer), PATIENCE)
    return found


def head(status: str, body: bytes, more: str = "") -> bytes:
    return f"HTTP/1.1 {status}\r\nContent-Length: {len(body)}\r\n{more}\r\n".encode() + body


def test_a_site_that_does_not_answer_holds_up_no_request_for_another(site: Site) -> None:
    """While many requests wait for an unresponsive site, a request for another site is forwarded and answered.

    The requests for the unresponsive site end at once when their clients are gone, or the server stops.
    """

    async def forwarded(silent: socket.socket) -> Answer | HTTPException:
        forwarder = Forwarder(site, "token", SiteTls(None))
        owner = owner_at(silent.getsockname(), "silent")
        waiting = [asyncio.create_task(forwarder.ask({owner: CALL}, Answer)) for _ in range(20)]
        await asyncio.sleep(0)  # lets the requests begin
        found = await answered(forwarder, head("200 OK", b'{"count":1}'))
        for one in waiting:
            one.cancel()
        await asyncio.wait_for(asyncio.gather(*waiting, return_exceptions=True), PATIENCE)
        assert all(one.cancelled() for one in waiting)
        return found

    with socket.create_server(("127.0.0.1", 0)) as silent:
        assert Answer(1) == asyncio.run(forwarded(silent))


@pytest.mark.parametrize(
    ("sent", "status", "said"),
    [
        (head("507 Full", b'{"detail":"no room"}', "Retry-After: 9\r\n"), 507, "site b: no room"),
        (head("403 Forbidden", b'{"detail":"no"}'), 502, "site b: no"),
        (head("200 OK", b"<html>"), 502, "site b: an answer that is not the expected JSON"),
        (head("200 OK", b" " * (1 << 21)), 502, "site b gave too long an answer"),
        (head("200 OK", b'{"count"')[:-3], 503, "it is unknown whether it has carried the request out"),
        (b"", 503, "it is unknown whether it has carried the request out"),
        (b"SSH-2.0-x\r\n\r\n", 503, "it is unknown whether it has carried the request out"),
    ],
)
def test_what_a_site_refuses_or_does_not_answer_is_an_error_with_its_name(
    site: Site, sent: bytes, status: int, said: str
) -> None:
    """Another site's error is passed on, except a refusal of the cluster's token, which becomes status 502.

    After a broken response, the client learns with status 503 that the outcome is unknown.
    """
    found = asyncio.run(answered(Forwarder(site, "token", SiteTls(None)), sent))
    assert isinstance(found, HTTPException)
    assert status == found.status_code
    assert said in found.detail
    assert {"Retry-After": "9"} == found.headers if status == 507 else not found.headers


def test_the_other_site_closes_a_connection_first(site: Site) -> None:
    """A forwarded request asks the other site to close the connection first.

    Otherwise many requests in a minute would use up the local ports of the forwarding site, in the state TIME_WAIT.
    """
    heads = list[bytes]()

    async def forwarded() -> tuple[Answer | HTTPException, bytes]:
        closed = asyncio.get_running_loop().create_future()

        async def respond(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            heads.append(await reader.readuntil(b"\r\n\r\n"))
            await reader.readexactly(len(CALL.body))
            writer.write(head("200 OK", b'{"count":1}', "Connection: close\r\n"))
            closed.set_result(await reader.read())
            writer.close()

        server = await asyncio.start_server(respond, "127.0.0.1", 0)
        async with server:
            owner = owner_at(server.sockets[0].getsockname())
            [found] = await Forwarder(site, "token", SiteTls(None)).ask({owner: CALL}, Answer)
            return found, await asyncio.wait_for(closed, PATIENCE)

    assert (Answer(1), b"") == asyncio.run(forwarded())  # without waiting for the other site to close
    assert b"\r\nconnection: close\r\n" in heads[0].lower()


def test_a_silent_site_is_given_up(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    """A forwarded request times out a little later than the log store would, including its time in the queue."""

    async def forwarded(silent: socket.socket) -> list[HTTPException | Answer]:
        forwarder = Forwarder(site, "token", SiteTls(None))
        assert forwarder._patience > site.cluster.store_timeout
        monkeypatch.setattr(forwarder, "_patience", 0.01)
        calls = [forwarder.ask({owner_at(silent.getsockname()): CALL}, Answer) for _ in range(20)]
        return [found for [found] in await asyncio.gather(*calls)]

    with socket.create_server(("127.0.0.1", 0)) as silent:
        found = asyncio.run(forwarded(silent))
    assert {503} == {one.status_code for one in found if isinstance(one, HTTPException)}
    assert any("gave no answer" in str(one) for one in found)


def test_a_site_without_http_is_named(site: Site) -> None:
    """Forwarding fails if a site has no HTTP, or can't be reached; only after the latter may the client retry."""
    with socket.create_server(("127.0.0.1", 0)) as closed:
        address = closed.getsockname()
    owners = ShardOwner("b", "", ""), owner_at(address, "c")
    forwarder = Forwarder(site, "token", SiteTls(None))
    none, gone = asyncio.run(forwarder.ask(dict.fromkeys(owners, CALL), Answer))
    assert isinstance(none, HTTPException)
    assert isinstance(gone, HTTPException)
    assert (503, "site b, which writes the shard, serves no HTTP", None) == (
        none.status_code,
        none.detail,
        none.headers,
    )
    assert (503, {"Retry-After": "1"}) == (gone.status_code, gone.headers)
    assert "site c, which writes the shard, can't be reached at http://127.0.0.1:" in gone.detail
