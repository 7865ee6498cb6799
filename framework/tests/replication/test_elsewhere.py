"""Sites read shards of which they have no replica through the sites that have one."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from itertools import chain
from pathlib import Path

import pytest
import topicstore as ts
from topicstore.contract.topics import TopicFilter
from topicstore.pubsub.retained import remove_expired
from topicstore.sessions import Publish, Session
from topicstore.storage.answering import answer
from topicstore.storage.counting.histogram import histogram
from topicstore_conformance.conditions.skipping import need
from topicstore_conformance.faults.threads import wait_until

from .conftest import Sites
from .test_moving import agreed, keeps
from .test_site_groups import GROUP_TEXT, Walk, joined, received, settled
from .test_sites import NOW, owns

SHARDS = 4


class Keepers:
    """The sites of a cluster in this process, which answer each other's requests; those in ``silent`` do not."""

    def __init__(self, dbs: Mapping[str, ts.Database]) -> None:
        self._dbs = dbs
        self.silent: set[str] = set()
        self.asked: list[str] = []
        """The sites that have answered."""
        for name in dbs:
            self.serve(name)

    def serve(self, name: str) -> None:
        """Let a site ask the others about the shards of which it has no replica."""
        site = self._dbs[name].cluster
        assert site is not None

        def ask(shard: int, question: bytes, _: bool) -> bytes:
            for keeper in site.keepers(shard):
                if keeper.site not in self.silent:
                    self.asked.append(keeper.site)
                    return answer(self._dbs[keeper.site].storage, shard, question)
            raise ts.ShardElsewhereError(f"no site answers for shard {shard}", shard)

        self._dbs[name].storage.read_elsewhere(ask)


def client_of(shard: int, db: ts.Database) -> str:
    return next(f"c{number}" for number in range(1_000) if db.shard_of(f"c{number}") == shard)


def missing_at(db: ts.Database) -> int:
    """Return a shard of which a site has no replica; if it has replicas of all, the last shard."""
    return min({*range(SHARDS)} - {*keeps(db)}, default=SHARDS - 1)


def stored(dbs: Mapping[str, ts.Database], numbers: Sequence[int], topic: str = "t/{}") -> None:
    """Store messages of all shards at their owners, one after the other, even while shards move."""

    def publishes(number: int) -> bool:
        owner = next((db for db in dbs.values() if db.cluster is not None and db.cluster.owns(number % SHARDS)), None)
        if owner is None:
            return False
        message = ts.Message(topic.format(number % 7), str(number).encode(), client_of(number % SHARDS, owner), qos=1)
        try:
            owner.publish([message])
        except (ts.ShardElsewhereError, ts.ShardMovedError) as moved:
            if isinstance(moved, ts.ShardMovedError) and moved.stored is None:
                raise
            return False
        return True

    for number in numbers:
        wait_until(partial(publishes, number), "an owner")


@pytest.fixture
def dbs(tmp_path: Path) -> Iterator[dict[str, ts.Database]]:
    """Four sites with two replicas of each shard, and messages in all shards."""
    sites, how = Sites(tmp_path), {"replication_factor": 2}
    with ExitStack() as opened:
        found = {"a": opened.enter_context(sites.open("a", shards=SHARDS, **how))}
        stored(found, range(50))
        found |= {name: opened.enter_context(sites.open(name, **how)) for name in "bcd"}
        wait_until(lambda: agreed(*found.values()), "copies at their sites")
        assert any(len(keeps(db)) < SHARDS for db in found.values())
        stored(found, range(50, 100))
        yield found


def numbers(messages: Sequence[ts.Message]) -> list[int]:
    return [int(message.payload) for message in messages]


