"""Sites that join, leave and are forgotten, and shards that move between them while they are written."""

from __future__ import annotations

import random
import shutil
import threading
import warnings
from collections.abc import Iterator, Mapping
from concurrent.futures import Future
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from typing import Any

import pytest
import topicstore as ts
from topicstore.replication import bases, names, replica, site
from topicstore.replication.info import ShardInfo
from topicstore.replication.snapshots import has_contents
from topicstore.shard import reader
from topicstore.shard.generations import Generations
from topicstore_conformance.faults.threads import begin, running, wait_until

from .conftest import NEVER, Sites
from .test_sites import is_behind, messages, payloads


def shards(db: ts.Database) -> tuple[ShardInfo, ...]:
    assert db.cluster is not None
    return db.cluster.info().shards


def settled(db: ts.Database) -> bool:
    """Return whether no shard is on its way to another site."""
    return all(not one.joining and not one.leaving and one.owner in one.replicas for one in shards(db))


def keeps(db: ts.Database) -> list[int]:
    """Return the shards of which a site has a replica, as the site itself reports them."""
    assert db.cluster is not None
    return [replica.shard.number for replica in db.cluster.replicas if replica.kept]


def agreed(*dbs: ts.Database) -> bool:
    """Return whether each site has replicas of the shards that the cluster document assigns to it, and of no others."""
    return settled(dbs[0]) and all(
        keeps(db) == [one.shard for one in shards(db) if db.cluster is not None and db.cluster.name in one.replicas]
        for db in dbs
    )


@contextmanager
def writing(dbs: Mapping[str, ts.Database]) -> Iterator[list[int]]:
    """Store messages in a thread, each at its shard's owner, until the context ends; yield the acknowledged numbers."""
    stored: list[int] = []
    failed: list[BaseException] = []
    stopping = threading.Event()

    def store(number: int) -> bool:
        for db in [*dbs.values()]:
            try:
                db.store(messages(number))
            except (ts.ShardElsewhereError, ts.DatabaseClosedError):
                continue
            except ts.ShardMovedError as moved:
                if moved.stored is not False:
                    raise
                continue
            stored.append(number)
            return True
        return False

    def work() -> None:
        number = 0
        try:
            while not stopping.is_set():
                if store(number):
                    number += 1
        except ts.TopicstoreError as error:
            failed.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    try:
        wait_until(lambda: len(stored) > 20 or failed, "the first stores")
        yield stored
        before = len(stored)
        wait_until(lambda: len(stored) > before + 20 or failed, "further stores")
    finally:
        stopping.set()
        thread.join()
    assert [] == failed


def test_with_many_sites_each_keeps_only_its_shards(sites: Sites) -> None:
    """With more sites than replicas, a site has its own shards only, and its errors name the owners of the others."""
    how = {"replication_factor": 1}
    with ExitStack() as opened:
        dbs = [opened.enter_context(sites.open("a", shards=4, address="host-a", **how))]
        dbs[0].store(messages(*range(40)))
        dbs += [opened.enter_context(sites.open(name, address=f"host-{name}", **how)) for name in "bcd"]
        wait_until(lambda: agreed(*dbs), "copies at their sites")
        found = shards(dbs[0])
        assert [1, 1, 1] == [len(one.replicas) for one in found[1:]]
        # shard 0 has the settings, so every site with a replica has one of shard 0
        assert {site for one in found[1:] for site in one.replicas} <= set(found[0].replicas)
        for db in dbs:
            assert db.cluster is not None
            missing = [one for one in found if db.cluster.name not in one.replicas]
            assert missing
            engines = [db.storage.shards[one.shard].writer.open_engine() for one in missing]
            wait_until(lambda engines=engines: not any(map(has_contents, engines)), "the removal of local data")  # type: ignore[misc]
            for read in (
                *(partial(one, "#") for one in (db.topics, db.streams, db.latest, db.retained, db.subscribe)),
                partial(payloads, db),
            ):
                with pytest.raises(ts.ShardElsewhereError, match="is not kept on this site") as elsewhere:
                    read()
                error = elsewhere.value
                assert (error.shard, error.site, error.address) in [
                    (one.shard, one.owner, f"host-{one.owner}") for one in missing
                ]
            with pytest.raises(ts.ShardElsewhereError):
                db.state(missing[0].shard)
            with pytest.raises(ts.ShardElsewhereError) as written:
                db.store(
                    [ts.Message("a", b"", next(f"{n}" for n in range(99) if db.shard_of(f"{n}") == missing[0].shard))]
                )
            assert missing[0].owner == written.value.site
            for shard in (replica.shard.number for replica in db.cluster.replicas if replica.owned):
                session = db.sessions.open(next(f"{n}" for n in range(99) if db.shard_of(f"{n}") == shard))
                with pytest.raises(ts.ShardElsewhereError):
                    session.subscribe("#")
            assert [1] == [generation.number for generation in db.generations()]  # at every site
            assert not db.verify().damages
            with ts.open(db.path, mode="r") as reader:
                for read in (reader.topics, partial(payloads, reader)):
                    with pytest.raises(ts.ShardElsewhereError, match="is not kept on this site"):
                        read()
        with writing(dict(zip("abcd", dbs, strict=True))) as stored:
            dbs[0].cluster.set_replicas(None, ["a", "b"])  # type: ignore[union-attr]
            wait_until(lambda: agreed(*dbs) and keeps(dbs[1]) == [0, 1, 2, 3], "all shards at two sites")
        assert sorted([*range(40), *stored]) == payloads(dbs[0]) == payloads(dbs[1])
        assert [] == keeps(dbs[2]) == keeps(dbs[3])
        dbs[2].close()
        with sites.open("c", **how) as c:
            assert agreed(*dbs[:2], c)


