"""A broker for the protocol of `lines`: ``python broker.py DIRECTORY [PORT]``.

The event loop serves sockets and never blocks on the database. It passes the requests that arrived meanwhile as one
batch to the thread that uses the database (`store_thread`), which returns the answers.
"""

from __future__ import annotations

import asyncio
import contextlib
import sys
from concurrent.futures import ThreadPoolExecutor

import topicstore as ts
from connection import Connection
from lines import packet_line
from store_thread import StoreThread
from topicstore.sessions import Ended, Publish, PubRel, Session


class Broker:
    """The broker: connects the connections of one event loop with the thread that uses the database."""

    def __init__(self, db: ts.Database, thread: ThreadPoolExecutor) -> None:
        self.loop, self.thread = asyncio.get_running_loop(), thread
        self.store = StoreThread(db, self.opened, self.on_end)
        self.connections: dict[Session, Connection] = {}
        self.asking: dict[Connection, None] = {}
        self.asked = asyncio.Event()

    def ask(self, connection: Connection) -> None:
        """Schedule a connection that has requests for the next batch."""
        self.asking[connection] = None
        self.asked.set()

    async def run(self) -> None:
        """Serve until cancelled."""
        pause = 0.0
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(pause):
                    await self.asked.wait()
            self.asked.clear()
            taken = {connection: connection.take() for connection in self.asking}
            self.asking.clear()
            answers, delivered, pause = await self.loop.run_in_executor(self.thread, self.store.serve, taken)
            for answer in answers:
                answer()
            for session, packets in delivered:
                self.send(session, packets)
            for connection in taken:
                connection.go_on()

    def opened(self, connection: Connection, session: Session) -> None:
        """Answer a CONNECT."""
        connection.session = session
        self.connections[session] = connection
        connection.say(b"CONNECTED resumed" if session.present else b"CONNECTED new")
        if session.ended is not None:  # the session was taken over in the same batch
            self.ended(session, session.ended)

    def send(self, session: Session, packets: list[Publish | PubRel]) -> None:
        """Send packets to a session's client."""
        connection = self.connections.get(session)
        if connection is not None:
            connection.say(*map(packet_line, packets))

    def on_end(self, session: Session, why: Ended) -> None:
        """Notify the event loop that a session has ended; called in the thread that uses the database."""
        self.loop.call_soon_threadsafe(self.ended, session, why)

    def ended(self, session: Session, why: Ended) -> None:
        """End the connection of a session that has ended."""
        connection = self.connections.pop(session, None)
        if connection is not None:
            connection.end(b"ENDED " + why.value.encode())


async def main(directory: str, port: int) -> None:
    """Open the database and the port, and serve."""
    with ts.open(directory) as db, ThreadPoolExecutor(1, "store") as thread:
        broker = Broker(db, thread)
        server = await broker.loop.create_server(lambda: Connection(broker.ask), "127.0.0.1", port, backlog=1_024)
        print(f"listening on port {server.sockets[0].getsockname()[1]}", flush=True)
        await broker.run()


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(main(sys.argv[1], int(sys.argv[2]) if len(sys.argv) > 2 else 7_007))
