"""Shared subscriptions in a cluster: members are on all sites, and each message goes to one member."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterable, Sequence
from contextlib import ExitStack

import pytest
import topicstore as ts
from topicstore.sessions import Ended, Publish, PubRel, Session
from topicstore.sessions.shared import site_groups
from topicstore.sessions.shared.records import GRANT, GROUP, HANDED_BACK, MEMBER, STANDING, TAKEN, WAITING, GroupKeys
from topicstore.sessions.shared.stored_group import StoredGroup
from topicstore.shard.state import FrameworkWrite
from topicstore_conformance.faults.threads import wait_until

from .conftest import Sites
from .test_site_sessions import hand_over
from .test_site_settings import divided, in_shard
from .test_sites import owns

GROUP_TEXT = "$share/g/#"


@pytest.fixture
def two(sites: Sites, closing: ExitStack) -> tuple[ts.Database, ts.Database]:
    """Return the site that assigns the messages of `GROUP_TEXT`, and another site; each owns shards."""
    a, b = closing.enter_context(sites.open("a", shards=4)), closing.enter_context(sites.open("b"))
    divided(a, b)
    return (a, b) if owns(a)[a.shard_of(GROUP_TEXT)] else (b, a)


def settled(*dbs: ts.Database) -> None:
    """Run the periodic work of all sites in rounds, because each site's steps depend on what others have written."""
    for _ in range(8):
        for db in dbs:
            assert db.cluster is not None
            db.cluster.refresh()
            db.storage.look_elsewhere()
            db.sessions.tick()


def clients_of(db: ts.Database) -> list[str]:
    """Return a client id for each shard that a site owns."""
    return [in_shard(db, shard) for shard, mine in enumerate(owns(db)) if mine]


def joined(db: ts.Database, client: str, qos: int = 1, **how: object) -> Session:
    session = db.sessions.open(client, expiry_interval=None, **how)  # type: ignore[arg-type]
    session.subscribe(GROUP_TEXT, qos)
    return session


def published(db: ts.Database, numbers: Iterable[int], *others: ts.Database, qos: int = 1) -> list[bytes]:
    """Publish numbers at a site, each to its own topic; return the payloads once the other sites have applied them."""
    client = clients_of(db)[0]
    batch = [ts.Message(f"t/{number}", b"%d" % number, client, qos=qos) for number in numbers]
    db.publish(batch)
    for other in others:
        assert other.cluster is not None
        other.cluster.refresh()
    return sorted(message.payload for message in batch)


def received(session: Session, *, acknowledge: bool = True) -> list[bytes]:
    """Return the payloads of all messages that a session can deliver now.

    It tries several times, because one call may find nothing though messages are left.
    """
    found, empty = [], 0
    while empty < 8:
        packets = session.deliver()
        empty = 0 if packets else empty + 1
        for packet in packets:
            if isinstance(packet, PubRel):
                session.pubcomp(packet.packet_id)
                continue
            found.append(packet.message.payload)
            if acknowledge and packet.qos == 1:
                session.puback(packet.packet_id)
            elif acknowledge and packet.qos == 2:
                session.pubrec(packet.packet_id)
    session.checkpoint()
    return found


def records(dbs: Sequence[ts.Database]) -> int:
    """Return the number of records of shared subscriptions at the first site."""
    heads = (GROUP, STANDING, HANDED_BACK, GRANT, WAITING, TAKEN)
    return sum(len([*dbs[0].state(shard).scan(head)]) for shard in range(4) for head in heads)


def test_members_on_all_sites_share_the_messages(two: tuple[ts.Database, ts.Database]) -> None:
    """Members on two sites share the messages, wherever these are published, and no message is delivered twice."""
    long = next(name for n in range(99) if owns(two[1])[two[1].shard_of(name := f"{'long' * 20}{n}")])
    sessions = [joined(db, client) for db in two for client in clients_of(db)] + [joined(two[1], long)]
    settled(*two)
    expected = published(two[0], range(100), two[1]) + published(two[1], range(100, 200), two[0])
    found = [received(session) for session in sessions]
    assert sorted(expected) == sorted(payload for some in found for payload in some)
    assert all(len(some) > 10 for some in found)
    for db in two:
        (group,) = db.sessions.groups
        assert sorted(session.client_id for session in sessions) == [one.client_id for one in group.members]
        assert [4 * 64] == [sum(sum(one.slices) for one in group.members)]


