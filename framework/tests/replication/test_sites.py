"""Databases that several sites share through a log store."""

from __future__ import annotations

import random
import shutil
import threading
import warnings
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import pytest
import topicstore as ts
from topicstore.contract.log_store import NotConditionalError, StorageUnavailableError
from topicstore.pubsub import retained_expiry
from topicstore.pubsub.retained import remove_expired
from topicstore.replication import log_stores, names, site
from topicstore.replication.counted_store import CountedLogStore
from topicstore.replication.documents import Documents
from topicstore.replication.objects import BEATS, Beat
from topicstore.shard.writer import DropGeneration
from topicstore.storage.keyed_message_records import state_key
from topicstore_backends.log_stores.directory import DirectoryLogStore
from topicstore_conformance.faults.clock import Clock
from topicstore_conformance.faults.threads import wait_until

from .conftest import NEVER, Objects, Sites

NOW = 1_700_000_000_000_000


def messages(*numbers: int, client: str = "c") -> list[ts.Message]:
    return [ts.Message(f"a/{number % 3}", b"%d" % number, f"{client}{number % 5}", qos=1) for number in numbers]


def payloads(db: ts.Database, **how: Any) -> list[int]:
    return sorted(int(message.payload) for message in db.replay("#", **how))


def owns(db: ts.Database) -> list[bool]:
    assert db.cluster is not None
    return [replica.owned for replica in db.cluster.replicas]


def replicas(db: ts.Database) -> list[set[str]]:
    assert db.cluster is not None
    return [set(place.replicas) for place in db.cluster.document.shards]


def test_a_silent_store_is_waited_for_once_by_all_shards(sites: Sites, monkeypatch: pytest.MonkeyPatch) -> None:
    """After a wait in one shard timed out, writes of all shards are refused until the store answers a heartbeat.

    Writes of a shard whose own entries are still unanswered stay refused, while other shards are written.
    """
    cluster = ts.Cluster(sites.url, beat_interval=0.02, takeover_after=NEVER, store_timeout=0.2)
    how: dict[str, Any] = {"cluster": cluster, "site": "a", "shards": 2}
    with warnings.catch_warnings(action="ignore"), ts.open(sites.root / "a", **how) as db:
        assert db.cluster is not None
        client = [next(f"c{n}" for n in range(99) if db.shard_of(f"c{n}") == shard) for shard in range(2)]
        create, silent = db.cluster.store.create, [""]

        def answer(name: str, data: bytes) -> None:
            if any(name.startswith(prefix) for prefix in silent):
                raise StorageUnavailableError("no answer")
            create(name, data)

        monkeypatch.setattr(db.cluster.store, "create", answer)
        with pytest.raises(StorageUnavailableError, match="may be stored"):
            db.store([ts.Message("a", b"1", client[1])])
        for name in client:
            with pytest.raises(StorageUnavailableError, match="nothing was queued"):
                db.store([ts.Message("a", b"2", name)])
        silent[0] = names.entries(1)

        def stores(name: str, payload: bytes) -> bool:
            try:
                return db.store([ts.Message("a", payload, name)]).count == 1
            except StorageUnavailableError:
                return False

        wait_until(lambda: stores(client[0], b"3"), "the other shard")
        with pytest.raises(StorageUnavailableError, match="nothing was queued"):
            db.store([ts.Message("a", b"4", client[1])])
        silent.clear()
        wait_until(lambda: stores(client[1], b"5"), "the shard whose entries were not answered")
        assert [b"1", b"3", b"5"] == sorted(message.payload for message in db.replay("#"))


def test_one_site_stores_replays_and_goes_on_after_it_was_closed(sites: Sites) -> None:
    """Messages, state, retained messages, generations and sessions of a single site are there after it is reopened."""
    with sites.open("a", shards=2, layout="block") as db:
        db.store(messages(*range(100)), state={1: [ts.StateWrite(b"\2k", b"v")]})
        session = db.sessions.open("me", expiry_interval=None)
        session.subscribe("a/0", qos=1)
        db.publish([ts.Message("a/0", b"100", "c0", qos=1, retain=True)])
        assert db.add_generation() == 2
        db.store(messages(101))
    with sites.open("a") as db:
        assert [*range(102)] == payloads(db)
        assert db.state(1).get(b"\2k") == b"v"
        assert [b"100"] == [message.payload for message in db.retained("#")]
        assert [1, 2] == [generation.number for generation in db.generations()]
        session = db.sessions.open("me", expiry_interval=None)
        delivered = [packet.message.payload for _, packets in db.sessions.deliver() for packet in packets]
        assert delivered[:1] == [b"100"]
        assert db.drop_generation(1)
        assert [101] == payloads(db)
        assert 1 == db.delete("#")
    with sites.open("a") as db:
        assert [2] == [generation.number for generation in db.generations()]
        assert [] == payloads(db)


