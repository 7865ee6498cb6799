"""What the tests of whole databases share."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from topicstore.contract.engine import DATA, KEYS, Engine, Keyspace

from topicstore_conformance.conditions.capabilities import check_capabilities
from topicstore_conformance.conditions.directories import quick_directory
from topicstore_conformance.conditions.profiles import MODE
from topicstore_conformance.subjects.pairs import Pair

__all__ = ["Fixtures", "both_durabilities", "both_timestamps", "message_spaces"]

_distinct = [pytest.mark.requires("sync")] if MODE == "quick" else []
"""Where both are the same to the engine, one of them is enough for the quick mode."""
both_durabilities = pytest.mark.parametrize("durability", ["commit", pytest.param("sync", marks=_distinct)])
both_timestamps = pytest.mark.parametrize("timestamps", ["commit", "message"])


def message_spaces(engine: Engine) -> list[Keyspace]:
    """Return the keyspaces in which a layout keeps messages; skip the test where they are out of reach there."""
    found = [space for space in (DATA, KEYS) for _ in engine.scan(space, limit=1)]
    if not found:
        pytest.skip("the layout keeps no messages under keys, where they could be damaged or exchanged")
    return found


class Fixtures:
    """Fixtures of all tests of databases; a subclass overrides ``pair``."""

    @pytest.fixture
    def pair(self) -> Pair:
        """The backend and the layout under test: the one fixture to override."""
        raise NotImplementedError("override the fixture `pair` of DatabaseSuite, with `pair_of(backend, layout)`")

    @pytest.fixture(autouse=True)
    def _has_what_is_required(self, request: pytest.FixtureRequest, pair: Pair) -> None:
        check_capabilities(request.node, pair.capabilities)

    @pytest.fixture
    def directory(self) -> Iterator[Path]:
        """An empty directory, in memory if possible: what must reach a disk is tested by counting and cutting."""
        with quick_directory() as name:
            yield Path(name)