@pytest.mark.parametrize("qos", [0, 1, 2])
def test_a_member_that_joins_takes_its_share_over(two: tuple[ts.Database, ts.Database], qos: int) -> None:
    """While messages arrive, a member on another site joins and leaves; each message comes once, at every QoS."""
    first, second = two
    one = joined(first, clients_of(first)[0], qos)
    settled(*two)
    expected, found = published(first, range(50), second), received(one)
    assert sorted(expected) == sorted(found)
    other = joined(second, clients_of(second)[0], qos)
    for step in range(1, 5):
        expected += published(first, range(100 * step, 100 * step + 50), second)
        found += received(one) + received(other)
        assert second.cluster is not None
        second.cluster.refresh()
        first.sessions.tick()
        second.sessions.tick()
    settled(*two)
    expected += published(first, range(600, 700), second)
    later = received(other)
    assert len(later) > 20
    found += received(one) + later
    assert other.unsubscribe(GROUP_TEXT)
    expected += published(first, range(700, 800), second)
    settled(*two)
    found += received(one)
    assert sorted(expected) == sorted(found)


def test_what_a_member_has_left_goes_to_other_sites(two: tuple[ts.Database, ts.Database]) -> None:
    """When a session ends, its QoS 1 messages in flight go to a member on another site; those of QoS 2 don't."""
    first, second = two
    one, other = joined(first, clients_of(first)[0], 2), joined(second, clients_of(second)[0], 2)
    settled(*two)
    all_of = published(first, range(40), second), published(first, range(40, 80), second, qos=2)
    unacknowledged = received(other, acknowledge=False)
    assert unacknowledged
    found = received(one)
    other.disconnect(expiry_interval=0)
    settled(*two)
    again = received(one)
    assert sorted(set(unacknowledged) & set(all_of[0])) == sorted(again)
    assert sorted(all_of[0]) == sorted(payload for payload in found + again if payload in set(all_of[0]))
    assert [1] == [len(group.members) for group in second.sessions.groups]


def test_generations_that_a_group_has_missed_are_shown_at_all_sites(two: tuple[ts.Database, ts.Database]) -> None:
    """A generation that was dropped unread by a group is shown at both sites, and reported to the member once."""
    first, second = two
    client = clients_of(second)[0]
    joined(second, client).disconnect()
    settled(*two)
    leader = first if owns(first)[0] else second
    published(first, range(20), second)

    def live() -> list[list[int]]:
        return [
            [number for number, one in shard.generations.records.items() if not one.dropped] for shard in all_shards
        ]

    all_shards = [shard for db in two for shard in db.storage.shards]
    leader.add_generation()
    wait_until(lambda: [[1, 2]] * 8 == live(), "the new generation")
    expected = published(first, range(20, 40), second)
    leader.drop_generation(1)
    wait_until(lambda: [[2]] * 8 == live(), "the removal of the former one")
    assert [()] * 2 == [group.dropped for db in two for group in db.sessions.groups]

    def missed(session: Session) -> list[tuple[int, ...]]:
        return [one.dropped for one in session.status().subscriptions]

    again = second.sessions.open(client, expiry_interval=None)
    settled(*two)
    assert expected == sorted(received(again))
    settled(*two)
    assert [(1,)] * 2 == [group.dropped for db in two for group in db.sessions.groups]
    assert [(1,)] == missed(again)
    again.disconnect()
    again = second.sessions.open(client, expiry_interval=None)
    settled(*two)
    assert [()] == missed(again)
    published(first, range(40, 50), second)
    assert 10 == len(received(again))
    assert [(1,)] * 2 == [group.dropped for db in two for group in db.sessions.groups]


