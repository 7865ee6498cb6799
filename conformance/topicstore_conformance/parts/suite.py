"""`DatabasePartsSuite`, which combines all tests of the parts of a database."""

from __future__ import annotations

from .archives import Archiving
from .arguments import Arguments
from .exchanges import Exchanges
from .followers import Followers
from .histories import Histories
from .queues import Queueing
from .reports import Reports
from .retained import Retained
from .retention import Retention
from .sessions import Sessions
from .shared import Shared
from .subscribing import Subscribing
from .whole import Whole

__all__ = ["DatabasePartsSuite"]


class DatabasePartsSuite(
    Histories,
    Whole,
    Archiving,
    Retention,
    Queueing,
    Followers,
    Shared,
    Exchanges,
    Subscribing,
    Sessions,
    Retained,
    Arguments,
    Reports,
):  # pytest runs the tests of the last base class first
    """Tests of the parts of a database: each across openings, dropped generations, expiry and kills.

    Subclass it and override the fixture ``pair``::

        class TestMine(DatabasePartsSuite):
            @pytest.fixture
            def pair(self) -> Pair:
                return pair_of("mine", "block")

    Each test's docstring states the guarantee that a failure of the test disproves.
    """
