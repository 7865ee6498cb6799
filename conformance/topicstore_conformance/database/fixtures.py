"""Fixtures that the tests of whole databases share."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from topicstore_conformance.conditions.capabilities import check_capabilities
from topicstore_conformance.conditions.directories import quick_directory
from topicstore_conformance.conditions.profiles import MODE
from topicstore_conformance.subjects.pairs import Pair

__all__ = ["Fixtures", "both_durabilities"]

both_durabilities = pytest.mark.parametrize("durability", ["commit", "sync"], indirect=True)


class Fixtures:
    """Fixtures of all tests of databases; a subclass overrides ``pair``."""

    @pytest.fixture
    def pair(self) -> Pair:
        """The backend and the layout under test: the one fixture to override."""
        raise NotImplementedError("override the fixture `pair` of DatabaseSuite, with `pair_of(backend, layout)`")

    @pytest.fixture(autouse=True)
    def _has_what_is_required(self, request: pytest.FixtureRequest, pair: Pair) -> None:
        check_capabilities(request.function, pair.capabilities)

    @pytest.fixture
    def durability(self, request: pytest.FixtureRequest, pair: Pair) -> str:
        """A durability; if both are the same to the engine, one of them is enough for the quick mode."""
        chosen: str = request.param
        if MODE == "quick" and chosen == "sync" and "sync" not in pair.capabilities:
            pytest.skip("needs sync")
        return chosen

    @pytest.fixture
    def directory(self) -> Iterator[Path]:
        """An empty directory, in memory if possible: syncs are tested by counting and cutting, not by the disk."""
        with quick_directory() as name:
            yield Path(name)