def test_messages_in_flight_of_an_absent_member_go_to_other_sites(two: tuple[ts.Database, ts.Database]) -> None:
    """After ``handover_after``, a disconnected member's messages in flight go once to members on other sites."""
    first, second = two
    one, other = joined(first, clients_of(first)[0]), joined(second, clients_of(second)[0])
    settled(*two)
    expected = published(first, range(80), second)
    unacknowledged, found = received(other, acknowledge=False), received(one)
    other.lost()
    settled(*two)
    assert [] == received(one)
    second.sessions.groups.handover_after = 0
    settled(*two)
    again = received(one)
    assert sorted(unacknowledged) == sorted(again)
    assert sorted(expected) == sorted(found + again)
    back = second.sessions.open(other.client_id, expiry_interval=None)
    settled(*two)
    assert [] == received(back)


def test_refused_messages_go_to_a_member_on_another_site(two: tuple[ts.Database, ts.Database]) -> None:
    """A message that a member isn't allowed to receive goes to a member on another site, even after its return."""
    first, second = two
    one = joined(first, clients_of(first)[0], allow=lambda some: [int(message.payload) % 2 == 0 for message in some])
    other = joined(second, clients_of(second)[0])
    settled(*two)
    expected = published(first, range(100), second)
    found = received(one)
    settled(*two)
    assert all(int(payload) % 2 == 0 for payload in found)
    assert sorted(expected) == sorted(found + received(other))
    expected = published(first, range(100, 200), second)
    left = received(other, acknowledge=False)
    mine = received(one)
    other.disconnect(expiry_interval=0)
    settled(*two)
    mine += received(one)
    settled(*two)
    assert sorted(payload for payload in expected if int(payload) % 2 == 0) == sorted(mine)
    (group,) = first.sessions.groups
    assert len({payload for payload in expected if int(payload) % 2}) == group.returned
    assert left
    one.restrict(lambda some: [int(message.payload) % 4 < 2 for message in some])
    settled(*two)
    assert sorted(payload for payload in expected if int(payload) % 4 == 1) == sorted(received(one))
    again = joined(second, clients_of(second)[0])
    settled(*two)
    assert sorted(payload for payload in expected if int(payload) % 4 == 3) == sorted(received(again))


def test_a_slow_member_holds_up_only_what_it_has(two: tuple[ts.Database, ts.Database]) -> None:
    """A member with an exhausted send quota loses its partitions to another site's member, but no message in flight."""
    first, second = two
    for db in two:
        db.sessions.groups.slow_after = 0
    one, other = joined(first, clients_of(first)[0]), joined(second, clients_of(second)[0], receive_maximum=1)
    settled(*two)
    expected = published(first, range(100), second)
    stuck = received(other, acknowledge=False)
    assert 1 == len(stuck)
    found = received(one)
    settled(*two)
    found += received(one)
    assert sorted(expected) == sorted(found + stuck)
    assert {one.client_id: False, other.client_id: True} == {
        member.client_id: member.slow for group in first.sessions.groups for member in group.members
    }


def test_returned_messages_that_only_a_slow_member_may_get_stay_with_it(
    two: tuple[ts.Database, ts.Database],
) -> None:
    """Returned messages that only a slow member may receive stay with that member.

    The group revokes the member's partitions once, and assigns them again when its send quota allows.
    """
    first, second = two
    for db in two:
        db.sessions.groups.slow_after = 0
    left = joined(first, clients_of(first)[0])
    settled(*two)
    expected = published(first, range(10), second)
    assert sorted(received(left, acknowledge=False)) == expected
    other = next(name for n in range(99) if owns(first)[first.shard_of(name := f"other{n}")])
    refusing = joined(first, other, allow=lambda some: [False] * len(some))
    slow = joined(second, clients_of(second)[0], receive_maximum=1)
    left.disconnect(expiry_interval=0)
    settled(*two)
    assert [] == received(refusing)
    settled(*two)
    (stuck,) = slow.deliver()
    assert isinstance(stuck, Publish)
    settled(*two)
    home = first.state(first.shard_of(GROUP_TEXT))
    grants = dict(home.scan(GRANT))
    settled(*two)
    assert grants == dict(home.scan(GRANT))
    slow.puback(stuck.packet_id)
    found = [stuck.message.payload]
    for _ in range(3):
        settled(*two)
        found += received(slow) + received(refusing)
    assert sorted(found) == expected