def test_a_site_has_what_any_site_has_stored_before_a_replay_begins(sites: Sites) -> None:
    """A replay on another site has every message that was stored before it, and its cursor is valid on both sites."""
    with sites.open("a", shards=2) as a, sites.open("b") as b:
        for number in range(20):
            a.store(messages(number))
            assert [*range(number + 1)] == payloads(b)
        assert a.id == b.id
        for stream in a.streams("#"):
            cursor = a.read(a.cursor(stream, "#"), 3).cursor
            assert a.read(cursor).batch.to_messages() == b.read(cursor).batch.to_messages()


def test_a_follower_receives_what_is_stored_without_asking(sites: Sites) -> None:
    """Messages stored on one site wake a subscription on another, which delivers them in order, without a gap."""
    with sites.open("a") as a, sites.open("b") as b, b.subscribe("#", 0) as follower:
        received: list[bytes] = []
        for number in range(10):
            a.store(messages(number))
        while len(received) < 10:
            batch = follower.fetch(timeout=NEVER)
            received += [message.payload for message in batch.messages]
        assert [b"%d" % number for number in range(10)] == received


def test_what_is_published_reaches_subscribers_of_other_sites(sites: Sites) -> None:
    """A message that no rule and no session at its own site needs still reaches a subscriber at another site."""
    with sites.open("a") as a, sites.open("b") as b, b.subscribe("#") as follower:
        assert 1 == a.publish([ts.Message("t", b"live")]).stored
        assert [b"live"] == [message.payload for message in follower.fetch(timeout=NEVER).messages]


def test_what_is_stored_is_said(sites: Sites) -> None:
    """`DatabaseInfo.kept` of a site reports that all messages are stored.

    With ``delivered`` set, it equals the report of a database outside a cluster.
    """
    with sites.open("a") as db:
        assert (
            "all published messages are stored",
            "messages that are stored only for sessions are kept like all others",
        ) == (db.info().kept[:2])
        db.retention.set(delivered="1s")
        with ts.open(sites.root / "alone") as alone:
            alone.retention.set(delivered="1s")
            assert alone.info().kept == db.info().kept


def test_a_store_on_another_site_names_the_owner_and_stores_nothing(sites: Sites) -> None:
    """A store in a shard that another site owns raises `ShardElsewhereError` with that owner, and stores nothing."""
    with sites.open("a", shards=2, address="host-a:1883") as a, sites.open("b") as b:
        with pytest.raises(ts.ShardElsewhereError, match=r"is written by site a \(host-a:1883\)") as elsewhere:
            b.store(messages(*range(10)))
        assert ("a", "host-a:1883") == (elsewhere.value.site, elsewhere.value.address)
        for write in (b.add_generation, lambda: b.delete("#"), lambda: b.state(0).write([ts.StateWrite(b"\2k", b"")])):
            if write == b.add_generation:
                write()  # any site may add a generation to the document; the owners then begin it
            else:
                with pytest.raises(ts.ShardElsewhereError):
                    write()
        wait_until(lambda: len(a.generations()) == 2, "the generation at its owner")
        assert [] == payloads(a) == payloads(b)


def test_a_site_that_is_closed_passes_its_shards_on(sites: Sites) -> None:
    """Closing a site hands its shards over at once; the next owner has all contents, and the first can come back."""
    with sites.open("b", shards=2) as b:
        with sites.open("a") as a:
            wait_until(lambda: replicas(b) == [{"a", "b"}] * 2, "a second replica of each shard")
            b.store(messages(*range(10)))
        b.store(messages(*range(10, 20)))
        a = sites.open("a")
        wait_until(lambda: replicas(b) == [{"a", "b"}] * 2, "both replicas")
    with a:
        wait_until(lambda: all(owns(a)), "the shards at the site that is left")
        a.store(messages(*range(20, 30)))
        assert [*range(30)] == payloads(a)


