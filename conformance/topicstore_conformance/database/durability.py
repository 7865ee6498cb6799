"""Promises about durability, tested by counting system calls and by cutting the engine's log at any byte."""

from __future__ import annotations

import random
import re
import shutil
import subprocess
import sys
from pathlib import Path

import attrs
import pytest
import topicstore as ts
from topicstore import Message, MessageId
from topicstore.contract.errors import DataLossError

from topicstore_conformance.conditions.capabilities import requires
from topicstore_conformance.conditions.directories import quick_directory
from topicstore_conformance.conditions.profiles import tries
from topicstore_conformance.database.fixtures import Fixtures
from topicstore_conformance.faults.crash import MARKER, messages_of
from topicstore_conformance.faults.power import why_no_tracing
from topicstore_conformance.oracle.checks import check_publishers, replayed
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


@attrs.frozen
class Call:
    """A system call, or a report of the child's, as strace saw it."""

    kind: str
    """The kind: ``begin``, ``acked``, ``close``, ``write`` or ``sync``."""
    thread: str
    begun: int
    """The line of the trace in which the call began; all numbers count these lines."""
    ended: int
    what: str = ""
    """The batch that a report names, or the file that a call is about."""


_LINE = re.compile(r"(\d+) +(.*)")
_WORD = re.compile(r'write\(1[^,]*, "(begin|acked|close) ?([\d.]*)')
_CALL = re.compile(r"(f(?:data)?sync|p?writev?2?|pwrite64|msync|sync_file_range)\(\d+<([^>]*)>")
_RESUMED = re.compile(r"<\.\.\. (\w+) resumed>")


def parse(trace: str, directory: str) -> list[Call]:
    """Return the calls on files below a directory, and the child's reports, in the order of their ends."""
    calls: list[Call] = []
    open_: dict[str, Call] = {}
    for number, line in enumerate(trace.splitlines()):
        matched = _LINE.match(line)
        if matched is None:
            continue
        thread, text = matched.groups()
        if _RESUMED.match(text):
            begun = open_.pop(thread, None)
            if begun is not None:
                calls.append(attrs.evolve(begun, ended=number))
            continue
        call = _call(thread, text, number, directory)
        if call is None:
            continue
        if text.endswith("<unfinished ...>"):
            open_[thread] = call
        else:
            calls.append(call)
    return calls


def _call(thread: str, text: str, number: int, directory: str) -> Call | None:
    if word := _WORD.match(text):
        return Call(word[1], thread, number, number, word[2])
    if (call := _CALL.match(text)) and call[2].startswith(directory):
        kind = "sync" if call[1] in ("fsync", "fdatasync", "msync") else "write"
        return Call(kind, thread, number, number, call[2])
    return None


def traced(pair: Pair, durability: str, threads: int, batches: int) -> list[Call]:
    """Run the child under strace; return its calls up to where it closes the database."""
    reason = why_no_tracing()
    if reason is not None:
        pytest.skip(reason)
    with quick_directory() as directory:
        trace = Path(directory, "trace")
        database = str(Path(directory, "db"))
        command = ["strace", "-f", "--seccomp-bpf", "-y", "-s", "40", "-o", str(trace)]
        command += ["-e", "trace=fsync,fdatasync,msync,sync_file_range,write,writev,pwrite64,pwritev,pwritev2"]
        command += [sys.executable, "-c", CHILD, database, pair.backend, pair.layout, durability]
        subprocess.run([*command, str(threads), str(batches)], check=True, stdout=subprocess.DEVNULL)
        calls = parse(trace.read_text(errors="replace"), f"{database}/shard-")
    end = next(call.begun for call in calls if call.kind == "close")
    first = min(call.begun for call in calls if call.kind == "begin")
    return [call for call in calls if first <= call.begun < end]


def spans(calls: list[Call]) -> dict[str, tuple[Call, Call]]:
    """Return the reports before and after each batch."""
    begun = {call.what: call for call in calls if call.kind == "begin"}
    return {call.what: (begun[call.what], call) for call in calls if call.kind == "acked"}


# --- cutting the log ------------------------------------------------------------------------


def newest_log(database: Path) -> Path | None:
    """Return the engine's newest log, if it has files with such names."""
    logs = sorted((database / "shard-0000").glob("[0-9]*.log"))
    return logs[-1] if logs else None