def test_any_site_reads_all_shards(dbs: dict[str, ts.Database]) -> None:
    """Replays in all orders, counts and last messages are the same at every site, whichever replicas the site has."""
    Keepers(dbs)
    for db in dbs.values():
        assert [*range(100)] == numbers(list(db.replay("#")))
        assert [*range(99, -1, -1)] == numbers(list(db.replay("#", reverse=True)))
        assert [99, 98, 97] == numbers(list(db.replay("#", reverse=True, limit=3)))
        assert [*range(100)] == sorted(numbers(list(db.replay("#", order="any"))))
        assert {number for number in range(100) if number % 7 == 3} == {*numbers(list(db.replay("t/3")))}
        assert [15, 15, 14, 14, 14, 14, 14] == [one.messages for one in db.topics()]
        assert [25] * SHARDS == [one.messages for one in db.clients()]
        assert [98, 99, 93, 94, 95, 96, 97] == numbers(db.latest())
        assert [94] == numbers(db.latest("t/3"))


def test_another_site_answers_where_the_owner_does_not(dbs: dict[str, ts.Database]) -> None:
    """A reader asks the next site with a replica of the shard; if none answers, it raises `ShardElsewhereError`."""
    keepers = Keepers(dbs)
    name, db = next((name, db) for name, db in dbs.items() if len(keeps(db)) < SHARDS)
    assert db.cluster is not None
    missing = next(shard for shard in range(SHARDS) if shard not in keeps(db))
    owner, other = (keeper.site for keeper in db.cluster.keepers(missing))
    assert name not in (owner, other)
    keepers.silent = {owner}
    assert [*range(100)] == numbers(list(db.replay("#")))
    assert other in keepers.asked
    keepers.silent = {*dbs}
    with pytest.raises(ts.ShardElsewhereError, match="no site answers"):
        db.replay("#")
    keepers.silent.clear()
    db.storage.read_elsewhere(None)
    with pytest.raises(ts.ShardElsewhereError, match="is not kept on this site"):
        db.topics()


def test_a_subscription_follows_all_shards(dbs: dict[str, ts.Database]) -> None:
    """A subscription delivers messages of other sites' shards too, both earlier and new ones.

    The test polls the other sites, as a server does periodically.
    """
    Keepers(dbs)
    with ExitStack() as opened:
        followers = {db: opened.enter_context(db.subscribe("t/#", 0)) for db in dbs.values()}
        got: dict[ts.Database, list[int]] = {db: [] for db in followers}
        for first, end in ((0, 100), (100, 140), (140, 150)):
            stored(dbs, range(max(first, 100), end))
            for db, follower in followers.items():

                def has_all(db: ts.Database = db, follower: ts.Subscription = follower, end: int = end) -> bool:
                    db.storage.look_elsewhere()
                    got[db] += numbers(follower.fetch(timeout=0).messages)
                    return len(got[db]) >= end

                wait_until(has_all, "all messages")
                assert [*range(end)] == sorted(got[db])
        for db in followers:
            late = opened.enter_context(db.subscribe("t/#"))
            assert [] == late.fetch(timeout=0).messages


def taken(db: ts.Database, session: Session, got: list[int]) -> int:
    """Deliver and acknowledge a session's messages, and append them to a list; return the list's length."""
    db.storage.look_elsewhere()
    db.sessions.wait(0)
    for one in session.deliver():
        assert isinstance(one, Publish)
        got.append(int(one.message.payload))
        session.puback(one.packet_id)
    return len(got)


def test_a_session_reads_all_shards(dbs: dict[str, ts.Database]) -> None:
    """A durable session with a wildcard gets the messages of all shards once, across a disconnection."""
    Keepers(dbs)
    owned = {
        name: [replica.shard.number for replica in db.cluster.replicas if replica.owned]
        for name, db in dbs.items()
        if db.cluster is not None
    }
    owners = {name: shards[0] for name, shards in owned.items() if shards}
    assert any(len(keeps(dbs[name])) < SHARDS for name in owners)
    for name, shard in owners.items():
        db = dbs[name]
        client = next(f"{name}{n}" for n in range(1_000) if db.shard_of(f"{name}{n}") == shard)
        got: list[int] = []
        session = db.sessions.open(client, expiry_interval=None)
        session.subscribe(f"{name}/#", 1)
        topic = f"{name}/{{}}"
        stored(dbs, range(40), topic)
        wait_until(partial(lambda *of: taken(*of) >= 40, db, session, got), "the first messages")
        session.disconnect()
        stored(dbs, range(40, 60), topic)
        session = db.sessions.open(client, expiry_interval=None)
        assert session.present
        wait_until(partial(lambda *of: taken(*of) >= 60, db, session, got), "those of the meantime")
        stored(dbs, range(60, 80), topic)
        wait_until(partial(lambda *of: taken(*of) >= 80, db, session, got), "those of now")
        assert [*range(80)] == sorted(got)


