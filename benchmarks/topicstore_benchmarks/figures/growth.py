"""How much memory storing takes when there are very many topics.

It is measured in a separate process, because memory that one side has freed would hide the growth of the
next one: ``python -m topicstore_benchmarks.figures.growth LAYOUT MESSAGES`` prints it as JSON.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from contextlib import closing
from itertools import chain, islice
from pathlib import Path

import attrs
import msgspec

from topicstore_benchmarks.contenders.database import DatabaseContender
from topicstore_benchmarks.harness.hardware import peak_memory
from topicstore_benchmarks.peak_memory import peak_of

from .message_sets import BATCH, fleet_batches

__all__ = ["Growth", "growth_of", "measure_growth"]


@attrs.frozen(kw_only=True)
class Growth:
    """The bytes by which the process's highest use of memory grew."""

    early: int
    """Growth during the first quarter of the messages, which has the first message of each topic."""
    late: int
    """Growth during the rest, which has no new topics."""


def growth_of(layout: str, messages: int) -> Growth | None:
    """Return the growth measured in a separate process; None where that isn't possible."""
    if peak_of() is None:  # elsewhere a child starts with its parent's peak
        return None
    command = [sys.executable, "-m", "topicstore_benchmarks.figures.growth", layout, str(messages)]
    done = subprocess.run(command, stdout=subprocess.PIPE, check=True)  # noqa: S603 - this module
    return msgspec.json.decode(done.stdout, type=Growth)


def measure_growth(layout: str, messages: int) -> Growth:
    """Store ``fleet`` in this process, and make each batch just before it is stored."""
    batches = fleet_batches(messages)
    batches = chain([next(batches)], batches)  # memory of the message generator is allocated from here on
    with tempfile.TemporaryDirectory(prefix="topicstore-bench-") as directory:
        before = peak_memory()
        with closing(DatabaseContender(layout, Path(directory, layout), layout)) as side:
            side.open()
            for batch in islice(batches, messages // 4 // BATCH):
                side.store(batch)
            known = peak_memory()
            for batch in batches:
                side.store(batch)
    return Growth(early=known - before, late=peak_memory() - known)


if __name__ == "__main__":
    sys.stdout.buffer.write(msgspec.json.encode(measure_growth(sys.argv[1], int(sys.argv[2]))))
