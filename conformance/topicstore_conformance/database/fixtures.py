"""Fixtures shared by all tests of whole databases."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from topicstore_conformance.conditions.capabilities import check_capabilities
from topicstore_conformance.conditions.directories import quick_directory
from topicstore_conformance.conditions.tries import MODE
from topicstore_conformance.subjects.pairs import Pair

__all__ = ["Fixtures", "both_durabilities"]

both_durabilities = pytest.mark.parametrize("durability", ["commit", "sync"], indirect=True)


class Fixtures:
    """Fixtures of all tests of databases; a subclass overrides ``pair``."""

    @pytest.fixture
    def pair(self) -> Pair:
        """Return the backend and the layout under test; the only fixture to override."""
        raise NotImplementedError("override the fixture `pair` of the suite, with `pair_of(backend, layout)`")

    @pytest.fixture(autouse=True)
    def _has_what_is_required(self, request: pytest.FixtureRequest, pair: Pair) -> None:
        check_capabilities(request.function, pair.capabilities)

    @pytest.fixture
    def durability(self, request: pytest.FixtureRequest, pair: Pair) -> str:
        """Return a durability. The quick mode skips ``sync`` for engines whose commits always sync."""
        chosen: str = request.param
        if MODE == "quick" and chosen == "sync" and "sync" not in pair.capabilities:
            pytest.skip("needs sync")
        return chosen

    @pytest.fixture
    def directory(self) -> Iterator[Path]:
        """Yield an empty directory, in memory if possible: tests of fsync record system calls and need no real disk."""
        with quick_directory() as name:
            yield Path(name)