def test_retained_messages_and_lag_cover_all_shards(dbs: dict[str, ts.Database]) -> None:
    """Any site lists the retained messages of all shards, and counts the lag of its sessions over all of them."""
    Keepers(dbs)
    for number in range(20):
        one = next(db for db in dbs.values() if db.cluster is not None and db.cluster.owns(number % SHARDS))
        one.publish([ts.Message(f"kept/{number}", b"%d" % number, client_of(number % SHARDS, one), retain=True)])
    for db in dbs.values():
        assert db.cluster is not None
        db.cluster.refresh()
        assert [*range(20)] == sorted(numbers(db.retained("kept/#")))
        assert [7] == numbers(db.retained("kept/7"))
        for shard in range(SHARDS):
            if db.cluster.owns(shard):
                session = db.sessions.open(client_of(shard, db), expiry_interval=None)
                session.subscribe("t/#", 1, start=0)
                assert 100 == db.sessions.lag(session.client_id)[session.client_id]["t/#"].messages


def test_an_expired_retained_message_hides_one_of_a_shard_that_is_not_kept(dbs: dict[str, ts.Database]) -> None:
    """Removing an expired retained message brings no earlier one back, not even from a shard without a local replica.

    While no site answers for that shard, the removal raises an error.
    """
    name, shard, missing = next(
        (name, owns(db).index(True), other)
        for name, db in dbs.items()
        for other in range(SHARDS)
        if any(owns(db)) and other not in keeps(db)
    )
    db, expiry = dbs[name], ts.Properties(message_expiry_interval=60)
    owner = next(one for one in dbs.values() if one.cluster is not None and one.cluster.owns(missing))
    for topic, earlier in (("r/hides", None), ("r/both", expiry)):
        for at, number, properties in ((owner, missing, earlier), (db, shard, expiry)):
            at.publish([ts.Message(topic, b"%d" % number, client_of(number, at), retain=True, properties=properties)])
    later = db.clock() + 61_000_000
    with pytest.raises(ts.ShardElsewhereError, match="is not kept on this site"):
        remove_expired(db.storage, later)
    Keepers(dbs)
    assert 1 == remove_expired(db.storage, later)
    assert [shard] == numbers(db.retained("r/hides"))
    assert [missing] == numbers(db.retained("r/both"))


def test_replays_by_timestamp_cover_all_shards(dbs: dict[str, ts.Database]) -> None:
    """Replays by the messages' own times, sorted or bounded by them, are the same at every site."""
    Keepers(dbs)
    for number in range(20):
        one = next(db for db in dbs.values() if db.cluster is not None and db.cluster.owns(number % SHARDS))
        one.store([ts.Message("own", b"%d" % number, client_of(number % SHARDS, one), timestamp=NOW - number)])
    for db in dbs.values():
        assert [*range(19, -1, -1)] == numbers(list(db.replay("own", order="timestamp")))
        assert [*range(6, 3, -1)] == numbers(
            list(db.replay("own", NOW - 6, NOW - 3, by="timestamp", order="timestamp"))
        )


def test_what_is_deleted_elsewhere_is_not_delivered_from_memory(dbs: dict[str, ts.Database]) -> None:
    """A subscription gets no message from the read cache that another site deleted before the subscription began."""
    Keepers(dbs)
    db = min(dbs.values(), key=lambda one: len(keeps(one)))
    missing = set(range(SHARDS)) - set(keeps(db))
    expected = [number for number in range(100) if number % 7 != 3 or number % SHARDS not in missing]
    assert len(expected) < 100
    with db.subscribe("t/#", 0) as earlier:
        got: list[int] = []
        wait_until(partial(lambda *of: got_all(*of, 100), db, earlier, got), "all messages")
        for one in dbs.values():
            assert one.cluster is not None
            if owned := [shard for shard in missing if one.cluster.owns(shard)]:
                one.delete("t/3", shards=owned)
        for one in dbs.values():
            one.storage.catch_up()
        db.storage.look_elsewhere()
        with db.subscribe("t/#", 0) as later:
            left: list[int] = []
            wait_until(partial(lambda *of: got_all(*of, len(expected)), db, later, left), "what is left")
            assert expected == sorted(left)