def test_a_closed_site_gets_no_shard_until_it_is_opened_again(sites: Sites) -> None:
    """While one of two sites is closed, the other owns all shards; when it is opened again, it gets its share."""
    with sites.open("a", shards=4) as a:
        assert a.cluster is not None
        for run in range(3):
            with sites.open("b") as b:
                wait_until(lambda: [3, 1] == [sum(owns(a)), sum(owns(b))], "the share of b")
                assert [True, True] == [one.beats for one in a.cluster.info().sites]
            assert [True, False] == [one.beats for one in a.cluster.info().sites]
            wait_until(lambda: all(owns(a)), "all shards at the site that is left")
            number = a.cluster.info().document
            a.store(messages(*range(10 * run, 10 * run + 10)))
            beats = a.cluster._beat_number
            wait_until(lambda: a.cluster is not None and a.cluster._beat_number > beats + 5, "further rounds")  # noqa: B023
            assert number == a.cluster.info().document
            assert all(owns(a))
        assert [*range(30)] == payloads(a)


def test_a_cluster_reports_its_sites_and_shards(sites: Sites) -> None:
    """`info` has the sites with their addresses, whether they send heartbeats, and each shard's owner and replicas."""
    with sites.open("a", shards=2, address="host-a:1883", takeover_after=0.5) as a:
        assert a.cluster is not None
        with sites.open("b", takeover_after=NEVER) as b:
            wait_until(lambda: replicas(b) == [{"a", "b"}] * 2, "a second replica of each shard")
            a.store(messages(*range(10)))
            list(b.replay("#"))
            wait_until(lambda: len({*a.cluster.info().shards[0].applied.values()}) == 1, "equal progress")  # type: ignore[union-attr]
            found = a.cluster.info()
            assert ("a", a.id.hex()) == (found.site, found.database)
            assert [("a", "host-a:1883", True), ("b", "", True)] == [
                (one.name, one.address, one.beats) for one in found.sites
            ]
            for number, shard in enumerate(found.shards):
                assert (number, "a", (), ()) == (shard.shard, shard.owner, shard.joining, shard.leaving)
                assert {"a", "b"} == set(shard.replicas) == set(shard.applied)
                assert 0 < shard.epoch <= found.document
                assert shard.applied["a"] == a.cluster.replicas[number].progress.next
            wait_until(lambda: b.cluster.info().shards == found.shards, "the same view of b")  # type: ignore[union-attr]
            first = found.sites[1].incarnation
        wait_until(lambda: not a.cluster.info().sites[1].beats, "silence of b")  # type: ignore[union-attr]
        with sites.open("b", takeover_after=NEVER):
            assert first != a.cluster.info().sites[1].incarnation


def test_a_process_replaces_an_earlier_one_of_its_site(sites: Sites) -> None:
    """Of two processes with one site's name, the later one owns the shards, and the earlier one stops with an error."""
    cluster = ts.Cluster(sites.url, beat_interval=0.02, poll_interval=0.02, takeover_after=NEVER)
    with (
        warnings.catch_warnings(action="ignore"),
        sites.open("a") as first,
        ts.open(sites.root / "other", cluster=cluster, site="a") as second,
    ):
        second.store(messages(0, 1))
        assert first.cluster is not None
        wait_until(lambda: first.cluster.ended, "the end of the earlier process")  # type: ignore[union-attr]
        with pytest.raises((ts.ShardElsewhereError, ts.ShardMovedError, ts.DatabaseClosedError)):
            first.store(messages(2))
        assert [0, 1] == payloads(second)


def test_a_beat_of_an_earlier_process_does_not_end_a_site(sites: Sites) -> None:
    """A site skips the numbers of heartbeats that an earlier process of the same name has created."""
    with sites.open("a") as a:
        assert a.cluster is not None
        number = a.cluster._beat_number + 20
        for taken in range(number, number + 5):
            name = names.beat("a", taken)
            beat = Beat(site="a", incarnation=b"earlier", address="", program="", applied={})
            sites.store.create(name, BEATS.encode(name, beat))
        wait_until(lambda: a.cluster is not None and a.cluster._beat_number > number + 6, "later beats")
        assert a.cluster.ended is None
        a.store(messages(0))
        assert [0] == payloads(a)