def test_a_site_leaves_and_joins_again_while_shards_are_written(sites: Sites) -> None:
    """A site that leaves hands its shards over without losing messages, and is removed when it is closed."""
    with sites.open("a", shards=2) as a, ExitStack() as opened:
        b = opened.enter_context(sites.open("b"))
        wait_until(lambda: agreed(a, b), "two replicas")
        assert a.cluster is not None
        assert b.cluster is not None
        with writing({"a": a, "b": b}) as stored:
            a.cluster.leave()
            wait_until(lambda: agreed(a, b) and keeps(a) == [], "the shards at the site that stays")
            assert ["b", "b"] == [one.owner for one in shards(b)]
            with pytest.raises(ts.ReplicasRefusedError, match="last replica of shard 0"):
                b.cluster.leave()
            with pytest.raises(ts.ReplicasRefusedError, match="site a is leaving"):
                b.cluster.set_replicas(0, ["a"])
            with pytest.raises(ts.ShardElsewhereError):
                payloads(a)
            a.cluster.join()
            wait_until(lambda: agreed(a, b) and keeps(a) == [0, 1], "the copies at the site that joins again")
            b.cluster.leave("b")
            wait_until(lambda: agreed(a, b) and keeps(b) == [], "the shards back at the first site")
        assert sorted(stored) == payloads(a)
        opened.close()
        assert ["a"] == [site.name for site in a.cluster.info().sites]


def test_a_site_may_leave_once_all_have_joined(sites: Sites) -> None:
    """``n_sites`` counts the sites that have ever joined, so the other sites still store after one has left."""
    with sites.open("a", n_sites=2) as a:
        with sites.open("b", n_sites=2) as b:
            wait_until(lambda: agreed(a, b), "two replicas")
            a.store(messages(0))
            assert b.cluster is not None
            b.cluster.leave()
            wait_until(lambda: agreed(a, b) and keeps(b) == [], "everything at the other site")
        assert a.cluster is not None
        wait_until(lambda: [*a.cluster.document.sites] == ["a"], "the document without the site")  # type: ignore[union-attr]
        a.store(messages(1))
        assert [0, 1] == payloads(a)


def test_replicas_that_cannot_be_are_refused(sites: Sites) -> None:
    """Unknown sites, unknown shards and a site that sends heartbeats are refused with the reason; nothing changes."""
    with sites.open("a", shards=2) as a, sites.open("b") as b:
        wait_until(lambda: agreed(a, b), "two replicas")
        assert a.cluster is not None
        before = a.cluster.info().document
        for call in (
            lambda: a.cluster.set_replicas(0, ["x"]),
            lambda: a.cluster.leave("x"),
            lambda: a.cluster.forget("x"),
        ):  # type: ignore[union-attr]
            with pytest.raises(ts.UnknownSiteError, match="there is no site 'x'; there are a, b"):
                call()
        for shard in (2, -1, True, "0"):
            with pytest.raises(ts.InvalidArgumentError, match="there is no shard"):
                a.cluster.set_replicas(shard, ["a"])  # type: ignore[arg-type]
        for wrong in ("ab", None):
            with pytest.raises(ts.InvalidArgumentError, match="sequence of names"):
                a.cluster.set_replicas(0, wrong)  # type: ignore[arg-type]
        for site in ("a", "b"):
            with pytest.raises(ts.ReplicasRefusedError, match=f"site {site} is running"):
                a.cluster.forget(site)
        assert before == a.cluster.info().document


