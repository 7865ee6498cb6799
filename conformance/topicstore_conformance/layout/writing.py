"""Tests of failed commits: their messages are never read, and later commits store the structure learned in them."""

from __future__ import annotations

from topicstore.contract.engine import WriteBatch

from .fixtures import Fixtures, Stored, numbered
from .learned_topics import FLEET

__all__ = ["Writing"]


class Writing(Fixtures):
    """Tests of `Slab.store` and `Slab.committed`."""

    def test_a_failed_write_leaves_nothing(self, stored: Stored) -> None:
        """No message of a batch whose commit failed is read, even if the next batch reuses its positions."""
        stored.put(numbered(FLEET[:5], 20))
        stored.fail(numbered(["lost/1", "lost/2", *FLEET[:3]], 30))
        stored.check_all()
        stored.put(numbered(["kept/1", *FLEET[3:9]], 30))
        stored.check_all()
        stored.check("lost/#")
        stored.reopen()
        stored.check_all()
        stored.check("kept/1")

    def test_what_a_failed_write_learned_is_stored_by_the_next(self, stored: Stored) -> None:
        """The next batch stores the names and the structure that a failed batch learned, whatever its own topics."""
        for number, kept in enumerate((["x/1"], [*FLEET[:30]], ["x/2", "$SYS/a"], FLEET[20:60:3])):
            stored.fail(numbered([*FLEET[: 20 * (number + 1)], f"lost/{number}", "$SYS/a", "$SYS/b"], 120))
            stored.put(numbered(kept, 40))
            stored.check_all()
            stored.reopen()
            stored.check_all()
        stored.put(numbered(FLEET, 200))
        stored.reopen()
        stored.check_all()

    def test_several_failures_in_a_row(self, stored: Stored) -> None:
        """Consecutive failed batches change nothing, whether or not the slab is opened again between them."""
        for number in range(8):
            stored.fail(numbered(FLEET[number * 9 : number * 9 + 30], 50))
            if number % 3 == 2:
                stored.reopen()
            stored.check_all()
        stored.put(numbered(FLEET[10:50], 80))
        stored.reopen()
        stored.check_all()

    def test_storing_changes_nothing_until_the_commit(self, stored: Stored) -> None:
        """`Slab.store` only adds to the given `WriteBatch`; the engine is unchanged until that batch is written."""
        stored.put(numbered(FLEET[:9], 30))
        before = stored.pairs(), stored.learned_pairs()
        write = WriteBatch()
        batch, rows = stored.place(numbered(FLEET, 60))
        stored.slab.store(batch, write)
        assert before == (stored.pairs(), stored.learned_pairs())
        assert write
        stored.check_all()
        stored.engine.write(write)
        stored.slab.committed()
        stored.rows += rows
        stored.last = rows[-1][0]
        stored.check_all()
