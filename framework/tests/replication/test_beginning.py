"""Existing databases whose contents become the first replica of a cluster."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import topicstore as ts
from topicstore import opening
from topicstore.contract.log_store import StorageUnavailableError
from topicstore.replication import names, replica
from topicstore_conformance.faults.threads import wait_until

from .conftest import Sites
from .test_sites import messages, payloads


@pytest.fixture
def path(sites: Sites) -> Path:
    """A database with messages in three generations, one of them dropped, state, a session and a retained message."""
    path = sites.root / "a"
    with ts.open(path, shards=2) as db:
        db.store(messages(*range(1_000, 1_010)))
        db.add_generation("skipstream")
        db.store(messages(*range(40)), state={1: [ts.StateWrite(b"\2k", b"v")]})
        db.add_generation("block")
        db.drop_generation(1)
        session = db.sessions.open("me", expiry_interval=None)
        session.subscribe("a/#", qos=1)
        db.publish([ts.Message("a/0", b"40", "c0", qos=1, retain=True)])
    return path


def check(sites: Sites) -> None:
    """Check that two sites, one with an empty directory, have all contents, store more, and read the same cursors."""
    with sites.open("a") as a, sites.open("b") as b:
        assert [*range(41)] == payloads(a) == payloads(b)
        assert [2, 3] == [one.number for one in a.generations()] == [one.number for one in b.generations()]
        assert b"v" == a.state(1).get(b"\2k") == b.state(1).get(b"\2k")
        assert a.retained("#") == b.retained("#") != []
        for stream in a.streams("#"):
            cursor = a.read(a.cursor(stream, "#"), 3).cursor
            assert a.read(cursor).batch.to_messages() == b.read(cursor).batch.to_messages()
        a.sessions.open("me", expiry_interval=None)
        delivered = [packet.message.payload for _, packets in a.sessions.deliver() for packet in packets]
        assert b"40" in delivered
        assert 4 == a.add_generation()
        a.store(messages(41))
        assert [*range(42)] == payloads(a) == payloads(b)


def test_a_database_becomes_the_first_copy_of_a_cluster(sites: Sites, path: Path) -> None:
    """After `begin_cluster`, other sites have all of the database's contents, even if its directory is then deleted."""
    assert ts.begin_cluster(path, sites.url) is None
    with pytest.raises(ts.ManifestMismatchError, match="shared through"):
        ts.open(path)
    check(sites)
    shutil.rmtree(sites.root / "a")
    shutil.rmtree(sites.root / "b")
    with sites.open("c") as c:
        assert [*range(42)] == payloads(c)


@pytest.mark.parametrize("step", [(names, "generation_head"), (replica, "cut_log"), (opening, "write_manifest"), None])
def test_an_interrupted_beginning_is_repeated(
    sites: Sites, path: Path, monkeypatch: pytest.MonkeyPatch, step: tuple[Any, str] | None
) -> None:
    """After an interruption at any step, `begin_cluster` can be repeated, even if the database has changed since."""

    def interrupt(*_: Any, **__: Any) -> Any:
        raise StorageUnavailableError("no answer")

    with monkeypatch.context() as patched:
        if step is None:
            patched.setattr("topicstore.replication.site.Site.found", interrupt)
        else:
            patched.setattr(*step, interrupt)
        with pytest.raises(StorageUnavailableError):
            ts.begin_cluster(path, sites.url)
    with pytest.raises(ts.ClusterNotReadyError, match="repeat 'topicstore cluster begin'"):
        sites.open("b")
    other = sites.root / "other"
    with ts.open(other) as db:
        db.store(messages(7))
    with pytest.raises(ts.ClusterNotReadyError, match="is reserved for database"):
        ts.begin_cluster(other, sites.url)
    if step is not None:  # at the last step the directory already belongs to the cluster, so it can't be opened alone
        with ts.open(path) as db:
            assert 1 == db.delete("a/0", start=db.latest("a/0")[0].timestamp, by="timestamp")
            db.store([ts.Message("a/0", b"40", "c0")])
    ts.begin_cluster(path, sites.url)
    ts.begin_cluster(path, sites.url)
    check(sites)


def test_a_checkpoint_of_a_site_begins_another_cluster(sites: Sites, path: Path) -> None:
    """A cluster that begins with a site's checkpoint has all of its contents; the site's own cluster is unchanged.

    This needs an explicit option, and a checkpoint of a site with replicas of all shards.
    """
    ts.begin_cluster(path, sites.url)
    other = Sites(sites.root / "other")
    with sites.open("a") as a, sites.open("b") as b:
        assert [*range(41)] == payloads(b)
        a.checkpoint(other.root / "a")
        a.store(messages(41))
        with pytest.raises(ts.ManifestMismatchError, match="instead"):
            ts.begin_cluster(other.root / "a", other.url)
        ts.begin_cluster(other.root / "a", other.url, instead=True)
        ts.begin_cluster(other.root / "a", other.url, instead=True)
        check(other)
        assert [*range(42)] == payloads(b)
        assert b.cluster is not None
        b.cluster.set_replicas(1, ["b"])
        wait_until(lambda: a.storage.shards[1].writer.elsewhere and b.cluster.owns(1), "the shard at one site")  # type: ignore[union-attr]
        a.checkpoint(sites.root / "part")
    with pytest.raises(ts.UnsupportedError, match="lacks shard 1"):
        ts.begin_cluster(sites.root / "part", (sites.root / "third").as_uri(), instead=True)


def test_what_a_cluster_cannot_begin_with_is_refused(sites: Sites, path: Path) -> None:
    """A cluster can't begin with a queue, an export, a copy of another cluster, or in a log store that has a cluster.

    The refused call changes nothing.
    """
    with sites.open("x"):
        pass
    with pytest.raises(ts.WrongDatabaseError, match="holds a cluster already"):
        ts.begin_cluster(path, sites.url)
    with pytest.raises(ts.ManifestMismatchError, match="topicstore cluster begin"):
        sites.open("a")
    empty = (sites.root / "empty").as_uri()
    with pytest.raises(ts.ManifestMismatchError, match="is shared through"):
        ts.begin_cluster(sites.root / "x", empty)
    with pytest.raises(ts.DatabaseNotFoundError):
        ts.begin_cluster(sites.root / "none", empty)
    with pytest.raises(ts.InvalidArgumentError, match="not a int"):
        ts.begin_cluster(path, 7)  # type: ignore[arg-type]
    with ts.open(path) as db:
        with pytest.raises(ts.DatabaseLockedError):
            ts.begin_cluster(path, empty)
        db.queues.open("q")
    with pytest.raises(ts.UnsupportedError, match="has queues"):
        ts.begin_cluster(path, empty)
    with ts.open(path) as db:
        db.queues.drop("q")
        db.archives.archive(sites.root / "exported", generations=[2])
    with pytest.raises(ts.UnsupportedError, match="generation 2 lies in an export"):
        ts.begin_cluster(path, empty)
    with ts.open(path) as db:
        assert [*range(41)] == payloads(db)
