"""`BackendSuite`, which combines all tests of a backend."""

from __future__ import annotations

from .batches import Batches
from .changes import Changes
from .concurrency import Concurrency
from .crashes import Crashes
from .damage import Damages
from .every_write import EveryWrite
from .failures import Failures
from .histories import Histories
from .leaks import Leaks
from .lifecycles import LifeCycles
from .limits import Limits
from .logs import Logs
from .ordering import Ordering
from .ranges import Ranges
from .reopening import Reopening
from .sizes import Hostile
from .snapshots import Snapshots
from .unsupported import Unsupported

__all__ = ["BackendSuite"]


class BackendSuite(
    Ordering,
    Ranges,
    Batches,
    Snapshots,
    Hostile,
    Limits,
    Changes,
    EveryWrite,
    LifeCycles,
    Reopening,
    Crashes,
    Logs,
    Failures,
    Concurrency,
    Leaks,
    Unsupported,
    Damages,
    Histories,
):
    """Tests of the engine contract, `topicstore.contract.engine`.

    Subclass it and override the fixture ``subject``::

        class TestMine(BackendSuite):
            @pytest.fixture
            def subject(self) -> BackendSubject:
                return BackendSubject(make=make, capabilities=SPEC.capabilities, raw_get=raw_get, raw_put=raw_put)

    Each test's docstring states the guarantee that a failure of the test disproves.
    """