def test_the_order_of_a_topic_is_kept(two: tuple[ts.Database, ts.Database]) -> None:
    """A topic's messages of one publisher are received in order, though its partition moves to another site."""
    first, second = two
    one = joined(first, clients_of(first)[0])
    settled(*two)
    other: Session | None = None
    found: list[tuple[str, bytes]] = []
    for step in range(6):
        batch = [ts.Message(f"t/{n % 10}", b"%d" % (100 * step + n), clients_of(first)[0], qos=1) for n in range(100)]
        first.publish(batch)
        if step == 1:
            other = joined(second, clients_of(second)[0])
        for session in filter(None, [one, other]):
            for packet in session.deliver():
                assert isinstance(packet, Publish)
                found.append((packet.message.topic, packet.message.payload))
                session.puback(packet.packet_id)
        settled(*two)
    assert other is not None
    for session in (one, other):
        while packets := session.deliver():
            found += [(packet.message.topic, packet.message.payload) for packet in packets]  # type: ignore[union-attr]
            session.puback(*(packet.packet_id for packet in packets))
    numbers = {topic: [int(payload) for one, payload in found if one == topic] for topic, _ in found}
    assert {
        f"t/{n}": [100 * step + tens + n for step in range(6) for tens in range(0, 100, 10)] for n in range(10)
    } == (numbers)


def test_a_shared_subscription_continues_on_the_next_owner(sites: Sites, closing: ExitStack) -> None:
    """After a change of owner, a shared subscription continues with its members, places and unacknowledged messages."""
    a, b = closing.enter_context(sites.open("a", shards=2)), closing.enter_context(sites.open("b"))
    clients = [in_shard(a, 0), in_shard(a, 1)]
    wait_until(lambda: all(owns(a)) or all(owns(b)) or sum(owns(a)) + sum(owns(b)) == 2, "owners")
    dbs = {client: a if owns(a)[shard] else b for shard, client in enumerate(clients)}
    sessions = {client: joined(db, client) for client, db in dbs.items()}
    settled(a, b)
    expected = published(dbs[clients[0]], range(40), a, b)
    given = {client: received(session, acknowledge=False) for client, session in sessions.items()}
    assert sorted(expected) == sorted(payload for some in given.values() for payload in some)
    hand_over(a, b)
    opened = {client: b.sessions.open(client, expiry_interval=None) for client in clients}
    settled(b)
    assert {client: sorted(some) for client, some in given.items()} == {
        client: sorted(received(session)) for client, session in opened.items()
    }
    later = published(b, range(40, 90))
    found = [received(session) for session in opened.values()]
    assert sorted(later) == sorted(payload for some in found for payload in some)
    assert all(found)


def test_members_stay_when_their_shared_subscription_moves(sites: Sites) -> None:
    """Connected members keep their sessions and their shares while the subscription's shard moves to another site."""
    with sites.open("a", shards=4) as a:
        names = [next(f"$share/g{n}/#" for n in range(99) if a.shard_of(f"$share/g{n}/#") == one) for one in range(4)]
        sessions = [a.sessions.open(in_shard(a, shard), expiry_interval=None) for shard in range(4)]
        for session in sessions:
            for name in names:
                session.subscribe(name, 1)
        settled(a)
        expected = published(a, range(60)) * 4
        with sites.open("b") as b:
            divided(a, b)
            settled(a, b)
            left = [session for session in sessions if session.ended is None]
            moved = [session.client_id for session in sessions if session.ended is Ended.MOVED]
            assert left
            assert moved
            assert [0] * 4 == [group.returned for group in b.sessions.groups]
            members = left + [b.sessions.open(client, expiry_interval=None) for client in moved]
            settled(a, b)
            found = [payload for session in members for payload in received(session)]
            expected += published(a, range(60, 120), b) * 4
            found += [payload for session in members for payload in received(session)]
            assert sorted(expected) == sorted(found)


