"""Promises about failed commits: they leave nothing behind, and the next one stores what they would have stored."""

from __future__ import annotations

from .fixtures import Fixtures, Stored, numbered
from .learned_topics import FLEET

__all__ = ["Writing"]


class Writing(Fixtures):
    """Promises about `Slab.store` and `Slab.committed`."""

    def test_failed_writes_leave_nothing(self, stored: Stored) -> None:
        """Nothing of batches whose commits failed is read, and what they have learned is stored by the next batch."""
        for number, kept in enumerate((["x/1"], [*FLEET[:30]], ["x/2", "$SYS/a"], FLEET[20:60:3])):
            for _ in range(1 + number):
                stored.fail(numbered([*FLEET[: 20 * (number + 1)], f"lost/{number}", "$SYS/a", "$SYS/b"], 120))
                stored.check_all()
            stored.put(numbered(kept, 40))
            stored.check_all()
            stored.reopen()
            stored.check_all()
        stored.put(numbered(FLEET, 200))
        stored.reopen()
        stored.check_all()
