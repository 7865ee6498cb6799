"""`LayoutSuite`, which combines all tests of a layout."""

from __future__ import annotations

from .borders import Borders
from .changes import Changes
from .compacting import Compacting
from .concurrency import Concurrency
from .contents import Contents
from .damage import Damages
from .deleting import Deleting
from .heads import Counting
from .histories import Histories
from .learned_topics import Structure
from .limits import Limits
from .places import Places
from .reading import Reading
from .topics import Topics
from .writing import Writing

__all__ = ["LayoutSuite"]


class LayoutSuite(
    Contents,
    Limits,
    Changes,
    Borders,
    Reading,
    Topics,
    Places,
    Structure,
    Writing,
    Deleting,
    Compacting,
    Counting,
    Damages,
    Concurrency,
    Histories,
):
    """Tests of the layout contract, `topicstore.contract.layout`.

    Subclass it and override the fixture ``subject``::

        class TestMine(LayoutSuite):
            @pytest.fixture
            def subject(self) -> LayoutSubject:
                return LayoutSubject(make=make, capabilities=SPEC.capabilities)

    Each test's docstring states the guarantee that a failure of the test disproves.
    """
