"""Copies of shards whose engine failed and was opened again, and whose copying was interrupted."""

from __future__ import annotations

import re
import shutil
import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import httpx
import pytest
import topicstore as ts
from click.testing import CliRunner
from topicstore.cli import cli
from topicstore.contract.log_store import StorageUnavailableError
from topicstore.replication import replica, site
from topicstore.replication.placement import choose_owners
from topicstore.shard.writer import ShardWriter
from topicstore.storage.opening import ShardOpener
from topicstore_conformance.faults.threads import wait_until
from topicstore_conformance.mqtt.embedded import serving_http

from .conftest import NEVER, Sites
from .test_sites import cut, entries, is_behind, messages, payloads, replicas


def writer(db: ts.Database) -> ShardWriter:
    return db.storage.shards[0].writer


def stores(db: ts.Database, number: int) -> bool:
    """Store a message, and return True, unless the site doesn't own its shard yet."""
    try:
        db.store(messages(number))
    except (ts.ShardElsewhereError, ts.ShardMovedError):
        return False
    return True


@contextmanager
def failing(db: ts.Database, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Let every write of a site's shards raise an error until the context ends, as on a full disk."""
    full, write = [shard.writer.engine for shard in db.storage.shards], type(writer(db).engine).write

    def write_elsewhere(engine: Any, batch: Any, **how: Any) -> None:
        if engine in full:
            raise ts.EngineError("the disk is full")
        write(engine, batch, **how)

    with monkeypatch.context() as patched, warnings.catch_warnings(action="ignore"):
        patched.setattr(type(writer(db).engine), "write", write_elsewhere)
        yield


def backing_off(db: ts.Database) -> list[str]:
    """Return the sites that are in back-off after a failure."""
    assert db.cluster is not None
    return [one.name for one in db.cluster.info().sites if 0 < one.back_off < NEVER]


def beats(db: ts.Database, number: int) -> None:
    """Wait until a site has sent more heartbeats, each of which follows a decision about its duties."""
    assert db.cluster is not None
    before = db.cluster._beat_number
    wait_until(lambda: db.cluster._beat_number >= before + number, "heartbeats")  # type: ignore[union-attr]


def fail(db: ts.Database, monkeypatch: pytest.MonkeyPatch, *, stored: bool) -> None:
    """Let the next write of a site's shard raise an error; with ``stored``, the engine has stored the write."""
    failing, write = writer(db).engine, type(writer(db).engine).write

    def write_once(engine: Any, batch: Any) -> None:
        if engine is not failing:
            write(engine, batch)
            return
        monkeypatch.undo()
        if stored:
            write(engine, batch)
        raise ts.EngineError("the disk is full")

    monkeypatch.setattr(type(failing), "write", write_once)


def test_an_owner_that_cannot_write_is_replaced_by_a_site_that_can(
    sites: Sites, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A shard that takes no writes is taken over at once by another site, and the former owner follows it later.

    The other site has no other reason to suspect it. `info`, the site's `failure` and a store's error show the owner.
    `info` also shows at both sites how long the former owner then backs off.
    """
    with sites.open("a") as a, sites.open("b", address="host-b") as b:
        a.store(messages(0, 1))
        assert [0, 1] == payloads(b)
        assert a.cluster is not None
        with failing(a, monkeypatch):
            with pytest.raises(ts.EngineError, match="the disk is full"):
                a.store(messages(2))
            wait_until(lambda: stores(b, 3), "a store at the other site")
            wait_until(lambda: "; site b owns it" in (a.cluster.failure or ""), "the reason")  # type: ignore[union-attr]
            before = a.cluster.info().document, entries(sites)
            beats(a, 20)
            (shard,) = a.cluster.info().shards
            assert (("b", ("a",)), before) == ((shard.owner, shard.failed), (a.cluster.info().document, entries(sites)))
            assert shard == b.cluster.info().shards[0]  # type: ignore[union-attr]
            with pytest.raises(ts.ShardElsewhereError, match="host-b"):
                a.store(messages(4))
        assert [0] == a.recover()
        b.store(messages(5))
        for db in (a, b):
            assert [0, 1, 2, 3, 5] == payloads(db)
        wait_until(lambda: a.cluster.failure is None, "the end of the failure")  # type: ignore[union-attr]
        assert () == a.cluster.info().shards[0].failed
        for db in (a, b):
            wait_until(lambda db=db: ["a"] == backing_off(db), "the back-off of the former owner")  # type: ignore[misc]


def test_a_copy_that_takes_no_writes_is_shown_to_operators(sites: Sites, monkeypatch: pytest.MonkeyPatch) -> None:
    """`topicstore ds info` and ``/ds`` show a copy that takes no writes, and its site's back-off after the recovery."""

    def shown() -> list[str]:
        return CliRunner().invoke(cli, ["ds", "info", "--url", url]).stdout.splitlines()

    with sites.open("a") as a, sites.open("b") as b, serving_http(b) as server:
        a.store(messages(0))
        assert [0] == payloads(b)
        (url,) = server.urls_of_http
        assert "FAILED REPLICAS:" not in shown()
        with failing(a, monkeypatch):
            with pytest.raises(ts.EngineError, match="the disk is full"):
                a.store(messages(1))
            wait_until(lambda: "FAILED REPLICAS:" in shown(), "the failure in the output")
            lines = shown()
            first = lines.index("FAILED REPLICAS:")
            assert [f"{'Shard':34}Replicas", f"{'messages/0':34}a"] == lines[first + 1 : first + 3]
            answer = httpx.get(f"{url}/api/v5/ds/sites/a").json()
            assert (True, ["down"]) == (answer["up"], [one["status"] for one in answer["shards"]])
        assert [0] == a.recover()
        wait_until(lambda: "FAILED REPLICAS:" not in shown(), "the end of the failure")
        found = [re.fullmatch(r"([ab]) {4}'.*' {8}up(?: {4}backs off for (\d+) s)?", line) for line in shown()]
        assert [("a", True), ("b", False)] == [(one[1], one[2] is not None) for one in found if one]


def test_an_owner_without_another_site_keeps_its_shard(sites: Sites, monkeypatch: pytest.MonkeyPatch) -> None:
    """An owner that can't write adds no entry to the log and no document; after `recover` it stores again."""
    with sites.open("a") as a:
        a.store(messages(0))
        assert a.cluster is not None
        with failing(a, monkeypatch):
            with pytest.raises(ts.EngineError, match="the disk is full"):
                a.store(messages(1))
            wait_until(lambda: "no other site has taken it over" in (a.cluster.failure or ""), "the reason")  # type: ignore[union-attr]
            before = a.cluster.info().document, entries(sites)
            beats(a, 20)
            assert before == (a.cluster.info().document, entries(sites))
        assert [0] == a.recover()
        wait_until(lambda: stores(a, 2), "a store after the recovery")
        assert [0, 1, 2] == payloads(a)


def test_a_shard_that_no_site_can_write_is_written_by_the_first_that_can_again(
    sites: Sites, closing: ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While all copies have failed, the sites create no further documents and entries.

    The first copy that recovers is written, even if another site was the owner.
    """
    names = "abc"
    dbs = [closing.enter_context(sites.open(name)) for name in names]
    wait_until(lambda: [{*names}] == replicas(dbs[0]), "three replicas")
    dbs[0].store(messages(0))
    for db in dbs:
        assert [0] == payloads(db)
    with ExitStack() as failed:
        for db in dbs:
            failed.enter_context(failing(db, monkeypatch))
        with pytest.raises(ts.EngineError, match="the disk is full"):
            dbs[0].store(messages(1))
        wait_until(lambda: all(set(names) == {*db.cluster.info().shards[0].failed} for db in dbs), "failures")  # type: ignore[union-attr]
        for db in dbs:
            beats(db, 5)
        before = dbs[0].cluster.info().document, entries(sites)  # type: ignore[union-attr]
        for db in dbs:
            beats(db, 20)
        assert before == (dbs[0].cluster.info().document, entries(sites))  # type: ignore[union-attr]
    owner = dbs[0].cluster.info().shards[0].owner  # type: ignore[union-attr]
    first, *others = sorted(dbs, key=lambda db: db.cluster.name == owner)  # type: ignore[union-attr]
    with warnings.catch_warnings(action="ignore"):
        assert [0] == first.recover()
        wait_until(lambda: stores(first, 2), "a store at the first site")
        for db in others:
            assert [0] == db.recover()
        for db in dbs:
            assert [0, 1, 2] == payloads(db)


def test_a_site_that_closes_passes_its_shards_on_to_copies_that_take_writes(
    sites: Sites, closing: ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A closing site doesn't pass its shards on to a site whose last heartbeat reports a failed copy."""
    a, *others = (closing.enter_context(sites.open(name)) for name in "abc")
    wait_until(lambda: [{*"abc"}] == replicas(a), "three replicas")
    (heir,) = choose_owners([""], [["b", "c"]])  # the next owner if no copy had failed
    bad, good = sorted(others, key=lambda db: db.cluster is not None and db.cluster.name != heir)
    with failing(bad, monkeypatch):
        a.store(messages(0))
        assert bad.cluster is not None
        wait_until(lambda: bad.cluster.name in a.cluster.info().shards[0].failed, "the failure")  # type: ignore[union-attr]
        bad.cluster._stopping.set()  # so that it passes nothing on itself
        bad.cluster._join()
        a.close()
        assert good.cluster is not None
        assert good.cluster.name == good.cluster.info().shards[0].owner
        wait_until(lambda: stores(good, 1), "a store at the other site")
        assert [0, 1] == payloads(good)


@pytest.mark.parametrize("stored", [False, True])
@pytest.mark.parametrize("failing", ["owner", "follower"])
def test_an_entry_is_applied_once_though_its_write_failed(
    sites: Sites, monkeypatch: pytest.MonkeyPatch, failing: str, stored: bool
) -> None:
    """After `recover`, a site has each message once, whether or not the failed write is in its engine."""
    with sites.open("a") as a, sites.open("b") as b:
        a.store(messages(0, 1))
        assert [0, 1] == payloads(b)
        bad = a if failing == "owner" else b
        fail(bad, monkeypatch, stored=stored)
        with warnings.catch_warnings(action="ignore"):
            if bad is a:
                with pytest.raises(ts.EngineError, match="the disk is full"):
                    a.store(messages(2))
            else:
                a.store(messages(2))
            wait_until(lambda: writer(bad).failure, "the failed write")
            assert [0] == bad.recover()
        wait_until(lambda: stores(a, 3) or stores(b, 3), "a store after the recovery")
        for db in (a, b):
            assert [0, 1, 2, 3] == payloads(db)
            assert 4 == db.info().messages == sum(one.messages for one in db.topics())
            assert [] == db.verify().damages


@pytest.mark.parametrize("failing", ["owner", "follower"])
def test_a_recovered_site_reads_again_what_its_engine_has_lost(
    sites: Sites, monkeypatch: pytest.MonkeyPatch, failing: str
) -> None:
    """If a reopened engine lacks writes that were applied, among them a generation, the site gets them from the log."""
    opened, copy = ShardOpener._open_engine, sites.root / "copy"

    def open_earlier(opener: ShardOpener, *args: Any, **how: Any) -> Any:
        shutil.rmtree(shard)
        shutil.copytree(copy, shard)
        return opened(opener, *args, **how)

    with sites.open("a") as a, sites.open("b") as b:
        a.store(messages(0, 1))
        assert [0, 1] == payloads(b)
        bad = a if failing == "owner" else b
        bad.flush()
        shard = bad.path / "shard-0000"
        shutil.copytree(shard, copy)
        a.store(messages(2))
        a.add_generation()
        a.store(messages(3))
        assert [0, 1, 2, 3] == payloads(b)
        with warnings.catch_warnings(action="ignore"):
            with writer(bad).lock:
                writer(bad).fail(ts.EngineError("the disk is full"))
            with monkeypatch.context() as patched:
                patched.setattr(ShardOpener, "_open_engine", open_earlier)
                assert [0] == bad.recover()
            if bad is a:  # after losing applied entries it steps down, unless it has already handed over
                with pytest.raises(ts.TopicstoreError, match=r"was opened again|is written by|is releasing"):
                    a.store(messages(4))
            else:
                a.store(messages(4))
            wait_until(lambda: stores(a, 5) or stores(b, 5), "a store after the recovery")
        for db in (a, b):
            found = payloads(db)
            assert found == payloads(a)
            assert len(found) == db.info().messages
            if bad is a:  # a store that raised an error may still be in the log
                found = [one for one in found if one != 4]
            assert [0, 1, 2, 3, *([] if bad is a else [4]), 5] == found
            assert [] == db.verify().damages
            assert [1, 2] == [generation.number for generation in db.generations()]


def test_an_interrupted_copy_is_not_read(sites: Sites, monkeypatch: pytest.MonkeyPatch) -> None:
    """A replica whose copying from a base was interrupted refuses reads until the copying has been completed."""
    monkeypatch.setattr(site, "_BASE_BYTES", 1)

    def read_part(*_: object) -> bytes:
        raise StorageUnavailableError("no answer")

    with sites.open("a", log_retention=0) as a, sites.open("b") as b:
        a.store(messages(0))
        assert [0] == payloads(b)
        assert b.cluster is not None
        copy = b.cluster.replicas[0]
        with monkeypatch.context() as patched, warnings.catch_warnings(action="ignore"):
            patched.setattr(replica, "read_part", read_part)
            with copy._reading:  # stops this replica from reading the log
                for number in range(1, 20):
                    a.store(messages(number))
                wait_until(lambda: is_behind(b, sites), "a cut behind the site")
            wait_until(lambda: copy.failure, "the interrupted copying")
            for _ in range(3):
                for read in (lambda: payloads(b, fresh=False), b.topics, lambda: b.retained("#")):
                    with pytest.raises(ts.ShardElsewhereError, match="its copy is not complete yet"):
                        read()
                with pytest.raises(StorageUnavailableError):
                    copy.follow(certain=False)
        wait_until(lambda: not writer(b).elsewhere, "a copy of the base")
        assert [*range(20)] == payloads(b)
        assert 20 == b.info().messages


def test_a_copied_site_leaves_the_shard_to_its_owner(sites: Sites, monkeypatch: pytest.MonkeyPatch) -> None:
    """A site that released a shard, and is then copied from a base, doesn't take the shard over again."""
    monkeypatch.setattr(site, "_BASE_BYTES", 1)
    with ExitStack() as opened:
        a, b, c = (opened.enter_context(sites.open(name, log_retention=0)) for name in "abc")
        assert a.cluster is not None
        assert b.cluster is not None
        assert c.cluster is not None
        wait_until(lambda: {"a", "b", "c"} == replicas(a)[0], "three replicas")
        a.store(messages(0))
        copy = b.cluster.replicas[0]
        with c.cluster.replicas[0]._reading:  # keeps the next owner from taking over
            a.cluster.set_replicas(0, ["c", "b"])
            wait_until(lambda: copy.released, "the entry that releases the shard")
            copy._reading.acquire()  # stops this replica from reading the log
        try:
            for number in range(1, 20):
                wait_until(lambda number=number: stores(c, number), "a store at the next owner")  # type: ignore[misc]
            end = c.cluster.replicas[0].progress.next
            wait_until(lambda: cut(sites) == end, "a base with everything")
        finally:
            copy._reading.release()
        assert [*range(20)] == payloads(b)
        documents = c.cluster.info().document
        rounds = b.cluster._beat_number
        wait_until(lambda: b.cluster._beat_number > rounds + 5, "some rounds of the site")  # type: ignore[union-attr]
        assert [False, True] == [b.cluster.replicas[0].owned, c.cluster.replicas[0].owned]
        assert documents == c.cluster.info().document