def test_nothing_is_stored_before_all_sites_have_joined(sites: Sites) -> None:
    """With fewer sites than ``n_sites``, a store raises `ClusterNotReadyError` that says how many are missing."""
    with sites.open("a", n_sites=3) as a:
        with pytest.raises(ts.ClusterNotReadyError, match="2 more sites"):
            a.store(messages(0))
        with sites.open("b", n_sites=3), sites.open("c", n_sites=3):
            wait_until(lambda: a.cluster is not None and len(a.cluster.document.sites) == 3, "three sites")
            a.store(messages(0))
            assert [0] == payloads(a)


def test_a_replay_says_that_the_store_does_not_answer(sites: Sites, monkeypatch: pytest.MonkeyPatch) -> None:
    """While the log store doesn't answer, a replay raises an error, unless it is called with ``fresh=False``."""
    with sites.open("a") as a:
        a.store(messages(0))

        def silent(_: str) -> bytes:
            raise StorageUnavailableError("no answer")

        with monkeypatch.context() as patched:
            assert a.cluster is not None
            patched.setattr(a.cluster.store, "get", silent)
            with pytest.raises(StorageUnavailableError, match="no answer"):
                payloads(a)
            assert [0] == payloads(a, fresh=False)
        assert [0] == payloads(a)


