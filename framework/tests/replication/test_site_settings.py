"""Settings of a cluster's database: settings made by the owner of shard 0 apply on every site."""

from __future__ import annotations

import pytest
import topicstore as ts
from topicstore_conformance.faults.clock import Clock
from topicstore_conformance.faults.threads import wait_until

from .conftest import Sites
from .test_sites import owns, payloads


def divided(a: ts.Database, b: ts.Database) -> tuple[ts.Database, ts.Database, str]:
    """Wait until both sites own shards; return shard 0's owner, the other site, and a client id of the latter."""
    wait_until(
        lambda: (
            any(owns(a)) and any(owns(b)) and all(one != other for one, other in zip(owns(a), owns(b), strict=True))
        ),
        "an owner of each shard, and shards at each site",
    )
    leader, other = (a, b) if owns(a)[0] else (b, a)
    return leader, other, in_shard(a, owns(other).index(True))


def in_shard(db: ts.Database, shard: int) -> str:
    """Return a client id whose messages are stored in this shard."""
    return next(f"c{number}" for number in range(99) if db.shard_of(f"c{number}") == shard)


def test_rules_of_the_owner_hold_on_every_site(sites: Sites) -> None:
    """The owner of shard 0 stores persistence rules; other sites refuse changes, and apply the rules they have read."""
    batch = ts.MessageBatch.from_messages([ts.Message("alarms/1", b""), ts.Message("other", b"")])
    with sites.open("a") as a, sites.open("b") as b:
        assert not b.persistence
        rule = a.persistence.add("alarms/#")
        wait_until(lambda: bool(b.persistence), "the rule on the other site")
        assert ([True, False], ("alarms/#",)) == (
            b.persistence.matching(batch).tolist(),
            b.persistence.filters,
        )
        with pytest.raises(ts.ShardElsewhereError):
            b.persistence.remove(rule)
        assert [rule] == list(b.persistence)
        assert a.persistence.remove(rule)
        wait_until(lambda: not b.persistence, "the end of the rule on the other site")
        assert [False, False] == b.persistence.matching(batch).tolist()


def test_a_site_goes_by_the_retention_that_another_one_sets(sites: Sites) -> None:
    """Retention set on one site applies on the other, which refuses changes, and deletes from the shards that it owns.

    The other site stores nothing meanwhile, so its own stores can't trigger the deletion.
    """
    clock = Clock()
    with sites.open("a", shards=4, clock=clock) as a, sites.open("b", clock=clock) as b:
        leader, other, client = divided(a, b)
        other.store([ts.Message("debug/1", b"1", client), ts.Message("keep", b"2", client)])
        leader.retention.set(filters={"debug/#": "1min"})
        wait_until(lambda: dict(other.retention.settings.filters) == {"debug/#": 60.0}, "the filter on the other site")
        with pytest.raises(ts.ShardElsewhereError):
            other.retention.set(max_age="1h")
        assert leader.retention.settings == other.retention.settings
        clock.now += 120_000_000
        wait_until(lambda: payloads(leader) == [2], "the deletion by the owner of the shard")


def test_a_site_deletes_from_its_own_shards(sites: Sites) -> None:
    """A deletion that covers another site's shard is refused before anything is deleted; one from own shards works."""
    with sites.open("a", shards=4) as a, sites.open("b") as b:
        leader, other, _ = divided(a, b)
        for shard in range(4):
            owner = a if owns(a)[shard] else b
            owner.store([ts.Message("gone", b"%d" % shard, in_shard(a, shard))])
        for db in (leader, other):
            with pytest.raises(ts.ShardElsewhereError):
                db.delete("gone")
        assert [0, 1, 2, 3] == payloads(leader)
        mine = [shard for shard, owned in enumerate(owns(other)) if owned]
        assert len(mine) == other.delete("#", shards=mine)
        assert [shard for shard in range(4) if shard not in mine] == payloads(other)
        with pytest.raises(ts.InvalidArgumentError):
            other.delete("#", shards=[*mine, 4])


def test_the_owner_of_shard_0_begins_and_drops_generations(sites: Sites) -> None:
    """The owner of shard 0 begins and drops generations to keep the size limit, which counts all sites' shards.

    Both sites list the same generations, with numbers that rise over all shards.
    """
    with sites.open("a", shards=4) as a, sites.open("b") as b:
        leader, other, client = divided(a, b)
        leader.retention.set(max_bytes=20_000, when_full="drop")
        number = 0

        def dropped() -> bool:
            nonlocal number
            other.store([ts.Message("t", b"%1000d" % number, client)])
            number += 1
            return leader.generations()[0].number > 1

        wait_until(dropped, "a dropped generation")

        def left() -> list[int]:
            while True:
                try:
                    return payloads(other)
                except ts.GenerationDroppedError:  # dropped during the replay
                    continue

        def settled() -> bool:
            return [one.number for one in a.generations()] == [one.number for one in b.generations()]

        wait_until(settled, "the same generations on both sites")
        wait_until(lambda: left()[0] > 0, "the drop in the other site's shards, which are not listed any more")
        found = left()
        assert [*range(found[0], number)] == found


def test_generations_have_numbers_over_all_shards(sites: Sites) -> None:
    """Generations that several sites begin have different numbers, and a new owner completes unfinished ones."""
    with sites.open("b", shards=4) as b:
        with sites.open("a") as a:
            divided(a, b)
            assert [2, 3, 4] == [a.add_generation(), b.add_generation("skipstream"), a.add_generation("block")]
        wait_until(lambda: all(owns(b)), "all shards at the site that is left")
        wait_until(lambda: [one.number for one in b.generations()] == [1, 2, 3, 4], "all generations")
        assert ["block", "skipstream", "block"] == [one.layout for one in b.generations()][1:]
        assert b.drop_generation(2)
        assert [1, 3, 4] == [one.number for one in b.generations()]
