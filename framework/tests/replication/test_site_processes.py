"""Sites in separate processes: owners are killed, or paused and resumed, while all sites write."""

from __future__ import annotations

import random
import warnings
from functools import partial

import pytest
import topicstore as ts
from topicstore_conformance.replication.site_processes import TAKEOVER_AFTER, Processes, disturb
from topicstore_conformance.replication.site_program import quick_cluster

NAMES = "abc"


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(1, 20))])
def test_owners_that_are_killed_or_stopped_lose_nothing(processes: Processes, seed: int) -> None:
    """Every acknowledged message is stored once, in order, and in every replay, while owners are killed and paused."""
    chance = random.Random(seed)
    for name in NAMES:
        processes.start(name)
    for number in range(4):
        processes.progress("stores of all sites")
        name = chance.choice(sorted(processes.running))
        disturb(processes, name, stop=bool(number % 2))
    processes.progress("stores in the end")
    processes.check()


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(5))
def test_owners_that_are_killed_while_shards_move_lose_nothing(processes: Processes, seed: int) -> None:
    """While owners are killed, or paused and resumed, and shards are moved, no acknowledged message is lost."""
    chance = random.Random(seed)
    cluster = quick_cluster(processes.root, TAKEOVER_AFTER)
    for name in NAMES:
        processes.start(name)
    with warnings.catch_warnings(action="ignore"), ts.open(processes.root / "d", cluster=cluster, site="d") as admin:
        assert admin.cluster is not None
        for _ in range(6):
            shard = chance.choice([None, 0, 1])
            admin.cluster.set_replicas(shard, chance.sample([*processes.running], chance.randrange(1, 3)))
            name = chance.choice(sorted(processes.running))
            others = [one for one in processes.running if one != name]
            move = partial(admin.cluster.set_replicas, None, others)
            disturb(processes, name, stop=chance.random() < 0.5, meanwhile=move)
        admin.cluster.set_replicas(None, [])
        processes.progress("stores in the end")
    processes.check()