def got_all(db: ts.Database, follower: ts.Subscription, got: list[int], count: int) -> bool:
    """Fetch the available messages of a subscription, and return whether it has received as many as expected."""
    db.storage.look_elsewhere()
    got += numbers(follower.fetch(timeout=0).messages)
    return len(got) >= count


def test_a_shared_subscription_has_members_at_all_sites(dbs: dict[str, ts.Database]) -> None:
    """Members at several sites share a group's messages though no site has all shards, also after a member has left."""
    Keepers(dbs)
    settled(*dbs.values())
    clients = {client_of(shard, db): db for db in dbs.values() for shard in range(SHARDS) if owns(db)[shard]}
    members = {client: joined(db, client) for client, db in clients.items()}
    assert len(members) == SHARDS
    assert any(len(keeps(db)) < SHARDS for db in clients.values())
    settled(*dbs.values())
    stored(dbs, range(100, 300))
    settled(*dbs.values())
    found = {client: received(session) for client, session in members.items()}
    assert [b"%d" % number for number in range(100, 300)] == sorted(chain(*found.values()))
    assert len([some for some in found.values() if some]) > 1
    _, session = members.popitem()
    session.unsubscribe(GROUP_TEXT)
    settled(*dbs.values())
    stored(dbs, range(300, 400))
    settled(*dbs.values())
    again = [payload for session in members.values() for payload in received(session)]
    assert [b"%d" % number for number in range(300, 400)] == sorted(again)
    for db in dbs.values():
        (group,) = db.sessions.groups
        assert sorted(members) == [member.client_id for member in group.members]


def test_changed_records_of_members_are_reported_and_read(dbs: dict[str, ts.Database]) -> None:
    """An owner reports which records of shared subscriptions changed, and a site without a replica reads only these.

    A report of stored messages names no records.
    """
    Keepers(dbs)
    settled(*dbs.values())
    db = min(dbs.values(), key=lambda one: len(keeps(one)))
    shard = missing_at(db)
    owner = next(one for one in dbs.values() if owns(one)[shard])
    assert owner.storage.listener is not None
    reports: list[frozenset[bytes]] = []
    owner.storage.listener.watchers.append(
        lambda moved, heads: reports.append(frozenset(heads)) if moved == shard else None
    )
    client = client_of(shard, owner)
    stored(dbs, [100 + shard])
    assert {frozenset()} == {heads for heads in reports if db.storage.followed_heads.isdisjoint(heads)}
    assert [] == [heads for heads in reports if heads and not db.storage.followed_heads.isdisjoint(heads)]
    assert not db.storage.copies_states
    joined(owner, client)
    assert [heads for heads in reports if not db.storage.followed_heads.isdisjoint(heads)]
    db.storage.look_elsewhere((), set(range(SHARDS)) - {shard})
    before = [member for group in db.sessions.groups for member in group.members]
    db.storage.look_elsewhere((), {shard})
    assert db.storage.copies_states
    db.storage.look_elsewhere((), {owner.shard_of(GROUP_TEXT)})
    owner.storage.catch_up()
    db.storage.catch_up()
    (group,) = db.sessions.groups
    assert [client] == [member.client_id for member in group.members]
    assert [] == [member for member in before if member.connected]


