"""The model checker finds no error in the replication program, and finds one if the program's steps are reordered."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator

import pytest
from topicstore.contract.log_store import LogStore
from topicstore.replication.bases import cut_log
from topicstore.replication.heads import Progress
from topicstore.replication.log import Proposal, ShardLog
from topicstore.replication.log_reader import LogReader
from topicstore.replication.objects import Entry
from topicstore.replication.taking_over import Step
from topicstore_conformance.replication import program
from topicstore_conformance.replication.interleavings import Program, explore
from topicstore_conformance.replication.memory_store import Objects
from topicstore_conformance.replication.program import follow, own

FULL = os.environ.get("TOPICSTORE_CONFORMANCE") == "thorough"
MOST = 8_000_000
"""The maximum number of states to check; a complete search has fewer."""
TRUNCATED = own(1, b"a1", truncates=True)
QUICK = {
    "a truncation and an heir": Program(sites={"A": TRUNCATED, "B": own(2, b"b1")}),
    "a truncation and a follower": Program(sites={"A": TRUNCATED, "F": follow}, lost=1),
    "three owners": Program(sites={"A": own(1), "B": own(2, b"b1"), "C": own(3)}),
}
SLOW = {
    "lost answers": Program(sites={"A": TRUNCATED, "B": own(2, b"b1")}, lost=1),
    "a truncation, an heir and a follower": Program(sites={"A": TRUNCATED, "B": own(2), "F": follow}),
    "two entries": Program(sites={"A": own(1, b"a1", b"a2", truncates=True), "B": own(2, b"b1")}),
    "listings of one name": Program(sites={"A": TRUNCATED, "B": own(2, b"b1")}, page=1),
}
FULL_SCOPES = {
    "two entries, lost answers": Program(sites={"A": own(1, b"a1", b"a2", truncates=True), "B": own(2)}, lost=1),
    "both truncate": Program(sites={"A": TRUNCATED, "B": own(2, b"b1", truncates=True)}),
}


@pytest.mark.parametrize("name", QUICK)
def test_every_interleaving_of_the_program_keeps_what_must_hold(name: str) -> None:
    """No order in which the store answers the sites' calls violates an invariant."""
    check(QUICK[name])


@pytest.mark.slow
@pytest.mark.timeout(3_600)
@pytest.mark.parametrize("name", [*SLOW, *(FULL_SCOPES if FULL else ())])
def test_every_interleaving_of_more_calls_keeps_what_must_hold(name: str) -> None:
    """In larger scopes, with lost answers, more entries or a follower, no invariant is violated either."""
    check((SLOW | FULL_SCOPES)[name])


def check(scope: Program) -> None:
    report = explore(scope, most=MOST)
    assert report.finding is None, str(report.finding)
    assert report.whole


def finding(scope: Program) -> list[str]:
    report = explore(scope, most=MOST)
    assert report.finding is not None
    return str(report.finding).splitlines()


def test_cuts_that_are_looked_for_before_reading_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """A reader that lists the cuts only before it reads applies a fence in the place of a deleted entry.

    The model checker finds this.
    """
    read, behind, cut = LogReader.read, LogReader._behind, LogReader.cut
    early: dict[LogReader, int] = {}

    def looks_first(reader: LogReader, progress: Progress) -> object:
        seen = cut(reader)
        found, ended = behind(reader, progress)
        if found:
            early[reader] = seen
        return found, ended

    def forgets(reader: LogReader, epoch: int | None = None) -> Step:
        try:
            return read(reader, epoch)
        finally:
            early.pop(reader, None)

    monkeypatch.setattr(LogReader, "_behind", looks_first)
    monkeypatch.setattr(LogReader, "read", forgets)
    monkeypatch.setattr(LogReader, "cut", lambda reader: early[reader] if reader in early else cut(reader))
    first, *trace = finding(Program(sites={"A": TRUNCATED, "B": own(2), "F": follow}))
    assert re.match(r"site [BF] holds \[\] below 2, and the log \[a1\]", first)
    assert any(step.endswith("LIST shards/0/cuts") for step in trace)


class LateCut(Objects):
    """A connection that sends the creation of a cut after all other calls, though its own listings show the cut."""

    def __init__(self, store: LogStore) -> None:
        super().__init__()
        self._store = store

    def create(self, name: str, data: bytes) -> None:
        super().create(name, data)

    def names(self, prefix: str, after: str = "") -> Iterator[list[str]]:
        yield from super().names(prefix, after)
        yield from self._store.names(prefix, after)

    def get(self, name: str) -> bytes:
        return self._store.get(name)

    def delete(self, name: str) -> None:
        self._store.delete(name)

    def send(self) -> None:
        for name, data in self.objects.items():
            self._store.create(name, data)


def test_entries_that_are_deleted_before_the_cut_is_created_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """If truncation deletes entries before the cut exists, the next owner takes their place for the log's end.

    The model checker finds this.
    """

    def deletes_first(store: LogStore, shard: int, site: str, oldest_reader: int) -> int:
        line = LateCut(store)
        cut = cut_log(line, shard, site, oldest_reader)
        line.send()
        return cut

    monkeypatch.setattr(program, "cut_log", deletes_first)
    *_, last = finding(QUICK["a truncation and an heir"])
    assert "DELETE" in last or "CREATE" in last


def test_changes_that_are_acknowledged_before_they_are_applied_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """If a change is acknowledged before it is applied, its writer may read this site without finding the change.

    The model checker finds this.
    """
    apply = ShardLog._apply

    def acknowledges_first(one: ShardLog, written: list[Entry], pending: list[Proposal]) -> None:
        for proposal in pending:
            proposal.settle()
        apply(one, written, pending)

    monkeypatch.setattr(ShardLog, "_apply", acknowledges_first)
    first, *_ = finding(QUICK["a truncation and an heir"])
    assert first.startswith("a1 was acknowledged at site A, where it is not applied")