@attrs.define
class Written:
    """The batches that were acknowledged, and how long the newest log was after each: 0 if it began later."""

    sizes: list[int] = attrs.field(factory=list)
    ids: list[list[MessageId]] = attrs.field(factory=list)

    def surviving(self, size: int) -> int:
        """Return how many batches lie wholly below a size of the log."""
        return sum(end <= size for end in self.sizes)

    def store(self, db: ts.Database, number: int) -> None:
        """Store a batch with a new topic, name and state."""
        messages = [*messages_of(number), Message(f"new/{number}/topic", b"new", f"client-{number}")]
        result = db.store(messages, state={0: [ts.StateWrite(MARKER, str(number).encode())]})
        log = newest_log(Path(db.path))
        if log is None:
            pytest.skip(f"{db.manifest.backend} keeps no files called NUMBER.log, so there is none to cut")
        self.sizes.append(log.stat().st_size)
        self.ids.append(result.ids)


def open_cut(path: Path, *, complete: bool) -> ts.Database:
    """Open a database whose log was cut; if synced data was cut off, opening is refused until that is accepted."""
    if complete:
        return ts.open(path)
    with pytest.raises(DataLossError):
        ts.open(path)
    with pytest.warns(RuntimeWarning, match="lacks the last"):
        return ts.open(path, recovery="point_in_time")


def check_survivors(path: Path, written: Written, whole: int, *, complete: bool) -> None:
    """Check that a cut database has the first batches, wholly, and continues after them.

    ``complete``: nothing is missing that was synced.
    """
    with open_cut(path, complete=complete) as db:
        got = replayed(db)
        assert {id_ for ids in written.ids[:whole] for id_ in ids} == {id_ for id_, _ in got}
        check_publishers(got)
        for number in range(whole):
            assert 1 == sum(1 for _ in db.replay(f"new/{number}/topic"))
        assert str(whole - 1).encode() == db.state(0).get(MARKER)
        assert (len(got), []) == ((report := db.verify()).messages, report.damages)
        new = [Message(f"new/{number}/topic", b"again", f"client-{number}") for number in range(len(written.ids))]
        ids = db.store(new).ids
        assert min(ids).position > max((id_.position for id_, _ in got), default=0)
        assert len(got) + len(new) == sum(1 for _ in db.replay("#"))
        assert [] == db.verify().damages


class Durability(Fixtures):
    """Promises about what is on disk, and when."""

    @requires("persistent", "sync")
    def test_every_thread_waits_for_a_sync(self, pair: Pair) -> None:
        """Under ``sync`` each store, of any thread, returns after a sync that began when its own write had ended."""
        batches = tries(15, 40)
        calls = traced(pair, "sync", THREADS, batches)
        words = spans(calls)
        assert THREADS * batches == len(words)
        syncs = [call for call in calls if call.kind == "sync"]
        for began, acked in words.values():
            own = [
                call.ended
                for call in calls
                if call.kind == "write" and call.thread == began.thread and began.ended < call.begun < acked.begun
            ]
            assert own
            assert any(max(own) < sync.begun and sync.ended < acked.begun for sync in syncs)

    @requires("persistent", "sync")
    def test_commit_does_not_sync(self, pair: Pair) -> None:
        """Under ``commit`` every batch is written before it is acknowledged, and none is synced."""
        calls = traced(pair, "commit", 1, 20)
        words = spans(calls)
        assert 20 == len(words)
        assert [] == [call for call in calls if call.kind == "sync"]
        for began, acked in words.values():
            assert [
                call for call in calls if call.kind == "write" and began.ended < call.begun and call.ended < acked.begun
            ]

    @requires("persistent")
    @pytest.mark.parametrize("durability", ["commit", "sync"])
    def test_cut_log(self, pair: Pair, durability: str) -> None:
        """At whatever byte the log is cut, the batches before it, and of earlier openings, are whole, and no others."""
        draw = random.Random(durability)
        with quick_directory() as directory:
            path, kept, written = Path(directory, "db"), Path(directory, "kept"), Written()
            with pair.open(path, durability=durability, options={pair.layout: pair.small()}) as db:
                for number in range(5):
                    written.store(db, number)
            written.sizes = [0] * 5
            with ts.open(path) as db:
                for number in range(5, 30):
                    written.store(db, number)
                shutil.copytree(path, kept)  # while it is open: closing may begin another log
            sizes = written.sizes[5:]
            assert len(set(sizes)) == len(sizes)
            edges = [sizes[-1], sizes[-1] - 1, sizes[-2], sizes[-2] + 1, sizes[0], 0]
            for number, cut in enumerate([*edges, *(draw.randrange(sizes[-1]) for _ in range(tries(5, 20)))]):
                copy = shutil.copytree(kept, Path(directory, f"cut-{number}"))
                log = newest_log(copy)
                assert log is not None
                with log.open("r+b") as file:
                    file.truncate(cut)
                whole = written.surviving(cut)
                check_survivors(copy, written, whole, complete=durability == "commit" or whole == len(written.ids))
                shutil.rmtree(copy)