def test_an_opening_repeats_requests_without_an_answer(sites: Sites, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sites open though some requests get no answer; if no request gets one, opening fails after ``store_timeout``."""
    answers, lock, share = random.Random(1), threading.Lock(), 0.15
    lost: list[str] = []

    def cut(name: str) -> None:
        request = getattr(DirectoryLogStore, name)

        def answered(self: DirectoryLogStore, *of: Any) -> Any:
            with lock:
                fails = answers.random() < share
            if fails:
                lost.append(name)
                raise StorageUnavailableError("the body was cut")
            return request(self, *of)

        monkeypatch.setattr(DirectoryLogStore, name, answered)

    with sites.open("a", shards=3) as a:
        a.store(messages(*range(20)))
    for name in ("create", "get", "names", "delete"):
        cut(name)
    with warnings.catch_warnings(action="ignore"):
        for site_name in "bab":
            with sites.open(site_name) as db:
                assert [*range(20)] == payloads(db, fresh=False)
    assert {"create", "get", "names"} <= {*lost}
    share = 1.0
    with pytest.raises(StorageUnavailableError, match="the body was cut"):
        ts.open(sites.root / "c", cluster=ts.Cluster(sites.url, store_timeout=0.2), site="c")


def test_a_cluster_keeps_what_the_first_site_says(sites: Sites) -> None:
    """Shards, layout and timestamps are those that the first site chose; arguments that contradict them are refused."""
    with sites.open("a", shards=2, layout="reference", timestamps="message", late="lift") as a:
        a.store([ts.Message("t", b"1", timestamp=NOW)])
        with pytest.raises(ts.ManifestMismatchError, match="shards=2"):
            sites.open("b", shards=3)
        with sites.open("b") as b:
            manifest = b.manifest
            assert (2, "reference", "message", "lift") == (
                manifest.shards,
                manifest.layout,
                manifest.timestamps,
                manifest.late,
            )
            assert [1] == payloads(b)


def test_a_copy_of_a_shared_database_is_only_written_through_the_cluster(sites: Sites) -> None:
    """A site's directory can be opened without the cluster for reading, but not for writing."""
    with sites.open("a") as a:
        a.store(messages(0))
    with pytest.raises(ts.ManifestMismatchError, match="shared through file://"):
        ts.open(sites.root / "a")
    with ts.open(sites.root / "a", mode="r") as reader:
        assert [0] == payloads(reader)


@pytest.mark.parametrize(
    ("how", "error", "match"),
    [
        ({"site": None}, ts.InvalidArgumentError, "given together"),
        ({"cluster": None}, ts.InvalidArgumentError, "given together"),
        ({"cluster": 7}, ts.InvalidArgumentError, "a URL or a topicstore.Cluster, not a int"),
        ({"cluster": "somewhere"}, ts.InvalidArgumentError, "named by a URL"),
        ({"cluster": "nosuch://x"}, ts.UnknownPluginError, "nosuch"),
        ({"site": "a/b"}, ts.InvalidArgumentError, "name of a site"),
        ({"site": ""}, ts.InvalidArgumentError, "name of a site"),
        ({"site": ".a"}, ts.InvalidArgumentError, "name of a site"),
        ({"mode": "r"}, ts.InvalidArgumentError, "mode='a'"),
        ({"backend": "memory"}, ts.InvalidArgumentError, "persistent backend"),
        ({"durability": "commit"}, ts.InvalidArgumentError, "durability is not given"),
    ],
)
def test_bad_arguments(sites: Sites, how: dict[str, Any], error: type[Exception], match: str) -> None:
    """Invalid arguments are refused with the reason, and nothing is created."""
    with pytest.raises(error, match=match):
        ts.open(sites.root / "x", **{"cluster": sites.url, "site": "x"} | how)
    assert not (sites.root / "x").exists()


@pytest.mark.parametrize(
    ("how", "match"),
    [
        ({"takeover_after": 1}, "at least 3 times beat_interval, 1.5 s, not 1 s"),
        ({"beat_interval": 0}, "beat_interval is seconds above 0"),
        ({"poll_interval": "1"}, "poll_interval is seconds above 0"),
        ({"flush_interval": -1}, "flush_interval is seconds from 0"),
        ({"flush_interval": 30}, "flush_interval is less than store_timeout, 30 s, not 30 s"),
        ({"log_retention": float("nan")}, "log_retention is seconds from 0"),
        ({"n_sites": 0}, "n_sites is a whole number"),
        ({"replication_factor": 0}, "replication_factor is a whole number"),
    ],
)
def test_bad_settings(how: dict[str, Any], match: str) -> None:
    """Invalid settings of a cluster are refused with the reason."""
    with pytest.raises(ts.InvalidArgumentError, match=match):
        ts.Cluster("file:///x", **how)


def test_a_directory_that_belongs_elsewhere_is_refused(sites: Sites, tmp_path: Path) -> None:
    """A site refuses a directory outside any cluster, of another cluster, or of one whose log store was emptied.

    The directory is unchanged.
    """
    with ts.open(sites.root / "own") as own:
        own.store(messages(0))
    with pytest.raises(ts.ManifestMismatchError, match="a database of its own"):
        sites.open("own")
    with sites.open("a"):
        pass
    other = Sites(tmp_path / "second")
    with other.open("a"):
        pass
    with pytest.raises(ts.WrongDatabaseError, match="is a copy of database"):
        ts.open(sites.root / "a", cluster=other.url, site="a")
    with pytest.raises(ts.DatabaseNotFoundError, match="holds none"):
        ts.open(sites.root / "a", cluster=(tmp_path / "empty").as_uri(), site="a")
    with ts.open(sites.root / "own") as own:
        assert [0] == payloads(own)


class Overwriting(Objects):
    """A log store whose `create` overwrites an existing object."""

    def create(self, name: str, data: bytes) -> None:
        self.objects[name] = data


def test_a_store_that_overwrites_is_refused(sites: Sites, monkeypatch: pytest.MonkeyPatch) -> None:
    """A log store without conditional creation is refused before anything is written."""

    class Target:
        open = staticmethod(lambda *_: Overwriting())

    monkeypatch.setattr(log_stores, "load_target", lambda _: Target)
    with pytest.raises(NotConditionalError):
        sites.open("a")
    assert not (sites.root / "a").exists()


def test_old_documents_and_beats_are_deleted(sites: Sites) -> None:
    """A site deletes its superseded heartbeats."""
    with sites.open("a") as a:
        assert a.cluster is not None
        wait_until(lambda: a.cluster._beat_number > 10, "ten beats")  # type: ignore[union-attr]
        beats = [name for chunk in sites.store.names(names.BEATS) for name in chunk]
        assert len(beats) <= 3


def cut(sites: Sites, shard: int = 0) -> int:
    """Return the highest index below which a shard's log is truncated; 0 for none."""
    found = [names.number_of(name) for chunk in sites.store.names(names.cuts(shard)) for name in chunk]
    return max(found, default=0)


def is_behind(db: ts.Database, sites: Sites) -> bool:
    """Return whether the log of shard 0 is truncated after a site's last entry, so that the shard must be copied."""
    assert db.cluster is not None
    return cut(sites) > db.cluster.replicas[0].progress.next


def entries(sites: Sites) -> int:
    """Return the number of entries in the log of shard 0."""
    return sum(len(chunk) for chunk in sites.store.names(names.entries(0)))


@pytest.mark.parametrize("layout", ["block", "skipstream", "wildcard_optimized", "reference"])
def test_a_site_starts_from_a_base_where_the_log_is_cut(
    sites: Sites, monkeypatch: pytest.MonkeyPatch, layout: str
) -> None:
    """A site with a new, deleted or damaged directory restores everything; other sites' cursors are valid on it."""
    monkeypatch.setattr(site, "_BASE_BYTES", 1)
    with sites.open("a", layout=layout, clock=lambda: NOW) as a:
        for number in range(0, 60, 10):
            a.store(messages(*range(number, number + 10)), state={0: [ts.StateWrite(b"\2k", b"%d" % number)]})
            if number == 20:
                a.add_generation()
        a.delete("a/1")
        a.publish([ts.Message("r", b"60", retain=True)])
        wait_until(lambda: cut(sites) > 5, "a cut of the log")
        a.store(messages(61))
        expected = list(a.replay("#"))
        with sites.open("b", clock=lambda: NOW) as b:
            assert expected == list(b.replay("#"))
            assert a.retained("#") == b.retained("#")
            assert b.state(0).get(b"\2k") == b"50"
            assert [len(found.damages) for found in (a.verify(), b.verify())] == [0, 0]
            for stream in a.streams("#"):
                cursor = a.read(a.cursor(stream, "#"), 3).cursor
                assert a.read(cursor).batch.to_messages() == b.read(cursor).batch.to_messages()
            a.store(messages(62))
            wait_until(lambda: replicas(b) == [{"a", "b"}], "a second replica")
        shutil.rmtree(sites.root / "b")
        with sites.open("b", clock=lambda: NOW) as b:
            assert list(a.replay("#")) == list(b.replay("#"))
        for file in (sites.root / "b" / "shard-0000").glob("CURRENT"):
            file.write_bytes(b"damage")
        with pytest.warns(RuntimeWarning, match="copied again"):
            b = sites.open("b", clock=lambda: NOW)
        with b:
            assert list(a.replay("#")) == list(b.replay("#"))


def test_a_replica_behind_a_cut_is_copied_while_it_runs(sites: Sites, monkeypatch: pytest.MonkeyPatch) -> None:
    """A running replica whose next entries were deleted is restored from the base, and then follows the log again."""
    monkeypatch.setattr(site, "_BASE_BYTES", 1)
    with sites.open("a", log_retention=0) as a, sites.open("b") as b:
        a.store(messages(*range(10)))
        assert [*range(10)] == payloads(b)
        assert b.cluster is not None
        with b.cluster.replicas[0]._reading:  # stops this replica from reading the log
            for number in range(10, 20):
                a.store(messages(number))
            wait_until(lambda: is_behind(b, sites), "a cut of the log")
        assert [*range(20)] == payloads(b)
        a.store(messages(20))
        assert [*range(21)] == payloads(b)


def test_all_directories_may_be_deleted(sites: Sites, monkeypatch: pytest.MonkeyPatch) -> None:
    """A site without a directory restores all stored messages from the log store, also after a truncation."""
    monkeypatch.setattr(site, "_BASE_BYTES", 1)
    with sites.open("a") as a:
        a.store(messages(*range(50)))
        wait_until(lambda: cut(sites) > 0, "a cut of the log")
        a.store(messages(50))
    shutil.rmtree(sites.root / "a")
    with sites.open("a") as a:
        assert [*range(51)] == payloads(a)
        a.store(messages(51))
        assert [*range(52)] == payloads(a)


def test_three_directories_may_be_deleted(sites: Sites, monkeypatch: pytest.MonkeyPatch) -> None:
    """Three sites without directories have everything again: messages, state, retained messages and sessions."""
    monkeypatch.setattr(site, "_BASE_BYTES", 1)
    with ExitStack() as opened:
        a, b, c = (opened.enter_context(sites.open(name)) for name in "abc")
        wait_until(lambda: replicas(a) == [{*"abc"}], "three replicas")
        a.store(messages(*range(50)), state={0: [ts.StateWrite(b"\2k", b"v")]})
        session = a.sessions.open("me", expiry_interval=None)
        session.subscribe("a/0", qos=1)
        a.add_generation("skipstream")
        a.store(messages(*range(50, 60)))
        wait_until(lambda: cut(sites) > 0, "a cut of the log")
        monkeypatch.undo()  # later changes are only in the log
        a.publish([ts.Message("a/0", b"60", "c0", qos=1, retain=True)])
        assert 20 == a.delete("a/1")
        expected = list(a.replay("#"))
        assert expected == list(b.replay("#")) == list(c.replay("#"))
    for name in "abc":
        shutil.rmtree(sites.root / name)
    with ExitStack() as opened:
        found = [opened.enter_context(sites.open(name)) for name in "cab"]
        for db in found:
            assert expected == list(db.replay("#"))
            assert [b"60"] == [message.payload for message in db.retained("#")]
            assert b"v" == db.state(0).get(b"\2k")
            assert [1, 2] == [generation.number for generation in db.generations()]
            assert not db.verify().damages
        wait_until(lambda: [True] in map(owns, found), "an owner")
        owner = next(db for db in found if owns(db) == [True])
        owner.sessions.open("me", expiry_interval=None)
        delivered = [packet.message.payload for _, packets in owner.sessions.deliver() for packet in packets]
        assert b"60" in delivered


def test_a_sealed_generation_is_written_once(sites: Sites, monkeypatch: pytest.MonkeyPatch) -> None:
    """Later bases share the parts of a sealed generation, until a delete changes it."""
    monkeypatch.setattr(site, "_BASE_BYTES", 1)

    def sealed() -> set[str]:
        return {name for chunk in sites.store.names(names.generations(0)) for name in chunk}

    with sites.open("a") as a:
        a.store(messages(*range(50)))
        a.add_generation()
        wait_until(lambda: any(name.endswith("/head") for name in sealed()), "all parts of a sealed generation")
        first, before = sealed(), cut(sites)
        for number in range(50, 60):
            a.store(messages(number))
        wait_until(lambda: cut(sites) > before + 5, "a later base")
        assert first == sealed()
        a.delete("a/1", until=a.clock())
        wait_until(lambda: sealed() and first.isdisjoint(sealed()), "the changed generation")


def test_retained_messages_of_publishers_on_several_sites_are_one_for_each_topic(sites: Sites) -> None:
    """Publishers on different sites set and clear retained messages of the same topics; all sites find the last one.

    An expired retained message doesn't make another publisher's earlier one visible.
    """
    clock = Clock(NOW)
    with sites.open("a", shards=4, clock=clock) as a, sites.open("b", clock=clock) as b:
        wait_until(lambda: any(owns(a)) and any(owns(b)) and sum(owns(a) + owns(b)) == 4, "each site owns shards")
        both = {db: next(f"c{n}" for n in range(99) if owns(db)[db.storage.shard_of(f"c{n}")]) for db in (a, b)}
        kept = dict.fromkeys(f"r/{number}" for number in range(30))
        for number, topic in enumerate(kept):
            for turn, db in enumerate((a, b) if number % 2 else (b, a)):
                clock.now += 1_000
                text = b"" if number % 5 == 0 and turn else b"%d by %s" % (number, both[db].encode())
                expiry = ts.Properties(message_expiry_interval=60) if number % 7 == 0 else None
                result = db.publish([ts.Message(topic, text, both[db], 1, True, properties=expiry)])
                assert bool(text) == result.retained
                kept[topic] = text if number % 7 else None

        def found(db: ts.Database) -> dict[str, bytes]:
            db.cluster.refresh()
            return {one.topic: one.payload for one in db.retained("r/#")}

        clock.now += 61_000_000
        for db in (a, b):
            expected = {topic: text for topic, text in kept.items() if text}
            assert expected == found(db)
            remove_expired(db.storage, clock())
            assert expected == found(db)
            pages, after = [], None
            while page := db.retained("r/#", after=after, limit=4):
                pages += [one.topic for one in page]
                after = page[-1].topic
            assert sorted(expected) == pages
            assert [expected["r/1"]] == [one.payload for one in db.retained("r/1")]


def test_a_site_that_sees_new_and_dropped_generations_at_once_follows(sites: Sites) -> None:
    """A site adds a new generation and drops the previous one, even if it learns of both from one document.

    A log with an entry that drops a shard's only generation, as earlier releases could write it, stays readable.
    """
    with sites.open("a", shards=4) as a, sites.open("b") as b:
        wait_until(lambda: [{"a", "b"}] * 4 == replicas(a) and any(owns(a)) and any(owns(b)), "shards at both sites")
        leader, other = (a, b) if owns(a)[0] else (b, a)
        assert other.cluster is not None
        shard = other.storage.shards[owns(other).index(True)]
        shard.writer.finish_commit(shard.writer.submit(shard.generations.pending_drop(DropGeneration(1))))
        replica = other.cluster.replicas[shard.number]
        before = replica.progress.next
        with other.cluster._changing:  # keeps the site's thread from reading a document
            leader.add_generation()
            leader.drop_generation(1)
        wait_until(lambda: shard.generations.records.keys() == {2}, "generations")
        assert 2 == replica.progress.next - before  # a generation is added, and then the other one dropped
        for db in (leader, other):
            wait_until(lambda db=db: all([2] == [*one.generations.records] for one in db.storage.shards), "generations")  # type: ignore[misc]
            assert [None, None] == [one.cluster.failure for one in (a, b)]  # type: ignore[union-attr]
            client = next(f"c{n}" for n in range(99) if owns(db)[db.shard_of(f"c{n}")])
            db.store([ts.Message("a", b"1", client)])


def test_expired_retained_messages_of_a_shard_that_was_taken_over_are_removed(
    sites: Sites, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A site removes expired messages of a shard that it took over, even if its own messages expire much later.

    An expired message that hides an earlier one of another shard is removed once that one has expired too.
    """
    monkeypatch.setattr(retained_expiry, "_SHARED_INTERVAL", 0.02)
    monkeypatch.setattr(retained_expiry, "_SHARE", 0)
    monkeypatch.setattr(retained_expiry, "_PAUSE", 0)
    clock = Clock()
    how: dict[str, Any] = {"clock": clock, "monotonic": clock.monotonic}

    def retain(db: ts.Database, topic: str, seconds: int) -> None:
        client = next(f"c{n}" for n in range(99) if owns(db)[db.shard_of(f"c{n}")])
        properties = ts.Properties(message_expiry_interval=seconds)
        db.publish([ts.Message(topic, b"x", client, qos=1, retain=True, properties=properties)])

    def kept(db: ts.Database) -> list[str]:
        keys = (key for shard in range(4) for key, _ in db.storage.state(shard).scan(state_key(b"r")))
        return sorted(key.decode().rpartition("r/")[2] for key in keys)

    with sites.open("a", shards=4, **how) as a, sites.open("b", **how) as b:
        wait_until(lambda: [{"a", "b"}] * 4 == replicas(a) and any(owns(b)), "a shard for each site")
        retain(b, "r/late", 900_000)
        retain(b, "r/twice", 120)
        retain(a, "r/early", 60)
        retain(a, "r/twice", 60)
        a.close()
        wait_until(lambda: all(owns(b)), "the shards at the other site")
        b.cluster.refresh()  # type: ignore[union-attr]
        clock.now += 61_000_000
        wait_until(lambda: ["late", "twice", "twice"] == kept(b), "the removal")
        clock.now += 60_000_000
        wait_until(lambda: "twice" not in kept(b), "the removal of both")


def test_a_site_opens_before_an_owner_has_begun_to_write(sites: Sites) -> None:
    """Before a shard's owner has begun to write, a site opens: it shows the planned generations, and adds another one.

    Retention runs, too.
    """
    with sites.open("first", shards=2, layout="block"):
        found = Documents(sites.store, lambda _: None).newest()[1]
    assert found is not None
    sites = Sites(sites.root / "again")
    with closing(CountedLogStore.open(sites.url, {})) as store:
        owner = site.Site(ts.Cluster(sites.url), "owner", store)
        owner.found(owner.claim(found.database), 2, found.settings, found.generations)
        owner.enter()  # it owns both shards, and never writes
        with sites.open("a") as a:
            assert [(1, "block", 0, None)] == [(g.number, g.layout, g.messages, g.sealed) for g in a.generations()]
            assert ("block", 0) == (a.info().layout, a.info().messages)
            assert [] == payloads(a)
            assert () == a.retention.run().dropped
            assert [] == a.retention.outlook()
            assert 2 == a.add_generation()
            assert [1, 2] == [one.number for one in a.generations()]
