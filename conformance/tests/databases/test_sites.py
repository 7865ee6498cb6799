"""The database suite on a database that sites of a cluster share: one site, and three.

Tests of a site's own directory are left out, such as damage, and kills of a process at any write. A database without a
cluster keeps its files in the same way, and a site also has its log store.
"""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any, Self, cast

import attrs
import pytest
import topicstore as ts
from topicstore.replication import placement
from topicstore_conformance import DatabaseSuite, Pair, pair_of
from topicstore_conformance.conditions.capabilities import declaring, leaving_out
from topicstore_conformance.conditions.skipping import need
from topicstore_conformance.database.crashes import Crashes
from topicstore_conformance.database.damage import Damage
from topicstore_conformance.database.durability import Durability
from topicstore_conformance.database.forks import Forks
from topicstore_conformance.database.power import PowerLoss
from topicstore_conformance.database.salvage import Salvage
from topicstore_conformance.faults.threads import wait_until
from topicstore_conformance.subjects.pairs import known

pytestmark = pytest.mark.slow

LONG = 3_600.0
"""Seconds after which a site would take over, which no test lasts."""
READS = {"clients", "cursor", "generations", "latest", "read", "replay", "replay_arrow", "streams", "topics", "verify"}
"""The calls that each site answers in turn."""
NAMES = "abc"
CAPABILITIES = next(pair.capabilities for pair in known() if str(pair) == "rocksdb-block") - {"checkpoint"}
"""The capabilities of the pair. A site's checkpoint is no database by itself: it begins another cluster."""


class Sites:
    """The sites of a cluster as one database. The first site owns all shards.

    Successive reads use the same site; after any other call, reads use the next site. Sites that don't compact at the
    same times have messages in the same order only where an order is promised.
    """

    def __init__(self, dbs: list[ts.Database]) -> None:
        self._dbs = dbs
        self._turns = itertools.cycle(dbs)
        self._reader = next(self._turns)

    def __getattr__(self, name: str) -> Any:
        if name not in READS:
            self._reader = next(self._turns)
            return getattr(self._dbs[0], name)
        db = self._reader
        if not db.storage.closed:
            assert db.cluster is not None
            db.cluster.refresh()
        return getattr(db, name)

    def close(self) -> None:
        """Close all sites, the owner last."""
        for db in reversed(self._dbs):
            db.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


@attrs.frozen
class SitesPair(Pair):
    """A pair whose databases are shared by sites: the first at the path itself, the others beside it."""

    count: int = 1

    def open(self, path: Path, **arguments: Any) -> ts.Database:
        """Open the first site with the arguments, and then the others."""
        arguments.pop("durability", None)  # the log store determines the durability
        return self._opened(path, lambda **how: super(SitesPair, self).open(path, **arguments, **how), arguments)

    def reopen(self, path: Path, **arguments: Any) -> ts.Database:
        """Open the sites again."""
        return self._opened(path, lambda **how: ts.open(path, **arguments, **how), arguments)

    def _opened(self, path: Path, open_first: Any, arguments: dict[str, Any]) -> ts.Database:
        url = (path.parent / f"{path.name}-log").as_uri()
        cluster = ts.Cluster(url, beat_interval=0.02, poll_interval=0.02, takeover_after=LONG)
        dbs = [open_first(cluster=cluster, site=NAMES[0])]
        site = dbs[0].cluster
        assert site is not None
        shards = range(len(dbs[0].storage.shards))
        # After a failed write, another site may own a shard. If that site were opened first, it would remain the owner.
        wait_until(lambda: all(map(site.owns, shards)), "all shards at the first site")
        alike = {name: arguments[name] for name in ("clock", "auto_compact") if name in arguments}
        dbs += [
            ts.open(path.parent / f"{path.name}-{name}", cluster=cluster, site=name, **alike)
            for name in NAMES[1 : self.count]
        ]
        everywhere = {*NAMES[: self.count]}
        wait_until(
            lambda: all({*place.replicas} == everywhere for place in site.document.shards), "copies at all sites"
        )
        assert all(map(site.owns, shards))
        return cast("ts.Database", Sites(dbs))


@pytest.fixture(autouse=True)
def _owned_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let one site own all shards, as a batch of several shards requires."""
    monkeypatch.setattr(placement, "SLACK", float(len(NAMES)))


def sites_of(count: int) -> SitesPair:
    need("rocksdb")
    pair = pair_of("rocksdb", "block")
    return SitesPair(pair.backend, pair.layout, CAPABILITIES, count=count)


@declaring(CAPABILITIES)
@leaving_out(Damage, Salvage, Crashes, Durability, PowerLoss, Forks)
class TestOneSite(DatabaseSuite):
    @pytest.fixture
    def pair(self) -> Pair:
        return sites_of(1)


@declaring(CAPABILITIES)
@leaving_out(Damage, Salvage, Crashes, Durability, PowerLoss, Forks)
class TestThreeSites(DatabaseSuite):
    @pytest.fixture
    def pair(self) -> Pair:
        return sites_of(3)
