"""`PluginSuite`, which combines all tests of plugins that transform messages."""

from __future__ import annotations

from .columns import Columns
from .kept import Kept
from .lasting import Lasting
from .nesting import Nesting
from .passing import Passing
from .reading import Reading

__all__ = ["PluginSuite"]


class PluginSuite(Lasting, Nesting, Kept, Reading, Passing, Columns):  # pytest runs the last base class first
    """Tests of transforms: plugins that change messages when they are stored, and undo it when they are read.

    Subclass it and override the fixture ``pair`` with a pair that has the plugins, outermost first::

        class TestMine(PluginSuite):
            @pytest.fixture
            def pair(self) -> Pair:
                return pair_of("memory", "block", plugins=["mine"])

    A transform may change payloads and properties. It passes on all rows, in their order, with their other fields. Each
    test's docstring states the guarantee that a failure of the test disproves.
    """