def test_a_shared_subscription_ends_with_its_last_member(two: tuple[ts.Database, ts.Database]) -> None:
    """After the last members on both sites have left, no record remains; a later group of the same name begins anew."""
    first, second = two
    one, other = joined(first, clients_of(first)[0]), joined(second, clients_of(second)[0])
    settled(*two)
    published(first, range(50), second)
    assert received(other, acknowledge=False)
    assert records(two) > 4
    one.unsubscribe(GROUP_TEXT)
    other.disconnect(expiry_interval=0)
    settled(*two)
    assert ([], [], 0) == ([*first.sessions.groups], [*second.sessions.groups], records(two))
    again = joined(second, clients_of(second)[0])
    settled(*two)
    expected = published(first, range(50, 60), second)
    assert Counter(expected) == Counter(received(again))


def test_members_with_many_groups_leave_all_to_others(sites: Sites) -> None:
    """A lost session's messages go to another member, even with more groups than are closed at a time."""
    with sites.open("a") as a:
        one, other = (a.sessions.open(client, expiry_interval=None, receive_maximum=100) for client in ("one", "other"))
        for session in (one, other):
            for number in range(20):
                session.subscribe(f"$share/{number}/#", 1)
        settled(a)
        expected = published(a, range(10)) * 20
        found = received(one)
        one.lost()
        a.sessions.groups.handover_after = 0
        settled(a)
        expected += published(a, range(10, 20)) * 20
        found += received(other)
        assert sorted(expected) == sorted(found)


def test_an_outdated_decision_is_not_committed(sites: Sites) -> None:
    """A decision that was prepared before a later one was committed fails, though this site is the owner again."""
    with sites.open("a") as a:
        joined(a, "c")
        states = a.sessions._registry.states
        outdated = StoredGroup(states.states, states.states[0], GROUP_TEXT).decided()
        assert outdated
        settled(a)
        with pytest.raises(ts.StateConflictError):
            states.write(0, outdated)


def test_a_copy_that_is_opened_alone_shows_the_members(sites: Sites) -> None:
    """A site's directory that is opened read-only shows the shared subscriptions with their members."""
    with sites.open("a") as a:
        joined(a, "c")
        settled(a)
    with ts.open(sites.root / "a", "r") as alone:
        assert [["c"]] == [[one.client_id for one in group.members] for group in alone.sessions.groups]


def test_a_group_that_cannot_be_read_holds_up_no_other(sites: Sites) -> None:
    """While a record of one group is damaged, each tick raises the error, and other groups' members get messages."""
    with sites.open("a") as a:
        session = joined(a, "c")
        session.subscribe("$share/damaged/#", 1)
        key = GroupKeys("$share/damaged/#").standing("c")
        stored = a.state(0).get(key)
        assert stored is not None
        a.sessions._registry.states.write(0, [FrameworkWrite(key, stored[:-1])])
        for _ in range(3):
            with pytest.raises(ts.CorruptionError, match="damaged"):
                a.sessions.tick()
        expected = published(a, range(20))
        assert expected == sorted(received(session))


def test_a_tick_assigns_a_bounded_number_of_groups(sites: Sites, monkeypatch: pytest.MonkeyPatch) -> None:
    """Members of more groups than one tick assigns get their messages after several ticks."""
    monkeypatch.setattr(site_groups, "_DECISIONS", 2)
    with sites.open("a") as a:
        session = a.sessions.open("c", expiry_interval=None)
        for number in range(5):
            session.subscribe(f"$share/{number}/#", 1)
        published(a, [1])
        found = []
        for _ in range(4):
            a.sessions.tick()
            found.append(len(received(session)))
        assert [2, 2, 1, 0] == found


