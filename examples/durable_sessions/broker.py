"""The process that is killed: publishers and durable subscribers, in one event loop.

A broker has the same structure, with sockets in place of the function calls. Each subscriber writes its messages to a
file of its own before it acknowledges them.
"""

import asyncio
import contextlib
import itertools
import os
import sys
from pathlib import Path

import topicstore as ts
from topicstore.sessions import Publish, PubRel, Session

ROOMS = ("kitchen", "office", "hall")
SUBSCRIBERS = {"display": ("home/+/temperature", 1), "archive": ("home/#", 2)}
"""The subscribers: client id, filter and QoS."""


async def publish(db: ts.Database, room: str) -> None:
    """Publish numbered messages; after a restart the numbers continue from the last stored one."""
    stored = [int(message.payload) for message in db.replay(f"home/{room}/temperature")]
    for number in itertools.count(max(stored, default=-1) + 1):
        reading = ts.Message(f"home/{room}/temperature", b"%d" % number, f"{room}-hub", qos=2)
        await asyncio.to_thread(db.publish, [reading])
        await asyncio.sleep(0.002)


class Client:
    """A subscriber that writes a line for each message to a file before it acknowledges the message."""

    def __init__(self, log: Path) -> None:
        self.log = log
        lines = log.read_text().splitlines() if log.exists() else []
        self.unreleased = set[str]()
        """Packet identifiers of QoS 2 that were received and not released; their messages may be redelivered."""
        for line in lines:
            word, packet_id = line.split()[:2]
            {"got2": self.unreleased.add, "released": self.unreleased.discard}.get(word, bool)(packet_id)

    def receive(self, session: Session, packets: list[Publish | PubRel]) -> None:
        """Write each message to the file, and acknowledge its packet as MQTT requires."""
        with self.log.open("a", buffering=1) as file:
            for packet in packets:
                if isinstance(packet, PubRel):  # a PUBREL
                    file.write(f"released {packet.packet_id}\n")
                    self.unreleased.discard(str(packet.packet_id))
                    session.pubcomp(packet.packet_id)
                elif packet.qos == 1:
                    file.write(f"got1 {packet.packet_id} {_text(packet)}\n")
                    session.puback(packet.packet_id)
                else:
                    if str(packet.packet_id) not in self.unreleased:
                        file.write(f"got2 {packet.packet_id} {_text(packet)}\n")
                        self.unreleased.add(str(packet.packet_id))
                    session.pubrec(packet.packet_id)


def _text(packet: Publish) -> str:
    return f"{packet.message.topic} {packet.message.payload.decode()}{' again' if packet.dup else ''}"


async def deliver(db: ts.Database, clients: dict[str, Client]) -> None:
    """Deliver to all sessions with undelivered packets, with one commit, and print the number of packets; repeat."""
    while True:
        await db.sessions.wait_async()
        delivered = await asyncio.to_thread(db.sessions.deliver, 100)
        for session, packets in delivered:
            clients[session.client_id].receive(session, packets)
        print(sum(len(packets) for _, packets in delivered), flush=True)


async def keep_time(db: ts.Database) -> None:
    """Call `tick` repeatedly: it handles wills, expiry, keep alive and checkpoints, and returns the seconds to wait."""
    while True:
        pause = 1.0
        try:
            pause = db.sessions.tick()
        except* ts.TopicstoreError as failed:  # a later tick tries again, so that a full disk doesn't end the broker
            print(*failed.exceptions, sep="\n", file=sys.stderr)
        await asyncio.sleep(max(pause, 0.01))


async def run(directory: Path) -> None:
    """Open the database, resume the sessions, and serve until killed."""
    with ts.open(directory / "db", layout="block") as db:
        for client_id, (topic_filter, qos) in SUBSCRIBERS.items():
            session = db.sessions.open(client_id, expiry_interval=None)
            if not session.present:
                session.subscribe(topic_filter, qos)
        async with asyncio.TaskGroup() as tasks:
            for room in ROOMS:
                tasks.create_task(publish(db, room))
            print(f"serving, process {os.getpid()}", flush=True)
            tasks.create_task(deliver(db, {name: Client(directory / name) for name in SUBSCRIBERS}))
            tasks.create_task(keep_time(db))


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(run(Path(sys.argv[1])))
