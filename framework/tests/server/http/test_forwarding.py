"""Requests that a site of a cluster forwards to others."""

from __future__ import annotations

import asyncio
import socket
from pathlib import Path

import topicstore as ts
from topicstore.contract.batch import MessageBatch
from topicstore.replication.site import ShardOwner
from topicstore.server.http.forwarding import Forwarder
from topicstore_conformance.conditions.skipping import need
from topicstore_conformance.faults.threads import PATIENCE

ANSWER = b'HTTP/1.1 200 OK\r\nContent-Length: 11\r\n\r\n{"count":1}'


async def _answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    await reader.read(1)
    writer.write(ANSWER)
    await writer.drain()
    await reader.read()
    writer.close()


def test_a_site_that_does_not_answer_holds_up_no_request_for_another(tmp_path: Path) -> None:
    """While a silent site has many requests, one for a site that answers is forwarded, and answered."""
    need("rocksdb")
    batch = MessageBatch.from_messages([ts.Message("a", b"1", "c")])

    async def forwarded(forwarder: Forwarder, silent: socket.socket) -> int:
        server = await asyncio.start_server(_answer, "127.0.0.1", 0)
        ports = {"silent": silent.getsockname()[1], "answers": server.sockets[0].getsockname()[1]}
        owners = {name: ShardOwner(name, "", f"http://127.0.0.1:{port}") for name, port in ports.items()}
        waiting = [asyncio.create_task(forwarder.forward({owners["silent"]: batch}, "/", "")) for _ in range(20)]
        await asyncio.sleep(0)  # they begin
        try:
            answers = await asyncio.wait_for(forwarder.forward({owners["answers"]: batch}, "/", ""), PATIENCE)
        finally:
            silent.close()  # resets the connections
            await asyncio.gather(*waiting, return_exceptions=True)
            server.close()
        return answers[0].count

    cluster = ts.Cluster((tmp_path / "log").as_uri(), store_timeout=2 * PATIENCE)
    with ts.open(tmp_path / "a", cluster=cluster, site="a") as db, socket.create_server(("127.0.0.1", 0)) as silent:
        assert db.cluster is not None
        forwarder = Forwarder(db.cluster, "token")
        try:
            assert 1 == asyncio.run(forwarded(forwarder, silent))
        finally:
            forwarder.stop()
