"""`DatabaseSuite`, which combines all tests of a whole database."""

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
):  # pytest runs the tests of the last base class first
    """Tests of whole databases, made of a backend and a layout.

    Subclass it and override the fixture ``pair``::

        class TestMine(DatabaseSuite):
            @pytest.fixture
            def pair(self) -> Pair:
                return pair_of("mine", "block")

    Each test's docstring states the guarantee that a failure of the test disproves.
    """
