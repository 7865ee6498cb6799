"""The suite of all promises about a whole database."""

from __future__ import annotations

from .compaction import Compaction
from .concurrency import Concurrency
from .crashes import Crashes
from .damage import Damage
from .durability import Durability
from .forks import Forks
from .generations import Generations
from .histories import Histories
from .power import PowerLoss
from .salvage import Salvage
from .visibility import Visibility

__all__ = ["DatabaseSuite"]


class DatabaseSuite(
    Damage,
    Salvage,
    Crashes,
    Durability,
    PowerLoss,
    Compaction,
    Concurrency,
    Forks,
    Generations,
    Visibility,
    Histories,
):  # pytest begins with the last of them
    """Tests of whole databases, of a backend and a layout. Subclass it and override the fixture ``pair``.

    ::

        class TestMine(DatabaseSuite):
            @pytest.fixture
            def pair(self) -> Pair:
                return pair_of("mine", "block")

    Each test's docstring is the promise that is broken if it fails.
    """