def test_a_site_that_is_gone_is_forgotten(sites: Sites) -> None:
    """A forgotten site is no longer a replica; a shard of which it had the only replica is copied from the log store.

    The site may join the cluster again.
    """
    with sites.open("a", shards=2, takeover_after=0.3) as a, ExitStack() as opened:
        b = opened.enter_context(sites.open("b"))
        wait_until(lambda: agreed(a, b), "two replicas")
        assert a.cluster is not None
        a.cluster.set_replicas(1, ["b"])
        wait_until(lambda: agreed(a, b) and keeps(a) == [0], "shard 1 at site b")
        with writing({"a": a, "b": b}) as stored:
            pass
        opened.close()
        wait_until(lambda: not a.cluster.info().sites[1].beats, "silence")  # type: ignore[union-attr]
        assert "b" == shards(a)[1].owner
        a.cluster.forget("b")
        assert ["a"] == [site.name for site in a.cluster.info().sites]
        wait_until(lambda: agreed(a) and all(replica.owned for replica in a.cluster.replicas), "all shards")  # type: ignore[union-attr]
        a.store(messages(*range(1_000, 1_010)))
        assert sorted([*stored, *range(1_000, 1_010)]) == payloads(a)
        with sites.open("b") as b:
            wait_until(lambda: agreed(a, b) and keeps(b) == [0, 1], "copies at the site that came again")


def test_a_subscription_ends_when_a_shard_leaves_its_site(sites: Sites) -> None:
    """A subscription whose site loses its replica misses no message before it raises `ShardElsewhereError`."""
    with sites.open("a", shards=2) as a, sites.open("b") as b, b.subscribe("#", 0) as follower:
        wait_until(lambda: agreed(a, b), "two replicas")
        a.store(messages(1, 2))
        assert a.cluster is not None
        a.cluster.leave("b")
        wait_until(lambda: keeps(b) == [], "no copies at site b")
        a.store(messages(3))
        with pytest.raises(ts.ShardElsewhereError):
            list(follower)


def test_a_copy_is_read_only_once_it_is_whole(sites: Sites) -> None:
    """A site that becomes a replica again refuses reads of the shard until it has received all that is in the log."""
    with sites.open("a", shards=2) as a, sites.open("b") as b:
        wait_until(lambda: agreed(a, b), "two replicas")
        a.store(messages(*range(20)))
        assert a.cluster is not None
        assert b.cluster is not None
        a.cluster.leave("b")
        engine = b.storage.shards[1].writer.open_engine()
        wait_until(lambda: not has_contents(engine), "no copy at site b")
        entry = sites.root / "log" / names.entry(1, 1)
        entry.rename(sites.root / "entry")
        entry.write_bytes(b"damaged")
        a.cluster.join("b")
        with warnings.catch_warnings(action="ignore"):
            wait_until(lambda: b.cluster.replicas[1].failure, "the damaged entry")  # type: ignore[union-attr]
        assert [0, 1] == keeps(b)
        with pytest.raises(ts.ShardElsewhereError, match="its copy is not complete yet"):
            payloads(b, fresh=False)
        (sites.root / "entry").rename(entry)
        wait_until(lambda: agreed(a, b), "two replicas")
        assert [*range(20)] == payloads(b)


