"""Tests of forked processes: a child can't use the database that it inherited, and never hangs.

Run as a program, this module is the parent process. pytest's own process can't be, because it has threads and may have
used other engines before.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import traceback
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import topicstore as ts
from topicstore import Message

from topicstore_conformance.conditions.capabilities import requires
from topicstore_conformance.database.fixtures import Fixtures
from topicstore_conformance.faults.threads import PATIENCE
from topicstore_conformance.subjects.pairs import Pair

__all__ = ["Forks"]

MESSAGES = [Message(f"t/{n % 3}", b"%d" % n, "p") for n in range(1_000)]
OPENED, CLOSED, FRESH = "while its parent has one open", "after its parent had one open", "before its parent had any"
USED, REFUSED = "used", "refused"


class Forks(Fixtures):
    """Tests of forked processes."""

    @requires("persistent")
    @pytest.mark.parametrize("moment", [OPENED, CLOSED, FRESH])
    def test_a_forked_child(self, pair: Pair, directory: Path, moment: str) -> None:
        """A forked child can use its own database, or gets ForkedProcessError; it can't harm its parent's database."""
        program = [sys.executable, "-W", "ignore::DeprecationWarning", "-m", __name__]
        done = subprocess.run(
            [*program, str(directory), pair.backend, pair.layout, moment],
            capture_output=True,
            text=True,
            check=False,
            timeout=2 * PATIENCE,
        )
        assert done.returncode == 0, done.stderr
        child, grandchild = done.stdout.split()
        assert child in ((USED,) if moment == FRESH else (USED, REFUSED))
        assert grandchild in (USED, REFUSED)


def use(path: Path, backend: str, layout: str) -> None:
    """Use a database in ways that make an engine start its threads."""
    with ts.open(path, backend=backend, layout=layout) as db:
        db.store(MESSAGES)
        db.flush()
        db.compact()
        if "checkpoint" in db.storage.capabilities:
            db.checkpoint(path.with_name(f"{path.name}-copy"))
        assert len(MESSAGES) == sum(1 for _ in db.replay("#"))
    with ts.open(path, mode="r") as db:
        assert len(MESSAGES) == sum(1 for _ in db.replay("#"))


def in_child(work: Callable[[], object]) -> None:
    """Call ``work`` in a forked child, and fail if the child fails. An alarm ends a child that hangs."""
    child = os.fork()
    if child == 0:
        signal.alarm(int(PATIENCE))
        try:
            work()
        except BaseException:  # noqa: BLE001 - it is reported, and the child does nothing more
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert code == 0, "the child is stuck" if code == -signal.SIGALRM else "the child failed"


def use_or_be_refused(path: Path, backend: str, layout: str) -> None:
    """Use a new database, and print whether that works or is refused; a refused database must not have been created."""
    try:
        use(path, backend, layout)
    except ts.ForkedProcessError:
        print(REFUSED, flush=True)
        if path.exists():
            raise
    else:
        print(USED, flush=True)


def is_refused(db: ts.Database) -> None:
    """Check that calls on an inherited database raise DatabaseClosedError, and that the database can be closed."""
    for call in (lambda: db.store(MESSAGES), lambda: list(db.replay("#")), db.compact, db.flush, db.add_generation):
        with pytest.raises(ts.DatabaseClosedError):
            call()
    db.close()


def main(directory: str, backend: str, layout: str, moment: str) -> None:
    """Run as the parent: fork children at the given step, and check the parent's own database afterwards."""
    parents, own = Path(directory, "parents"), Path(directory, "own")

    def child() -> None:
        use_or_be_refused(own, backend, layout)
        in_child(lambda: use_or_be_refused(own.with_name("grandchild"), backend, layout))

    if moment == OPENED:
        with ts.open(parents, backend=backend, layout=layout) as db:
            db.store(MESSAGES)
            in_child(partial(is_refused, db))
            in_child(child)
            db.store(MESSAGES)
            assert 2 * len(MESSAGES) == sum(1 for _ in db.replay("#"))
        with ts.open(parents) as db:
            assert [] == db.verify().damages
    else:
        if moment == CLOSED:
            use(parents, backend, layout)
        in_child(child)


if __name__ == "__main__":
    main(*sys.argv[1:])
