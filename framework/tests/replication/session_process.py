"""A program that runs one site and executes clients' commands, one JSON object a line: a broker without MQTT."""

from __future__ import annotations

import json
import sys
import threading
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import topicstore as ts
from topicstore.contract.errors import ShardElsewhereError, ShardMovedError, TopicstoreError
from topicstore.sessions import PubRel, Session
from topicstore_conformance.replication.site_program import quick_cluster

SHARDS = 2
TICK = 0.05
"""Seconds between two ticks; not a wait for anything."""


class Broker:
    """The sessions of this site's clients, by connection number."""

    def __init__(self, db: ts.Database) -> None:
        self._db = db
        self._connections: dict[int, Session] = {}
        self._calls: dict[str, Callable[..., object]] = {
            "open": self._open,
            "deliver": self._deliver,
            "acknowledge": self._acknowledge,
            "publish": self._publish,
            "pubrel": self._pubrel,
            "stored": self._stored,
        }
        self._saying = threading.Lock()

    def answer(self, line: str) -> None:
        """Execute the command in a line, and print its number with the result or the error's name."""
        asked: dict[str, Any] = json.loads(line)
        number = asked.pop("number")
        try:
            self.say(number, "done", self._calls[asked.pop("do")](**asked))
        except (TopicstoreError, KeyError) as error:  # opened at another process: this one has no session
            self.say(number, type(error).__name__, str(error))

    def say(self, number: int, outcome: str, value: object) -> None:
        with self._saying:
            print(json.dumps([number, outcome, value]), flush=True)

    def _open(self, connection: int, client: str, filters: dict[str, int]) -> bool:
        session = self._db.sessions.open(client, expiry_interval=None)
        for text, qos in filters.items():
            session.subscribe(text, qos)
        self._connections[connection] = session
        return session.present

    def _deliver(self, connection: int) -> list[Any]:
        session = self._connections[connection]
        self._db.sessions.wait(TICK)
        return [
            ["pubrel", packet.packet_id]
            if isinstance(packet, PubRel)
            else ["publish", packet.packet_id, packet.qos, packet.message.payload.decode()]
            for packet in session.deliver(50)
        ]

    def _acknowledge(self, connection: int, puback: list[int], pubrec: list[int], pubcomp: list[int]) -> None:
        session = self._connections[connection]
        session.puback(*puback)
        session.pubrec(*pubrec)
        session.pubcomp(*pubcomp)

    def _publish(self, connection: int, topic: str, payload: str, qos: int, packet_id: int) -> None:
        session = self._connections[connection]
        session.publish([ts.Message(topic, payload.encode(), session.client_id, qos=qos)], [packet_id])

    def _stored(self) -> int:
        return sum(1 for _ in self._db.replay("#"))

    def _pubrel(self, connection: int, packet_id: int) -> None:
        self._connections[connection].pubrel(packet_id)


def main(root: Path, site: str, takeover_after: float, delivered: float | None) -> None:
    """Open the site, and execute commands until the end of the input or a signal.

    delivered: the age in seconds at which messages stored only for sessions are removed; None: they are kept.
    """
    warnings.simplefilter("ignore")
    ended = threading.Event()
    with (
        ts.open(root / site, cluster=quick_cluster(root, takeover_after), site=site, shards=SHARDS) as db,
        ThreadPoolExecutor(8) as threads,
    ):
        broker = Broker(db)
        db.sessions.groups.handover_after = takeover_after
        if delivered is not None:
            with suppress(ShardElsewhereError, ShardMovedError):  # only the owner of the first shard may set it
                db.retention.set(delivered=delivered)

        def ticks() -> None:
            while not ended.wait(TICK):
                try:
                    db.sessions.tick()
                except (TopicstoreError, ExceptionGroup):  # for example while a shard moves; the next tick tries again
                    continue

        threads.submit(ticks)
        broker.say(0, "ready", None)
        for line in sys.stdin:
            threads.submit(broker.answer, line)
        ended.set()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], float(sys.argv[3]), float(sys.argv[4]) if sys.argv[4:] else None)
