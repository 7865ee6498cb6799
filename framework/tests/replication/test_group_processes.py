"""Members of a shared subscription at sites in separate processes, which are killed, or paused and resumed."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from itertools import count
from pathlib import Path

import pytest
from topicstore.storage.shard_map import ShardMap
from topicstore_conformance.faults.threads import wait_until
from topicstore_conformance.replication.site_processes import disturb

from .test_session_processes import NAMES, Client, SiteProcess

GROUP = "$share/g/q1/#"
SHARDS = 2


class World:
    """Sites in processes, a publisher and two members in each shard, and the checker of what the members receive."""

    def __init__(self, root: Path, seed: int, *more: str) -> None:
        self._root, self._runs, self._more = root, count(), more
        self.running: dict[str, SiteProcess] = {}
        for name in NAMES:
            self.start(name)
        of_shard = [
            [f"c{number}" for number in range(99) if ShardMap(SHARDS).of(f"c{number}") == shard]
            for shard in range(SHARDS)
        ]
        self.members = [Client(name, self.running, 1, seed, {GROUP: 1}) for some in of_shard for name in some[:2]]
        self.until(lambda: all(member.subscribed for member in self.members), "the members")
        self.publishers = [Client(some[2], self.running, 1, seed, {}) for some in of_shard]
        for publisher in self.publishers:
            publisher.topics, publisher.publishing = 40, True

    def start(self, name: str) -> None:
        site = SiteProcess(self._root, name, next(self._runs), *self._more)
        wait_until(lambda: site.ready.is_set() or site.gone.is_set(), f"site {name}")
        assert site.ready.is_set(), site.said()
        self.running[name] = site

    def kill(self, name: str) -> None:
        self.running.pop(name).kill()

    def until(self, condition: Callable[[], bool], why: str) -> None:
        clients = [*getattr(self, "members", ()), *getattr(self, "publishers", ())]
        wait_until(lambda: condition() or any(client.failure for client in clients), why)
        for client in clients:
            if client.failure is not None:
                raise client.failure

    def received(self) -> Counter[tuple[str, int]]:
        return Counter(one for member in self.members for one in [*member.received])

    def sent(self) -> set[tuple[str, int]]:
        return {(publisher.name, number) for publisher in self.publishers for number in range(publisher.sent)}

    def progress(self, why: str, by: int = 10) -> None:
        """Return when each publisher has published further messages, and the members have received all of them."""
        before = [publisher.sent for publisher in self.publishers]
        self.until(lambda: all(one.sent >= sent + by for one, sent in zip(self.publishers, before, strict=True)), why)
        expected = self.sent()
        self.until(lambda: expected <= self.received().keys(), f"{why}: what was acknowledged, at the members")

    def all_receive(self, why: str) -> None:
        """Return when each member has received further messages."""
        before = [len(member.received) for member in self.members]
        self.until(lambda: all(len(one.received) > some for one, some in zip(self.members, before, strict=True)), why)

    def undisturbed(self) -> None:
        """Check that members receive each message once, in a period in which no connection ends.

        A slow site may end a connection by itself, and then the check begins again.
        """
        while True:
            clients = [*self.members, *self.publishers]
            connections = [client.connections for client in clients]
            before = {publisher.name: publisher.sent + 1 for publisher in self.publishers}
            self.progress("messages without a failure")
            self.all_receive("a share for each member")
            if connections == [client.connections for client in clients]:
                twice = [one for one, times in self.received().items() if times > 1 and one[1] >= before[one[0]]]
                assert [] == twice
                return

    def end(self) -> None:
        clients = [*self.members, *self.publishers]
        for client in clients:
            client.stopping.set()
        for name in [*self.running]:
            self.kill(name)
        for client in clients:
            client.stop()


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(1, 20))])
def test_a_group_over_sites_loses_nothing(tmp_path: Path, seed: int) -> None:
    """While sites are killed, paused and resumed, every acknowledged message reaches a member.

    Except around failures it reaches only one member. Every member gets a share, wherever its session is.
    """
    chance, world = random.Random(seed), World(tmp_path, seed)
    try:
        world.undisturbed()
        for number in range(2 if seed == 0 else 6):
            name = chance.choice(sorted(world.running))
            disturb(world, name, stop=bool(number % 2))
            world.progress("messages after the site has come back")
        world.undisturbed()
    finally:
        world.end()


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(10))
def test_what_a_group_over_sites_needs_stays(tmp_path: Path, seed: int) -> None:
    """No message is removed before a member has received it, while sites are killed and paused.

    In the end all messages are removed. Messages may be removed after 0.1 s, so most of those handed over between sites
    are old enough.
    """
    chance, world = random.Random(seed), World(tmp_path, seed, "0.1")
    try:
        for number in range(6):
            name = chance.choice(sorted(world.running))
            disturb(world, name, stop=bool(number % 2))
            world.progress("messages after the site has come back")
        for publisher in world.publishers:
            publisher.stop()
        site = next(iter(world.running.values()))
        world.until(lambda: site.ask("stored") == ("done", 0), "the removal of all messages")
    finally:
        world.end()
