"""Tests of durability, which record system calls."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from topicstore_conformance.conditions.capabilities import requires
from topicstore_conformance.conditions.directories import quick_directory
from topicstore_conformance.conditions.tries import tries
from topicstore_conformance.database.fixtures import Fixtures
from topicstore_conformance.faults.power import Call, record, why_no_tracing
from topicstore_conformance.subjects.pairs import Pair

__all__ = ["Durability"]
THREADS = 4

CHILD = """
import os, sys, threading
import topicstore as ts
path, backend, layout, durability, threads, batches = sys.argv[1:]
with ts.open(path, backend=backend, layout=layout, durability=durability) as db:
    db.store([ts.Message("t/warm", b"", "w")])
    start = threading.Barrier(int(threads))
    def work(number):
        start.wait()
        for batch in range(int(batches)):
            os.write(1, b"begin %d.%d\\n" % (number, batch))
            db.store([ts.Message("t/%d" % number, b"x" * 100, "c")] * 5)
            os.write(1, b"acked %d.%d\\n" % (number, batch))
    workers = [threading.Thread(target=work, args=(number,)) for number in range(int(threads))]
    for worker in workers: worker.start()
    for worker in workers: worker.join()
    os.write(1, b"close\\n")
"""


def traced(pair: Pair, durability: str, threads: int, batches: int) -> tuple[list[Call], dict[str, tuple[Call, Call]]]:
    """Run the child; return its system calls on engines' files before close, and two marker calls for each batch.

    The markers are writes to standard output: the child makes one before it stores the batch and one after.
    """
    reason = why_no_tracing()
    if reason is not None:
        pytest.skip(reason)
    with quick_directory() as directory:
        place = Path(directory, "recorded")
        place.mkdir()
        command = [sys.executable, "-c", CHILD, str(place / "db"), pair.backend, pair.layout, durability]
        calls = record([*command, str(threads), str(batches)], place, Path(directory)).calls
    words = {call.word.strip(): call for call in calls if call.word}
    first, last = min(call.begun for call in words.values()), words["close"].begun
    spans = {
        name.removeprefix("acked "): (words[name.replace("acked", "begin")], acked)
        for name, acked in words.items()
        if name.startswith("acked ")
    }
    shards = f"{place}/db/shard-"
    return [call for call in calls if call.path.startswith(shards) and first <= call.begun < last], spans


def synced(call: Call) -> bool:
    """Return whether a system call made a file's data durable."""
    return call.name in ("fsync", "fdatasync", "msync")


class Durability(Fixtures):
    """Tests of the order of writes, fsyncs and acknowledgements."""

    @requires("persistent", "sync")
    def test_every_thread_waits_for_a_sync(self, pair: Pair) -> None:
        """Under ``sync`` each `store`, in any thread, returns after an fsync that began after that thread's write."""
        batches = tries(15, 40)
        calls, spans = traced(pair, "sync", THREADS, batches)
        assert THREADS * batches == len(spans)
        for began, acked in spans.values():
            within = [call for call in calls if began.ended <= call.begun and call.ended <= acked.begun]
            own = [call.ended for call in within if call.thread == began.thread and "write" in call.name]
            assert own
            assert any(max(own) <= call.begun for call in within if synced(call))

    @requires("persistent", "sync")
    def test_commit_does_not_sync(self, pair: Pair) -> None:
        """Under ``commit`` every batch is written before it is acknowledged, without an fsync."""
        calls, spans = traced(pair, "commit", 1, 20)
        assert 20 == len(spans)
        assert [] == list(filter(synced, calls))
        for began, acked in spans.values():
            within = [call for call in calls if began.ended <= call.begun and call.ended <= acked.begun]
            assert any("write" in call.name for call in within)
