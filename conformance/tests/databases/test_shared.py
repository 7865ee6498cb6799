"""The database suite on a database that is shared through a log store, by one site.

What concerns the files of a database is left out: damage, power loss, and processes that end. A site's are a copy.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import attrs
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


class Shared(Compaction, Concurrency, Generations, Visibility, Histories):
    """Tests of databases; all those that they create belong to a site of a cluster."""

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
