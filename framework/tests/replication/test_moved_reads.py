"""A site that was moved, copied and restarted reads the same as a site that was never moved."""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import pytest
import topicstore as ts
from topicstore.replication import site
from topicstore_conformance.faults.threads import wait_until

from .conftest import Sites
from .test_moving import agreed
from .test_sites import cut

_SHARDS = 2
_TOPICS = ["a/0", "a/1/x", "b", "c/d/e", "$own/t"]
_CLIENTS = ["c0", "c1", "c2", "c3"]
_FILTERS = ["#", "a/#", "+/1/x", "c/d/e"]
_LAYOUTS = ["block", "skipstream", "wildcard_optimized", "reference"]


def everything(db: ts.Database, root: Path) -> dict[str, Any]:
    """Return the results of all public reads of a database, by name."""
    assert db.cluster is not None
    found: dict[str, Any] = {}
    for one in [*_FILTERS, "$own/#"]:
        for order in ("time", "timestamp"):
            found[f"replay {one} {order}"] = list(db.replay(one, order=order))
        found[f"arrow {one}"] = [batch.to_pylist() for batch in db.replay_arrow(one, order="time")]
        found[f"retained {one}"] = db.retained(one)
        found[f"topics {one}"] = db.topics(one)
        found[f"clients {one}"] = db.clients(one)
        found[f"latest {one}"] = db.latest(one)
        found[f"streams {one}"] = db.streams(one)
        found[f"read {one}"] = [
            db.read(db.cursor(stream, one), 1_000).batch.to_messages() for stream in db.streams(one)
        ]
    middle = [one.timestamp for one in db.replay("#")]
    if middle:
        at = sorted(one for one in middle if one is not None)[len(middle) // 2]
        found["from"] = list(db.replay("#", start=at))
        found["until by timestamp"] = list(db.replay("#", until=at, by="timestamp"))
    found["generations"] = [
        (one.number, one.layout, one.options, one.messages, one.sealed is None) for one in db.generations()
    ]
    found["learned"] = db.learned_topics()
    found["state"] = [[*db.state(shard).scan()] for shard in range(_SHARDS)]
    found["rules"] = [*db.persistence]
    found["rules apply"] = (db.persistence.filters, bool(db.persistence), len(db.persistence))
    found["retention"] = db.retention.settings
    found["sessions"] = [(one.client_id, one.subscriptions) for one in db.sessions]
    found["clients of sessions"] = (db.sessions.clients(), len(db.sessions))
    found["lag"] = {
        client: {key: lag.messages for key, lag in lags.items()}
        for client, lags in db.sessions.lag(*db.sessions.clients()).items()
    }
    found["messages"] = db.info().messages
    found["sql"] = db.sql(
        "SELECT topic, count(*) n, sum(payload_bytes) s FROM messages GROUP BY 1 ORDER BY 1"
    ).to_pylist()
    found["verified"] = [db.verify().messages, db.verify().damages]
    copy = root / "copy"
    db.checkpoint(copy)
    with ts.open(copy, mode="r") as copied:
        found["checkpoint"] = [list(copied.replay("#")), copied.retained("#"), copied.topics(), copied.verify().damages]
    shutil.rmtree(copy)
    with ts.open(db.path, mode="r") as reader:
        found["reader"] = [list(reader.replay("#")), reader.retained("#"), reader.topics(), reader.latest()]
    return found


class Moves:
    """Random writes and moves in a cluster of two sites, of which ``still`` always has replicas of all shards."""

    def __init__(self, sites: Sites, chance: random.Random, opened: ExitStack) -> None:
        self._sites, self._chance, self._opened = sites, chance, opened
        self.still = self._open("still")
        self.moved = self._open("moved")
        self._open_ones = [self.still, self.moved]
        self._number = 0
        self.done: list[str] = []

    def _open(self, name: str) -> ts.Database:
        how = {"layout": "block"} if name == "still" else {}
        return self._opened.enter_context(self._sites.open(name, shards=_SHARDS, log_retention=0, **how))

    def _close(self) -> None:
        self._open_ones = [self.still]
        self.moved.close()

    def _start(self) -> None:
        self.moved = self._open("moved")
        self._open_ones = [self.still, self.moved]

    def settle(self) -> None:
        wait_until(lambda: agreed(self.still, self.moved), f"the copies after {self.done[-1:]}")

    def at_owner(self, work: Callable[[ts.Database], object]) -> None:
        """Call ``work`` with each site in turn until one site, as the owner, accepts it."""

        def worked() -> bool:
            for db in self._open_ones:
                try:
                    work(db)
                except (ts.ShardElsewhereError, ts.ShardMovedError):
                    continue
                return True
            return False

        wait_until(worked, "an owner")

    # --- writes ---

    def store(self) -> None:
        chance, client = self._chance, self._chance.choice(_CLIENTS)
        batch = []
        for _ in range(chance.choice([1, 3, 40])):
            self._number += 1
            stamp = None if chance.random() < 0.7 else 1_700_000_000_000_000 + chance.randrange(10**9)
            batch.append(
                ts.Message(
                    chance.choice(_TOPICS), b"%d" % self._number, client, qos=chance.randrange(3), timestamp=stamp
                )
            )
        self.at_owner(lambda db: db.store(batch))

    def retain(self) -> None:
        chance = self._chance
        self._number += 1
        payload = b"" if chance.random() < 0.3 else b"%d" % self._number
        message = ts.Message(chance.choice(_TOPICS[:4]), payload, chance.choice(_CLIENTS), qos=1, retain=True)
        self.at_owner(lambda db: db.publish([message]))

    def delete(self) -> None:
        topic_filter = self._chance.choice(_FILTERS[1:])
        for db in self._open_ones:
            with suppress(ts.ShardElsewhereError, ts.ShardMovedError):
                db.delete(topic_filter)

    def add(self) -> None:
        self.still.add_generation(self._chance.choice(_LAYOUTS))

    def drop(self) -> None:
        found = self.still.generations()
        if len(found) > 2:
            self.still.drop_generation(found[0].number)

    def rule(self) -> None:
        one = self._chance.choice(_FILTERS)
        self.at_owner(lambda db: db.persistence.add(one))

    def no_rule(self) -> None:
        rules = [*self.still.persistence]
        if rules:
            rule = self._chance.choice(rules)
            self.at_owner(lambda db: db.persistence.remove(rule))

    def retention(self) -> None:
        hours = self._chance.randrange(1_000, 2_000)
        self.at_owner(lambda db: db.retention.set(filters={"x/#": f"{hours}h"}))

    def state(self) -> None:
        shard, key = self._chance.randrange(_SHARDS), b"\2%d" % self._chance.randrange(4)
        value = None if self._chance.random() < 0.3 else b"%d" % self._number
        self.at_owner(lambda db: db.state(shard).write([ts.StateWrite(key, value)]))

    def session(self) -> None:
        client, topic_filter = self._chance.choice(_CLIENTS), self._chance.choice(_FILTERS)

        def subscribe(db: ts.Database) -> None:
            session = db.sessions.open(client, expiry_interval=None)
            session.subscribe(topic_filter, qos=1)
            packets = session.deliver()
            for packet in packets[: len(packets) // 2]:
                session.puback(packet.packet_id)
            db.sessions.checkpoint()
            session.disconnect()

        self.at_owner(subscribe)

    def compact(self) -> None:
        self._chance.choice(self._open_ones).compact()

    def count(self) -> None:
        for db in self._open_ones:
            with suppress(ts.ShardElsewhereError):
                db.topics()
                db.topics("a/#")
                db.clients()

    # --- moves ---

    def leave(self) -> None:
        assert self.still.cluster is not None
        self.still.cluster.leave("moved")
        self.settle()
        self.write()
        self.write()
        self.still.cluster.join("moved")
        self.settle()

    def own(self) -> None:
        assert self.still.cluster is not None
        order = self._chance.sample(["still", "moved"], 2)
        with suppress(ts.ReplicasRefusedError):
            self.still.cluster.set_replicas(self._chance.choice([None, 0, 1]), order)
        self.settle()

    def base(self) -> None:
        """Truncate the log after the other site's last applied entry, while that site is open."""
        assert self.still.cluster is not None
        assert self.moved.cluster is not None
        self.still.cluster.set_replicas(None, ["still", "moved"])
        self.settle()
        wait_until(lambda: all(one.owned for one in self.still.cluster.replicas), "all shards at the first site")  # type: ignore[union-attr]
        copies = self.moved.cluster.replicas
        with ExitStack() as held:
            for copy in copies:
                held.enter_context(copy._reading)
            before = [cut(self._sites, shard) for shard in range(_SHARDS)]
            ends = [copy.progress.next for copy in copies]
            for _ in range(3):
                self.write()
            clients = {self.still.shard_of(client): client for client in _CLIENTS}
            for shard in range(_SHARDS):
                while cut(self._sites, shard) <= max(before[shard], ends[shard]):
                    self._number += 1
                    self.still.store([ts.Message("b", b"%d" % self._number, clients[shard])])
        self.settle()

    def restart(self) -> None:
        self._close()
        self.write()
        self._start()
        self.settle()

    def lose(self) -> None:
        self._close()
        shutil.rmtree(self._sites.root / "moved")
        self.write()
        self._start()
        self.settle()

    # ---

    def write(self) -> None:
        works = [self.store] * 6 + [self.retain] * 3 + [self.session, self.state] * 2
        works += [self.delete, self.add, self.drop, self.rule, self.no_rule, self.retention, self.compact, self.count]
        work = self._chance.choice(works)
        self.done.append(work.__name__)
        work()

    def move(self) -> None:
        work = self._chance.choice([self.leave, self.own, self.base, self.restart, self.lose])
        self.done.append(work.__name__)
        work()

    def _planned(self, db: ts.Database) -> bool:
        """Return whether a site has the generations of the cluster's document, in all shards."""
        assert self.still.cluster is not None
        self.still.cluster.info()  # reads the newest document
        planned = [one.number for one in self.still.cluster.document.generations if not one.dropped]
        return all(planned == [record.number for record in shard.generations.listed()] for shard in db.storage.shards)

    def compare(self) -> None:
        wait_until(lambda: self._planned(self.still) and self._planned(self.moved), "the planned generations")
        self.still.refresh()
        self.moved.refresh()
        one, other = (everything(db, self._sites.root) for db in (self.still, self.moved))
        different = {key: (one[key], other[key]) for key in one if one[key] != other[key]}
        assert {} == different, (self.done, different)
        assert [] == one["verified"][1]


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(1, 30))])
def test_a_moved_site_reads_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    """After any writes and moves, every read of a moved site returns what it returns on a site that stayed."""
    monkeypatch.setattr(site, "_BASE_BYTES", 1_000)
    with ExitStack() as opened:
        moves = Moves(Sites(tmp_path), random.Random(seed), opened)
        moves.settle()
        for _ in range(6):
            for _ in range(moves._chance.randrange(1, 6)):
                moves.write()
            moves.move()
            moves.compare()