def test_a_group_of_an_existing_database_continues_in_a_cluster(sites: Sites) -> None:
    """A shared subscription of an existing database continues on two sites: places, members and returned messages."""
    path = sites.root / "a"
    with ts.open(path, shards=4) as db:
        one, other = (joined(db, in_shard(db, shard)) for shard in (0, 1))
        ending = joined(db, in_shard(db, 2))
        batch = [ts.Message(f"t/{number}", b"%d" % number, "p", qos=1) for number in range(100)]
        db.publish(batch)
        found, unacknowledged = received(one), received(other, acknowledge=False)
        returned = received(ending, acknowledge=False)
        one.disconnect()
        other.disconnect()
        ending.disconnect(expiry_interval=0)
        assert [len(returned)] == [group.returned for group in db.sessions.groups]
    ts.begin_cluster(path, sites.url)
    with sites.open("a") as a, sites.open("b") as b:
        divided(a, b)
        members = [in_shard(a, shard) for shard in (0, 1)]
        assert sorted(members) == sorted(one.client_id for group in b.sessions.groups for one in group.members)
        dbs = [a if owns(a)[shard] else b for shard in (0, 1)]
        again = [site.sessions.open(client, expiry_interval=None) for site, client in zip(dbs, members, strict=True)]
        settled(a, b)
        found += [payload for session in again for payload in received(session)]
        assert sorted(found) == sorted(message.payload for message in batch)
        assert set(unacknowledged + returned) <= set(found)
        later = published(a, range(100, 200), b)
        parts = [received(session) for session in again]
        assert sorted(later) == sorted(payload for some in parts for payload in some)
        assert all(parts)
        assert [] == [*a.state(a.shard_of(GROUP_TEXT)).scan(MEMBER)]


def test_a_group_ends_whose_members_never_come_back(sites: Sites) -> None:
    """A group of an existing database ends with its members' sessions, even if none has connected to the cluster."""
    path = sites.root / "a"
    with ts.open(path, shards=4) as db:
        joined(db, in_shard(db, 1)).disconnect()
    ts.begin_cluster(path, sites.url)
    with sites.open("a") as a:
        assert [1] == [len(group.members) for group in a.sessions.groups]
        a.sessions.expire(in_shard(a, 1))
        settled(a)
        assert ([], 0) == ([*a.sessions.groups], records([a]))