@pytest.mark.parametrize("seed", [*range(2), *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(2, 40))])
def test_members_at_sites_that_keep_some_shards_get_each_message(
    dbs: dict[str, ts.Database], monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    """However late sites read each other's changes, members get every message, and none after it was acknowledged."""
    Keepers(dbs)
    Walk.run([db for db in dbs.values() if any(owns(db))], monkeypatch, seed)


def test_sql_and_arrow_read_all_shards(dbs: dict[str, ts.Database], tmp_path: Path) -> None:
    """SQL, `replay_arrow` and a file written from it have the messages of all shards at every site.

    A site without a replica of every shard refuses an export, because exports copy the local files of generations.
    """
    need("duckdb")
    Keepers(dbs)
    client = client_of(1, dbs["a"])
    for db in dbs.values():
        db.storage.catch_up()
        found = db.sql("SELECT count(*) AS n, sum(payload::VARCHAR::INT) AS total FROM messages").to_pylist()
        assert [{"n": 100, "total": sum(range(100))}] == found
        (one,) = db.sql("SELECT count(*) AS n FROM messages WHERE client_id = ?", [client]).to_pylist()
        assert {"n": 25} == one
        (one,) = db.sql(
            "SELECT (SELECT sum(messages) FROM topics) AS n, (SELECT count(*) FROM latest) AS m"
        ).to_pylist()
        assert {"n": 100, "m": 7} == one
        rows = db.replay_arrow("#", columns=["payload", "shard"]).read_all()
        assert [*range(100)] == [int(payload) for payload in rows["payload"].to_pylist()]
        assert {*range(SHARDS)} == {*rows["shard"].to_pylist()}
    dbs["a"].add_generation()
    db = min(dbs.values(), key=lambda one: len(keeps(one)))
    wait_until(lambda: len(db.generations()) == 2, "the second generation")
    with pytest.raises(ts.ShardElsewhereError, match=r"is not kept on this site.* site \w writes it"):
        db.archives.export(tmp_path / "export")


def test_histograms_and_streams_cover_all_shards(dbs: dict[str, ts.Database]) -> None:
    """Histograms of all filters, the list of streams of all shards, and cursors over these are alike at every site."""
    Keepers(dbs)
    dbs["a"].add_generation()
    for db in dbs.values():
        wait_until(lambda db=db: len(db.generations()) == 2, "the second generation")  # type: ignore[misc]
    stored(dbs, range(100, 120))
    for db in dbs.values():
        db.storage.catch_up()
    for text in ("#", "t/3", "t/+"):
        first, *others = (histogram(db.storage, TopicFilter(text), None, None, 7) for db in dbs.values())
        assert [first] * len(others) == others
        assert (first.messages, first.exact) == (17 if text == "t/3" else 120, True)
    streams, *others = ({*db.streams("t/#")} for db in dbs.values())
    assert [streams] * len(others) == others
    assert {(shard, generation) for shard in range(SHARDS) for generation in (1, 2)} == {
        (one.shard, one.generation) for one in streams
    }
    for db in dbs.values():
        cursors = [db.cursor(stream, "t/3") for stream in streams]
        found = [message for cursor in cursors for message in db.read(cursor).batch.to_messages()]
        assert [*range(3, 120, 7)] == sorted(numbers(found))
        with pytest.raises(ts.InvalidCursorError, match="has no stream 999"):
            db.cursor(ts.Stream(shard=missing_at(db), generation=1, number=999, pattern="", sealed=True), "t/3")


def test_a_replay_of_all_shards_is_explained(dbs: dict[str, ts.Database]) -> None:
    """`explain` reports the same cost at every site; slabs of other shards are measured at the sites that have them."""
    Keepers(dbs)
    for db in dbs.values():
        db.storage.catch_up()
        found = db.explain("t/3")
        assert 14 == found.messages
        assert [*range(SHARDS)] == [one.shard for one in found.slabs]
        assert [14, 0] == [sum(one.reads.rows for one in found.slabs), len(found.unread)]
        assert all(one.streams >= one.matching > 0 and one.reads.visited for one in found.slabs)
        by_time = db.explain("t/3", 1, 2, by="timestamp")
        assert (0, 0, SHARDS) == (by_time.messages, by_time.zones, by_time.all_zones)
        assert [*range(SHARDS)] == [one.shard for one in by_time.unread]


def test_counts_and_planned_removals_cover_all_shards(dbs: dict[str, ts.Database]) -> None:
    """Statistics, generations and the retention forecast are the same at every site.

    If no other site answers, a site counts its own shards, names the missing ones, and refuses the forecast.
    """
    Keepers(dbs)
    dbs["a"].add_generation()
    for db in dbs.values():
        wait_until(lambda db=db: len(db.generations()) == 2, "the second generation")  # type: ignore[misc]
    stored(dbs, range(100, 110))
    limits = {"max_age": "1d", "filters": {"t/3": "1ms", "t/1": None}}
    expired = sum(number % 7 == 3 for number in range(110))
    for db in dbs.values():
        db.storage.catch_up()
        found = db.info()
        assert (110, [100, 10]) == (found.messages, [one.messages for one in found.generations])
        assert [*range(SHARDS)] == [one.number for one in found.shards]
        assert {2} == {len(one.slabs) for one in found.shards}
        assert found.streams >= 2 * SHARDS
        assert ({}, {}) == (found.missing, found.generations[0].missing)
        coming = db.retention.outlook(db.clock() + 1_000_000, limits=limits, count=True)
        assert [100, 10] == [one.messages for one in coming[:2]]
        assert [expired] == [one.messages for one in coming if one.what == "what matches t/3"]
    db = min(dbs.values(), key=lambda one: len(keeps(one)))
    missing = set(range(SHARDS)) - set(keeps(db))
    db.storage.read_elsewhere(None)
    found = db.info()
    assert missing == found.missing.keys() == found.generations[-1].missing.keys()
    assert all("is not kept on this site" in why for why in found.missing.values())
    assert set(keeps(db)) == {one.number for one in found.shards}
    assert found.messages < 110
    with pytest.raises(ts.ShardElsewhereError, match="is not kept on this site"):
        db.retention.outlook()


def test_places_after_what_a_restored_cluster_has_are_refused(tmp_path: Path) -> None:
    """Cursors and places that are ahead of a restored log are refused at every site, with or without a replica.

    Cursors and places from before the backup are accepted.
    """
    sites, how = Sites(tmp_path), {"replication_factor": 2}

    def begin(opened: ExitStack) -> dict[str, ts.Database]:
        """Open four sites with two replicas of each shard."""
        found = {name: opened.enter_context(sites.open(name, shards=SHARDS, **how)) for name in "abcd"}
        wait_until(lambda: agreed(*found.values()), "copies at their sites")
        assert any(len(keeps(db)) < SHARDS for db in found.values())
        Keepers(found)
        return found

    def cursors(db: ts.Database) -> list[ts.Cursor]:
        """Return a cursor after the last message of each stream."""
        return [db.read(db.cursor(stream, "#")).cursor for stream in db.streams("#")]

    def place(db: ts.Database) -> ts.Place:
        """Return the place after all messages."""
        with db.subscribe("#", 0) as follower:
            wait_until(lambda: not follower.fetch(timeout=0).messages, "the end")
            return follower.place

    with ExitStack() as opened:
        dbs = begin(opened)
        stored(dbs, range(50, 60))
        db = dbs["a"]
        db.storage.catch_up()
        early = cursors(db), place(db)
    shutil.copytree(tmp_path / "log", tmp_path / "backup")
    with ExitStack() as opened:
        dbs = begin(opened)
        stored(dbs, range(60, 100))
        db = dbs["a"]
        db.storage.catch_up()
        late = cursors(db), place(db)
    for name in ("log", *"abcd"):
        shutil.rmtree(tmp_path / name)
    (tmp_path / "backup").rename(tmp_path / "log")
    with ExitStack() as opened:
        for db in begin(opened).values():
            assert {*range(SHARDS)} == {cursor.shard for cursor in late[0]}
            for cursor in early[0]:
                db.read(cursor)
            db.subscribe("#", early[1]).close()
            for cursor in late[0]:
                with pytest.raises(ts.PlaceAheadError, match="older copy"):
                    db.read(cursor)
            with pytest.raises(ts.PlaceAheadError, match="older copy"):
                db.subscribe("#", late[1])