def test_a_replay_waits_while_a_base_replaces_the_copy(sites: Sites, monkeypatch: pytest.MonkeyPatch) -> None:
    """A replay that begins while a base replaces a replica returns the messages that the replica had before."""
    monkeypatch.setattr(site, "_BASE_BYTES", 1)
    replays: list[Future[list[int]]] = []
    waiting = (Generations.undisturbed, Generations.slab, Generations.listed)

    def read_part(*args: Any) -> bytes:
        replays.append(begin(lambda: payloads(b, fresh=False)))
        wait_until(lambda: replays[-1].done() or any(map(running, waiting)), "a replay that waits, or has ended")
        return bases.read_part(*args)

    with sites.open("a", log_retention=0) as a, sites.open("b") as b:
        a.store(messages(0))
        assert [0] == payloads(b)
        assert b.cluster is not None
        monkeypatch.setattr(replica, "read_part", read_part)
        with b.cluster.replicas[0]._reading:  # stops this replica from reading the log
            for number in range(1, 20):
                a.store(messages(number))
            wait_until(lambda: is_behind(b, sites), "a cut behind the site")
        wait_until(lambda: replays, "a base")
        assert all(0 in one.result(NEVER) for one in replays)
        assert [*range(20)] == payloads(b)


def test_reads_that_a_base_overtakes_begin_again(sites: Sites, monkeypatch: pytest.MonkeyPatch) -> None:
    """Reads that run while a base replaces a replica return its contents before or after that, never a mixture."""
    monkeypatch.setattr(site, "_BASE_BYTES", 1)
    reads: dict[str, Future[Any]] = {}
    planning, replacing = threading.Event(), threading.Event()
    reaches = reader._reaches

    def reaches_late(*args: Any) -> bool:  # a running read then sees half-replaced contents
        if not planning.is_set():
            planning.set()
            assert replacing.wait(NEVER)
        return reaches(*args)

    def read_part(*args: Any) -> bytes:
        replacing.set()
        wait_until(lambda: reads["plan"].done() or running(Generations.undisturbed), "a plan that waits, or has ended")
        reads["retained"] = begin(lambda: b.retained("#"))
        reads["state"] = begin(lambda: b.state(0).get(b"\2k"))
        reads["scan"] = begin(lambda: [*b.state(0).scan()])
        reads["topics"] = begin(lambda: [one.topic for one in b.topics() if one.messages])
        for read in reads.values():
            wait_until(lambda read=read: read.done() or running(Generations.undisturbed), "reads that wait")  # type: ignore[misc]
        return bases.read_part(*args)

    with sites.open("a", log_retention=0) as a, sites.open("b") as b:
        a.publish([ts.Message("a/0", b"0", "c", retain=True)], state={0: [ts.StateWrite(b"\2k", b"v")]})
        assert [0] == payloads(b)
        assert b.cluster is not None
        with b.cluster.replicas[0]._reading:  # stops this replica from reading the log
            for number in range(1, 20):
                a.store(messages(number))
            wait_until(lambda: is_behind(b, sites), "a cut behind the site")
            monkeypatch.setattr(reader, "_reaches", reaches_late)
            reads["plan"] = begin(lambda: payloads(b, fresh=False))
            assert planning.wait(NEVER)
            monkeypatch.setattr(replica, "read_part", read_part)
        wait_until(lambda: "topics" in reads and all(one.done() for one in reads.values()), "the reads")
        assert 0 in reads["plan"].result()
        assert [b"0"] == [message.payload for message in reads["retained"].result()]
        assert b"v" == reads["state"].result()
        assert [(b"\2k", b"v")] == reads["scan"].result()
        assert "a/0" in reads["topics"].result()
        assert [*range(20)] == payloads(b)


