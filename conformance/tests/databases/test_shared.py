"""The database suite on a database that is shared through a log store, by one site and by three.

Tests of a database's files are left out (damage, power loss, killed processes), because a site's files are a copy.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import attrs
import pyarrow as pa
import pytest
import topicstore as ts
from topicstore.storage.directory.manifest import existing_manifest, write_manifest
from topicstore_conformance import Pair, pair_of
from topicstore_conformance.conditions.capabilities import declaring
from topicstore_conformance.conditions.skipping import need
from topicstore_conformance.database.compaction import Compaction
from topicstore_conformance.database.concurrency import Concurrency
from topicstore_conformance.database.generations import Generations
from topicstore_conformance.database.histories import Histories
from topicstore_conformance.database.visibility import Visibility
from topicstore_conformance.subjects.pairs import known

CAPABILITIES = {str(pair): pair.capabilities for pair in known()}
NEVER = 3_600.0
own_open = ts.open
"""`topicstore.open`, which the fixtures replace."""


class Shared(Compaction, Concurrency, Generations, Visibility, Histories):
    """Tests of databases, in which each database that a test creates belongs to a site of a cluster."""

    @pytest.fixture(autouse=True)
    def _shared(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Open every database as the only site of a cluster of its own."""
        own = ts.open

        def open_shared(path: str | Path, mode: Any = "a", **how: Any) -> ts.Database:
            path = Path(path)
            if mode == "r" or how.get("backend") == "memory":
                return own(path, mode, **how)
            if path.name.startswith("copy"):  # a checkpoint, which becomes a database of its own
                write_manifest(path, attrs.evolve(existing_manifest(path), cluster=None))
                return own(path, mode, **how)
            how.pop("durability", None)
            url = (path.parent / f"log-of-{path.name}").as_uri()
            return own(path, mode, cluster=ts.Cluster(url, takeover_after=NEVER), site="one", **how)

        monkeypatch.setattr(ts, "open", open_shared)


@declaring(CAPABILITIES["rocksdb-block"])
class TestRocksdbBlock(Shared):
    @pytest.fixture
    def pair(self) -> Pair:
        need("rocksdb")
        return pair_of("rocksdb", "block")


@declaring(CAPABILITIES["rocksdb-skipstream"])
class TestRocksdbSkipstream(Shared):
    @pytest.fixture
    def pair(self) -> Pair:
        need("rocksdb")
        return pair_of("rocksdb", "skipstream")


class Replicated(Shared):
    """Tests of databases on a site beside two others; when it is closed, all three sites must have the same messages.

    Databases of several shards are left out: each site would own some of the shards, and refuse writes to the rest.
    """

    # Its writers work until the database is closed, so the sites can't be compared before.
    test_close_while_others_work = None  # type: ignore[assignment]
    # It opens so many databases that it takes more than a minute with three sites.
    test_machine = None  # type: ignore[assignment]

    @pytest.fixture(autouse=True)
    def _replicated(self, _shared: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
        """Open two other sites after each database of one shard; before it is closed, compare and close them."""
        alone, close = ts.open, ts.Database.close
        beside: dict[ts.Database, ExitStack] = {}

        def open_three(path: str | Path, mode: Any = "a", **how: Any) -> ts.Database:
            if how.get("shards", 1) != 1:
                pytest.skip("needs all shards at one site: sites of a cluster share them")
            db = alone(path, mode, **how)
            if db.cluster is not None:
                path, others = Path(path), ExitStack()
                cluster = ts.Cluster((path.parent / f"log-of-{path.name}").as_uri(), takeover_after=NEVER)
                own = {name: how[name] for name in ("backend", "clock") if name in how}
                for site in ("two", "three"):
                    other = own_open(path.parent / f"{site}-of-{path.name}", cluster=cluster, site=site, **own)
                    others.callback(close, other)
                    others.callback(check_same, db, other)
                beside[db] = others
            return db

        def close_three(db: ts.Database) -> None:
            with beside.pop(db, ExitStack()):
                pass
            close(db)

        monkeypatch.setattr(ts, "open", open_three)
        monkeypatch.setattr(ts.Database, "close", close_three)
        yield
        for db in [*beside]:
            close_three(db)


def stored(db: ts.Database) -> pa.Table:
    return db.replay_arrow("#", ids=True).read_all().sort_by([("shard", "ascending"), ("position", "ascending")])


def check_same(db: ts.Database, other: ts.Database) -> None:
    assert stored(db).equals(stored(other))


@pytest.mark.slow
@declaring(CAPABILITIES["rocksdb-block"])
class TestThreeSites(Replicated):
    @pytest.fixture
    def pair(self) -> Pair:
        need("rocksdb")
        return pair_of("rocksdb", "block")