class Walk:
    """Members on some sites that act at random; a site reads the others' changes only in the steps chosen for it."""

    def __init__(self, dbs: Sequence[ts.Database], chance: random.Random) -> None:
        self.dbs, self.chance = dbs, chance
        self.site_of = {f"c{number}": db for number in range(30) for db in dbs if self._lies_at(f"c{number}", db)}
        self.clients = [client for db in dbs for client in sorted(self.site_of) if self.site_of[client] is db]
        self.clients = [client for db in dbs for client in [c for c in self.clients if self.site_of[c] is db][:3]]
        self.lasting = chance.choice(self.clients)
        """The member that never leaves for good, so that no message is without a group."""
        self.picky = chance.choice([client for client in self.clients if client != self.lasting])
        self.narrow = chance.choice(self.clients)
        """The member whose window is soon full, so that it is slow."""
        self.sessions: dict[str, Session] = {}
        self.given: dict[str, list[tuple[int, bytes]]] = {}
        """By client, the packet ids and payloads that it has not acknowledged."""
        self.published: set[bytes] = set()
        self.acknowledged: set[bytes] = set()
        """The messages whose PUBACK is committed, which must not be delivered again."""
        self.connect(self.lasting)

    @staticmethod
    def _lies_at(client: str, db: ts.Database) -> bool:
        return owns(db)[db.shard_of(client)]

    def connect(self, client: str) -> None:
        session = self.sessions.get(client)
        if session is None:
            refuses = client == self.picky
            allow = (lambda some: [int(one.payload) % 3 > 0 for one in some]) if refuses else None
            most = 3 if client == self.narrow else 65_535
            sessions = self.site_of[client].sessions
            session = sessions.open(client, expiry_interval=None, allow=allow, receive_maximum=most)
            self.sessions[client], self.given[client] = session, []
        if GROUP_TEXT not in {one.topic_filter for one in session.status().subscriptions}:
            session.subscribe(GROUP_TEXT, 1)

    def publish(self, client: str) -> None:
        numbers = range(len(self.published), len(self.published) + self.chance.randrange(1, 6))
        batch = [ts.Message(f"t/{number % 50}", b"%d" % number, client, qos=1) for number in numbers]
        self.site_of[client].publish(batch)
        self.published |= {one.payload for one in batch}

    def deliver(self, client: str) -> None:
        session = self.sessions.get(client)
        for packet in () if session is None else session.deliver(self.chance.randrange(1, 20)):
            assert isinstance(packet, Publish)
            assert packet.message.payload not in self.acknowledged, f"{packet.message.payload!r} again, at {client}"
            self.given[client].append((packet.packet_id, packet.message.payload))

    def acknowledge(self, client: str) -> None:
        if client in self.sessions:
            done = self.given[client][: self.chance.randrange(1, 20)]
            self.sessions[client].puback(*(packet_id for packet_id, _ in done))
            self.sessions[client].checkpoint()
            self.acknowledged |= {payload for _, payload in done}
            del self.given[client][: len(done)]

    def leave(self, client: str) -> None:
        session = self.sessions.get(client)
        if session is None:
            return
        how = self.chance.choice(["lost", "end", "unsubscribe"])
        if how == "lost" or client == self.lasting:
            session.lost()
        elif how == "end":
            session.disconnect(expiry_interval=0)
        else:
            session.unsubscribe(GROUP_TEXT)
            return
        del self.sessions[client], self.given[client]

    def tick(self, client: str) -> None:
        self.site_of[client].sessions.tick()

    def read(self, client: str) -> None:
        db = self.site_of[client]
        assert db.cluster is not None
        replica = self.chance.choice(db.cluster.replicas)
        if replica.kept:
            replica.confirm()
        else:
            db.storage.look_elsewhere()

    def step(self) -> None:
        (do,) = self.chance.choices(
            [self.connect, self.publish, self.deliver, self.acknowledge, self.leave, self.tick, self.read],
            [3, 4, 8, 6, 1.5, 8, 16],
        )
        do(self.chance.choice(self.clients))

    def finish(self) -> None:
        """Let all clients connect, and check that they have received everything."""
        for client in self.clients:
            if client in self.sessions or self.site_of[client].sessions:
                self.connect(client)
        rounds = 0
        while self.published != self.acknowledged and rounds < 20:  # a slow member gets three messages a round
            rounds += 1
            settled(*self.dbs)
            for client in self.clients:
                for _ in range(8):
                    self.deliver(client)
                while self.given[client]:
                    self.acknowledge(client)
        assert self.published == self.acknowledged
        settled(*self.dbs)
        assert [0] * len(self.dbs) == [group.returned for db in self.dbs for group in db.sessions.groups]

    @classmethod
    def run(cls, dbs: Sequence[ts.Database], monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
        """Let members act at random, then check that all messages were delivered, and none after it was acknowledged.

        Messages in flight at disconnected members, and the shares of slow members, go to other members at once.
        """
        for db in dbs:
            assert db.cluster is not None
            db.sessions.groups.handover_after = db.sessions.groups.slow_after = 0
            for replica in db.cluster.replicas:
                monkeypatch.setattr(replica, "follow", lambda **_: None)  # only `settled` lets it read the log
        settled(*dbs)  # so that the first member begins after the messages that were stored before
        walk = cls(dbs, random.Random(seed))
        for _ in range(400):
            walk.step()
        walk.finish()


@pytest.mark.parametrize("seed", [*range(5), *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(5, 100))])
def test_what_is_acknowledged_is_not_delivered_again(
    two: tuple[ts.Database, ts.Database], monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    """However late sites read each other's changes, members get every message, and none after it was acknowledged.

    Members join, leave, end, lose their connections, refuse messages and are slow at random. Messages in flight at
    disconnected members, and the shares of slow members, go to other members at once.
    """
    Walk.run(two, monkeypatch, seed)