def test_a_subscription_has_what_its_site_receives_with_a_base(sites: Sites, monkeypatch: pytest.MonkeyPatch) -> None:
    """A subscriber misses no message that its site receives with a base instead of from the log."""
    monkeypatch.setattr(site, "_BASE_BYTES", 1)
    with sites.open("a", log_retention=0) as a, sites.open("b") as b, b.subscribe("#", 0) as follower:
        a.store(messages(0))
        received = [int(message.payload) for message in follower.fetch(timeout=NEVER).messages]
        assert [0] == received
        assert b.cluster is not None
        with b.cluster.replicas[0]._reading:  # stops this replica from reading the log
            for number in range(1, 20):
                a.store(messages(number))
            wait_until(lambda: is_behind(b, sites), "a cut of the log")
        while len(received) < 20:
            received += [int(message.payload) for message in follower.fetch(timeout=NEVER).messages]
        assert [*range(20)] == received


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(1, 30))])
def test_whatever_moves_nothing_is_lost(sites: Sites, monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    """While shards move, and sites leave, join, restart and lose their directories, each message is stored once."""
    monkeypatch.setattr(site, "_BASE_BYTES", 2_000)
    chance = random.Random(seed)
    with ExitStack() as opened:

        def start(name: str) -> ts.Database:
            return opened.enter_context(sites.open(name, replication_factor=2, log_retention=0, shards=3))

        running = {name: start(name) for name in "abcd"}
        with writing(running) as stored:
            for _ in range(8):
                name = chance.choice(sorted(running))
                step = chance.choice(["assign", "assign", "leave", "join", "restart", "lose"])
                there = running[chance.choice(sorted(running))].cluster
                assert there is not None
                if step == "assign":
                    shard = chance.choice([None, 0, 1, 2])
                    with suppress(ts.ReplicasRefusedError):
                        there.set_replicas(shard, chance.sample("abcd", chance.randrange(3)))
                elif step == "leave":
                    with suppress(ts.ReplicasRefusedError):
                        there.leave(name)
                elif step == "join":
                    there.join(name)
                else:
                    running.pop(name).close()
                    if step == "lose":
                        shutil.rmtree(sites.root / name)
                    running[name] = start(name)
                wait_until(lambda: agreed(*running.values()), f"what {step} of {name} asks for")
        for name in running:
            there.join(name)
        there.set_replicas(None, ["a"])
        wait_until(lambda: agreed(*running.values()) and keeps(running["a"]) == [0, 1, 2], "everything at one site")
        assert sorted(stored) == payloads(running["a"])


def split(a: ts.Database, b: ts.Database) -> None:
    """Make site a the owner of shard 0, and site b the owner of shard 1; b has replicas of both."""
    assert a.cluster is not None
    assert b.cluster is not None
    a.cluster.set_replicas(0, ["a", "b"])
    a.cluster.set_replicas(1, ["b"])
    both = [a.cluster, b.cluster]
    wait_until(
        lambda: (
            all(["a", "b"] == [one.owner[0] for one in each.replicas] for each in both)
            and [True, False, False, True] == [one.owned for each in both for one in each.replicas]
        ),
        "a shard at each site",
    )


def stored(db: ts.Database, number: int) -> bool:
    """Store a message, and return True, unless another site owns its shard."""
    try:
        db.store(messages(number))
    except ts.ShardElsewhereError:
        return False
    return True


def test_a_begun_cluster_with_messages_for_sessions_only_stores(sites: Sites) -> None:
    """A cluster's owners store after it began with a database that was still recording messages stored for sessions.

    The database's spans of interest, the records of these messages, had no end yet.
    """
    with ts.open(sites.root / "a", shards=2) as db:
        db.retention.set(delivered="1s")
        db.sessions.open("me", expiry_interval=None).subscribe("a/#", qos=1)
        db.publish(messages(0))
        assert None in [span.last for shard in range(2) for span in db.storage.interest.of_shard(shard)]
    ts.begin_cluster(sites.root / "a", sites.url)
    with sites.open("a") as a, sites.open("b") as b:
        wait_until(lambda: agreed(a, b), "two replicas")
        split(a, b)
        for number in range(1, 10):
            assert any(stored(db, number) for db in (a, b))
        assert [*range(10)] == payloads(b)


def test_the_quota_counts_what_a_base_has(sites: Sites, monkeypatch: pytest.MonkeyPatch) -> None:
    """A site that received messages with a base and then becomes the owner counts them towards ``max_bytes``."""
    monkeypatch.setattr(site, "_BASE_BYTES", 1)
    with sites.open("a", log_retention=0) as a, sites.open("b") as b:
        a.retention.set(max_bytes=200_000)
        a.store(messages(0))
        assert [0] == payloads(b)
        b.storage.quota.admit()  # the site computes its free quota now
        assert a.cluster is not None
        assert b.cluster is not None
        with b.cluster.replicas[0]._reading:  # stops this replica from reading the log
            a.store([ts.Message("a", random.Random(0).randbytes(250_000), "c")])
            wait_until(lambda: is_behind(b, sites), "a cut behind the site")
        a.cluster.leave()
        wait_until(lambda: b.cluster.replicas[0].owned, "the shard at the other site")  # type: ignore[union-attr]
        with pytest.raises(ts.QuotaExceededError):
            b.store(messages(1))
