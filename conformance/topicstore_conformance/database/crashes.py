"""Tests of killed writers: every acknowledged batch stays, and no batch is stored in part."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Literal

import pytest
import topicstore as ts

from topicstore_conformance.conditions.capabilities import requires
from topicstore_conformance.conditions.directories import quick_directory
from topicstore_conformance.conditions.tries import tries
from topicstore_conformance.database.fixtures import Fixtures, both_durabilities
from topicstore_conformance.faults.crash import Job, Ledger, run_and_kill
from topicstore_conformance.oracle.checks import check_publishers, replayed
from topicstore_conformance.subjects.pairs import Pair, quick_options

__all__ = ["Crashes"]

CREATING: tuple[tuple[int, Literal["all", "engines"]], ...] = (
    (4 * 3 + 2, "engines"),  # within the first write to the fourth of eight shards
    (4 * 8 - 1, "engines"),  # after the first write to the eighth shard
    (4 * 8 + 3 * 3 + 1, "engines"),  # within the second write to the fourth shard
    (14, "all"),  # when the first shard's directory is still empty
    (4 * 1, "engines"),  # after the second shard was opened, before its first write
    (6, "all"),  # before the manifest is renamed to its final name
)
"""The moments at which to kill a child that creates a database of eight shards, and the calls that are counted."""


class Crashes(Fixtures):
    """Tests of the state that a killed writer leaves."""

    @requires("persistent")
    @both_durabilities
    @pytest.mark.parametrize("keep", [True, False])
    def test_kill(self, pair: Pair, durability: str, keep: bool) -> None:
        """After a kill at any moment, all acknowledged batches are stored, and no batch is stored in part."""
        draw, ledger = random.Random(f"{durability} {keep}"), Ledger()
        with quick_directory() as directory:
            for kill in range(tries(1, 4, pair.capabilities)):
                path = Path(directory, "db" if keep else f"db-{kill}")
                ledger = ledger if keep else Ledger()
                job = Job(
                    path=str(path),
                    backend=pair.backend,
                    layout=pair.layout,
                    shards=3 if keep else 1 + kill % 2,
                    durability=durability,
                    seed=draw.randrange(2**32),
                    first=ledger.next_number,
                    beside=(kill + keep) % 2 == 1,
                    options=pair.small(),
                )
                after = draw.choice((1, 2, draw.randrange(3, 30), draw.randrange(30, 150), draw.randrange(30, 400)))
                for step in run_and_kill(job, after, draw.randrange(30)):
                    ledger.hear(step)
                if not (path / "topicstore.json").exists():
                    assert {} == ledger.rows
                    continue
                with ts.open(path) as db:
                    got = replayed(db, "#", order="time")
                    ledger.check(db, got)
                    check_publishers(got)
                    assert (len(got), []) == ((report := db.verify()).messages, report.damages)
                    assert sorted(got) == sorted(replayed(db))

    @requires("persistent")
    def test_kill_while_creating(self, pair: Pair) -> None:
        """If the process that creates a database is killed, the next opening with the same arguments succeeds."""
        with quick_directory() as directory:
            for kill, (moment, counted) in enumerate(CREATING[: tries(1, len(CREATING), pair.capabilities)]):
                path = Path(directory, f"db-{kill}")
                job = Job(
                    path=str(path),
                    backend=pair.backend,
                    layout=pair.layout,
                    shards=8,
                    durability="sync",
                    seed=kill,
                    first=0,
                    steps=0,
                    counted=counted,
                    options=quick_options(pair.layout),
                )
                list(run_and_kill(job, 1, moment))
                assert (path / "shard-0000").exists() == (moment != 6)
                with pair.open(path, shards=8, durability="sync") as db:
                    assert [1] == [info.number for info in db.generations()]
                    assert 1 == db.store([ts.Message("a", b"1")]).count
                    assert [b"1"] == [message.payload for message in db.replay("#")]
