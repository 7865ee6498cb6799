"""A replicated log with real threads, on a log store that loses, repeats and delays requests."""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from topicstore.contract.errors import CorruptionError, DatabaseClosedError, InvalidArgumentError, ShardMovedError
from topicstore.contract.log_store import LogStore, ObjectExistsError, StorageUnavailableError
from topicstore.replication import log, log_reader, names
from topicstore.replication.bases import cut_log, write_base
from topicstore.replication.heads import Kind
from topicstore.replication.log import ShardLog
from topicstore.replication.log_reader import LogReader
from topicstore.replication.log_stores import open_log_store
from topicstore.replication.objects import (
    BASES,
    CHANGE_OVERHEAD,
    CUTS,
    LARGEST_CHANGE,
    Base,
    Cut,
    Entry,
    EntryTooLargeError,
    decode_entry,
    encode_entry,
)
from topicstore.replication.reading import LocalWrite
from topicstore.replication.taking_over import Step, may_suspect
from topicstore.shard.writer import LogFullError
from topicstore_conformance.faults.threads import together
from topicstore_conformance.replication.program import Copy

from .conftest import LONG, Gate, Line, Objects

SHARD = 3


class CountingCopy(Copy):
    """A shard in memory that counts the bases read from the log store."""

    bases = 0

    def take_base(self, base: Base) -> None:
        super().take_base(base)
        self.bases += 1


class Site:
    """A site with one shard."""

    def __init__(self, store: LogStore, name: str, *commands: str | Gate, patience: float = 0) -> None:
        self.name = name
        self.line = Line(store, *commands)
        self.copy = CountingCopy(self.line)
        self.log = ShardLog(self.line, SHARD, self.copy, name, lambda _: None, patience=patience)

    def follow(self) -> list[bytes]:
        """Apply all acknowledged entries, also after a truncation of the log, by reads with ``certain``."""
        while self.log.reader.read(certain=True) is Step.READ:
            pass
        return self.copy.changes

    def propose(self, *changes: bytes) -> None:
        for change in changes:
            self.log.propose(change).wait(LONG)

    def truncate(self) -> None:
        """Write a base of the applied changes, truncate the log there, and delete the entries before it."""
        progress = self.copy.progress
        write_base(self.line, SHARD, self.name, progress, progress.next, [msgspec.msgpack.encode(self.copy.changes)])
        cut_log(self.line, SHARD, self.name, progress.next)


def entries(store: LogStore) -> list[Entry]:
    found = [name for chunk in store.names(names.entries(SHARD)) for name in chunk]
    return [decode_entry(SHARD, names.number_of(name), store.get(name), store.place) for name in found]


@pytest.fixture
def store() -> Objects:
    return Objects()


@pytest.fixture
def site(store: Objects) -> Iterator[Any]:
    made: list[Site] = []

    def make(name: str, *commands: str | Gate, epoch: int = 0, patience: float = 0) -> Site:
        """Make a site, which takes over with an epoch if one is given."""
        made.append(Site(store, name, *commands, patience=patience))
        assert not epoch or made[-1].log.take_over(epoch)
        return made[-1]

    yield make
    for one in made:
        one.log.close()


def test_what_is_acknowledged_is_in_the_log_and_at_every_follower(site: Any) -> None:
    a, b = site("a", epoch=1), site("b")
    a.propose(b"1", b"2", b"3")
    assert [b"1", b"2", b"3"] == a.copy.changes == b.follow()
    assert a.copy.progress == b.copy.progress


def test_what_is_queued_while_a_put_is_in_flight_becomes_one_entry(site: Any, store: Objects) -> None:
    """Changes that are proposed while a PUT is in flight become one entry, in the order of their proposal."""
    gate = Gate()
    a = site("a", "", gate, epoch=1)
    first = a.log.propose(b"0", 1, 1)
    gate.reached()
    rest = [a.log.propose(b"%d" % number, number + 1, number + 1) for number in range(1, 50)]
    gate.open()
    for proposal in (first, *rest):
        proposal.wait(LONG)
    assert [1, 49] == [len(entry.changes) for entry in entries(store)[1:]]
    assert (2, 50) == (entries(store)[2].head.first_position, entries(store)[2].head.last_position)
    assert [b"%d" % number for number in range(50)] == a.copy.changes


def test_a_change_waits_for_others_as_long_as_it_may(
    site: Any, store: Objects, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With `patience`, changes wait in the queue until they fill an entry, the time is over, or the shard is released.

    Changes queued during a PUT wait too, but don't delay the acknowledgement of the entry in that PUT.
    """
    monkeypatch.setattr(log, "_MOST_BYTES", 30)
    a = site("a", epoch=1, patience=100 * LONG)
    filling = [a.log.propose(bytes(10)) for _ in range(2)]
    for proposal in filling:
        proposal.wait(LONG)
    last = [a.log.propose(b"%d" % number) for number in range(3)]
    assert [2] == [len(entry.changes) for entry in entries(store)[1:]]
    assert a.log.release(LONG)
    for proposal in last:
        proposal.wait(LONG)
    assert [2, 3] == [len(entry.changes) for entry in entries(store)[1:] if entry.head.kind is Kind.CHANGES]
    gate = Gate()
    b = site("b", "", gate, epoch=2, patience=100 * LONG)
    filling = [b.log.propose(bytes(10)) for _ in range(2)]
    gate.reached()
    waiting = b.log.propose(b"x")
    gate.open()
    for proposal in filling:
        proposal.wait(LONG)
    b.log.close()
    with pytest.raises(ShardMovedError, match="has stopped writing"):
        waiting.wait(LONG)
    site("c", epoch=3, patience=0.001).propose(b"y")
    assert b"x" not in entries(store)[-1].changes


def test_an_entry_is_full_before_it_is_too_large(site: Any, store: Objects, monkeypatch: pytest.MonkeyPatch) -> None:
    """Queued changes become several entries, none of which is larger than the limit unless one change alone is."""
    monkeypatch.setattr(log, "_MOST_BYTES", 30)
    gate = Gate()
    a = site("a", "", gate, epoch=1)
    sizes = [0] * 7 + [9, 9, 50, 4, 3, 30, 1]
    proposals = [a.log.propose(b"x")]
    gate.reached()
    proposals += [a.log.propose(bytes(size)) for size in sizes]
    gate.open()
    for proposal in proposals:
        proposal.wait(LONG)
    expected = [(0,) * 6, (0, 9), (9,), (50,), (4, 3), (30,), (1,)]
    assert expected == [tuple(map(len, entry.changes)) for entry in entries(store)[2:]]


def test_the_next_put_begins_while_an_entry_is_applied(site: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """While an entry is applied, the PUT of the changes that were queued meanwhile is in flight."""
    first, second = Gate(), Gate()
    a, b = site("a", "", first, second, epoch=1), site("b")
    write = a.copy.write

    def waits(entry: Entry, local: LocalWrite) -> None:
        if entry.changes == (b"1",):
            second.reached()
        write(entry, local)

    monkeypatch.setattr(a.copy, "write", waits)
    proposals = [a.log.propose(b"1")]
    first.reached()
    proposals.append(a.log.propose(b"2"))
    first.open()
    proposals[0].wait(LONG)
    assert [b"1"] == a.copy.changes
    second.open()
    proposals[1].wait(LONG)
    assert [b"1", b"2"] == a.copy.changes == b.follow()


def test_an_engine_that_fails_beside_a_put_stops_the_log(site: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """If applying an entry fails while the next PUT is in flight, both changes fail, and nothing later is applied."""
    first, second = Gate(), Gate()
    a, b = site("a", "", first, second, epoch=1), site("b")

    def fail(_entry: Entry, _write: LocalWrite) -> None:
        second.reached()
        raise OSError("the disk is full")

    monkeypatch.setattr(a.copy, "write", fail)
    proposals = [a.log.propose(b"1")]
    first.reached()
    proposals.append(a.log.propose(b"2"))
    first.open()
    second.reached()
    second.open()
    for proposal in proposals:
        with pytest.raises(OSError, match="the disk is full"):
            proposal.wait(LONG)
    assert [] == a.copy.changes
    assert [b"1", b"2"] == b.follow()


def test_an_entry_is_acknowledged_though_the_next_one_is_fenced(site: Any) -> None:
    """An owner that is fenced while it applies an entry acknowledges this entry, and fails the next one."""
    first, second = Gate(), Gate()
    a, b = site("a", "", first, second, epoch=1), site("b")
    proposals = [a.log.propose(b"1")]
    first.reached()
    proposals.append(a.log.propose(b"2"))
    first.open()
    second.reached()
    assert b.log.take_over(2)
    second.open()
    proposals[0].wait(LONG)
    with pytest.raises(ShardMovedError):
        proposals[1].wait(LONG)
    assert [b"1"] == a.follow() == b.follow()


def test_a_full_queue_refuses_changes_until_there_is_room(site: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The queue's size in bytes is bounded; a caller that waits for space in it does not hold the shard's lock."""
    monkeypatch.setattr(log, "_MOST_QUEUED", 100)
    gate = Gate()
    a = site("a", "", gate, epoch=1)
    proposals = [a.log.propose(b"1")]
    gate.reached()
    proposals += [a.log.propose(bytes(200))]
    with pytest.raises(LogFullError, match="205 bytes of changes wait for the store"):
        a.log.propose(b"2")
    with pytest.raises(StorageUnavailableError, match="nothing was queued"):
        a.log.wait_for_room(1, 0)
    gate.open()
    a.log.wait_for_room(1, LONG)
    proposals += [a.log.propose(b"2")]
    for proposal in proposals:
        proposal.wait(LONG)
    a.log.release()
    a.log.wait_for_room(1_000, 0)


def test_a_change_that_no_entry_holds_is_refused_and_the_log_goes_on(site: Any) -> None:
    """A change that is too large for a log entry is refused at once with advice, and later changes are stored."""
    a, b = site("a", epoch=1), site("b")
    with pytest.raises(EntryTooLargeError, match="split the batch"):
        a.log.propose(bytes(LARGEST_CHANGE))
    a.propose(b"1")
    assert [b"1"] == a.copy.changes == b.follow()


def test_many_threads_that_propose_each_get_their_result(site: Any) -> None:
    a, b = site("a", epoch=1), site("b")

    def run(thread: int) -> None:
        a.propose(*(b"%d.%d" % (thread, number) for number in range(25)))

    together(*(partial(run, number) for number in range(6)))
    assert sorted(a.copy.changes) == sorted(b"%d.%d" % (thread, number) for thread in range(6) for number in range(25))
    assert a.copy.changes == b.follow()


@settings(max_examples=60)
@given(st.lists(st.sampled_from(["", "drop", "lose", "late", "refuse"]), max_size=14))
def test_whatever_answers_are_lost_each_change_is_stored_once(commands: list[str]) -> None:
    """Whichever answers are lost, each change is stored once, and late or repeated requests change nothing."""
    store = Objects()
    a, b = Site(store, "a", *commands), Site(store, "b")
    assert a.log.take_over(1)
    for change in (b"1", b"2", b"3", b"4"):
        a.propose(change)
        a.line.arrive()
    a.log.close()
    a.line.arrive()
    assert [b"1", b"2", b"3", b"4"] == a.copy.changes == b.follow()
    assert list(range(5)) == [entry.head.index for entry in entries(store)]


def test_a_paused_owner_is_fenced_and_what_it_has_not_written_fails(site: Any) -> None:
    """A paused owner is fenced: its pending changes fail, and the same site can follow the new owner."""
    gate = Gate()
    a, b = site("a", "", "", gate, epoch=1), site("b")
    a.propose(b"1")
    paused = a.log.propose(b"2")
    gate.reached()
    queued = a.log.propose(b"3")
    assert b.log.take_over(2)
    b.propose(b"4")
    gate.open()
    for proposal in (paused, queued):
        with pytest.raises(ShardMovedError, match="shard 3 has moved to site b; epoch 1 is over"):
            proposal.wait(LONG)
    with pytest.raises(ShardMovedError):
        a.log.propose(b"5")
    assert not a.log.owned
    assert [b"1", b"4"] == b.copy.changes == a.follow()
    assert a.log.take_over(3)
    a.propose(b"6")
    assert [b"1", b"4", b"6"] == b.follow()


def test_an_owner_that_wakes_after_truncation_meets_the_fence(site: Any, store: Objects) -> None:
    """An owner that continues after its log was truncated finds the fence at its next index."""
    gate = Gate()
    a, b, c = site("a", "", "", gate, epoch=1), site("b"), site("c")
    a.propose(b"1")
    paused = a.log.propose(b"2")
    gate.reached()
    assert b.log.take_over(2)
    b.propose(b"3")
    b.truncate()
    gate.open()
    with pytest.raises(ShardMovedError):
        paused.wait(LONG)
    assert [Kind.FENCE, Kind.FENCE] == [entry.head.kind for entry in entries(store)]
    assert [b"1", b"3"] == a.follow() == c.follow()
    assert (1, 1) == (a.copy.bases, c.copy.bases)


def test_an_entry_that_was_written_and_truncated_before_its_answer_is_acknowledged(site: Any) -> None:
    """An entry that was written and truncated before its answer is acknowledged, because the base contains it."""
    gate = Gate()
    a, b, c = site("a", "", "lose", gate, epoch=1), site("b"), site("c")
    written = a.log.propose(b"1")
    gate.reached()
    assert b.log.take_over(2)
    b.propose(b"2")
    b.truncate()
    gate.open()
    written.wait(LONG)
    with pytest.raises(ShardMovedError):
        a.propose(b"3")
    assert [b"1", b"2"] == b.copy.changes == c.follow() == a.follow()


def test_a_fence_in_an_emptied_place_does_not_make_an_owner(site: Any, store: Objects) -> None:
    """A fence with the number of a deleted entry doesn't count: the site reads the base and fences again."""
    gate = Gate()
    a, b, late = site("a", epoch=1), site("b", gate), site("late")
    taken: list[bool] = []
    thread = threading.Thread(target=lambda: taken.append(b.log.take_over(2)))
    a.propose(b"1")
    thread.start()
    gate.reached()
    a.propose(b"2", b"3")
    a.truncate()
    gate.open()
    thread.join()
    assert ([True], 1) == (taken, b.copy.bases)
    b.propose(b"4")
    with pytest.raises(ShardMovedError):
        a.propose(b"5")
    assert [b"1", b"2", b"3", b"4"] == b.copy.changes == a.follow() == late.follow()
    # Entry 2 is the fence that was written with the number of a deleted entry.
    assert [0, 2, 4, 5] == [entry.head.index for entry in entries(store)]


def test_an_idle_follower_asks_for_the_next_entry_only(site: Any) -> None:
    """A read that finds no entry is one GET; after an entry, the reader also lists the cuts of the log.

    Every few reads, and in a read with ``certain``, the reader lists the cuts in any case.
    """
    a, b = site("a", epoch=1), site("b")
    a.propose(b"1")
    b.follow()
    b.follow()
    b.line.requests.clear()
    for _ in range(log_reader._LOOK_EVERY - 2):
        assert Step.FENCE is b.log.reader.read()
    assert [f"GET {names.entry(SHARD, 2)}"] * (log_reader._LOOK_EVERY - 2) == b.line.requests
    b.line.requests.clear()
    a.propose(b"2")
    assert [b"1", b"2"] == b.follow()
    gets = [f"GET {names.entry(SHARD, index)}" for index in (2, 3)]
    assert [*gets, f"LIST {names.cuts(SHARD)}"] == b.line.requests
    b.line.requests.clear()
    assert Step.FENCE is b.log.reader.read(certain=True)
    assert [gets[1], f"LIST {names.cuts(SHARD)}"] == b.line.requests


def test_a_follower_whose_next_entry_was_truncated_begins_at_the_base(site: Any) -> None:
    """A follower whose next entry was deleted loads the base after some reads, or in a read with ``certain``."""
    a, b, c = site("a", epoch=1), site("b"), site("c")
    for follower in (b, c):
        follower.follow()
        follower.follow()
    a.propose(b"1", b"2")
    a.truncate()
    assert Step.FENCE is b.log.reader.read()
    assert Step.READ is b.log.reader.read(certain=True)
    assert [b"1", b"2"] == b.copy.changes
    reads = [c.log.reader.read() for _ in range(log_reader._LOOK_EVERY)]
    assert Step.READ in reads
    assert [b"1", b"2"] == c.copy.changes


def test_a_reader_takes_a_bounded_part_of_the_log(site: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """One read takes entries until their changes have the most bytes, so that a long log needs little memory."""
    monkeypatch.setattr(log_reader, "_MOST_BYTES", 100)
    a, b = site("a", epoch=1), site("b")
    a.propose(*[bytes(40)] * 7)
    applied = []
    while b.log.reader.read() is Step.READ:
        applied.append(len(b.copy.changes))
    assert [3, 6, 7] == applied[:3]


def test_a_replica_that_is_behind_a_base_reads_on_unless_the_log_was_cut(site: Any) -> None:
    """A replica behind the newest base keeps its state and reads the log, unless the log was truncated."""
    a, b = site("a", epoch=1), site("b")
    a.propose(b"1", b"2")
    head = names.base_head(SHARD, a.copy.progress.next)
    a.line.create(head, BASES.encode(head, Base(progress=a.copy.progress, site="a", parts=())))
    assert [b"1", b"2"] == b.follow()
    assert 0 == b.copy.bases


def test_a_site_with_a_lower_epoch_stops(site: Any) -> None:
    """A site can't take over with an epoch lower than one in the log, whether or not it has read that entry."""
    a, b = site("a", epoch=2), site("b")
    assert not b.log.take_over(1)
    b.follow()
    assert not b.log.take_over(1)
    a.truncate()
    assert not site("c").log.take_over(1)


def test_a_late_fence_of_a_lower_epoch_is_passed(site: Any) -> None:
    """A delayed fence with a lower epoch is void, and the owner continues after it."""
    a, b = site("a"), site("b", "late")
    b.line.commands.append(gate := Gate())
    thread = threading.Thread(target=b.log.take_over, args=(1,))
    thread.start()
    gate.reached()
    assert a.log.take_over(2)
    a.propose(b"1")
    stray = names.entry(SHARD, 2)
    head = msgspec.structs.replace(entries(a.line)[0].head, index=2, epoch=1, id=b"b", before=a.copy.progress.before)
    a.line.create(stray, encode_entry(SHARD, head, ())[1])
    a.propose(b"2")
    gate.open()
    thread.join()
    assert [b"1", b"2"] == a.copy.changes == site("c").follow()
    assert not b.log.owned


def test_releasing_writes_what_is_queued_and_lets_the_heir_in_at_once(site: Any) -> None:
    gate = Gate()
    a, b = site("a", "", gate, epoch=1), site("b")
    first = a.log.propose(b"1")
    gate.reached()
    second = a.log.propose(b"2")
    releasing = threading.Thread(target=a.log.release)
    releasing.start()
    gate.open()
    releasing.join()
    first.wait(LONG)
    second.wait(LONG)
    with pytest.raises(ShardMovedError, match="site a has released shard 3"):
        a.log.propose(b"3")
    assert [b"1", b"2"] == b.follow()
    assert may_suspect(b.log.reader.last(), 1, 0.0, 60.0)
    assert b.log.take_over(2)
    b.propose(b"4")
    assert [b"1", b"2", b"4"] == a.follow()


def test_no_answer_within_the_time_is_reported_and_the_change_goes_on(site: Any) -> None:
    gate = Gate()
    a = site("a", "", gate, epoch=1)
    change = a.log.propose(b"1")
    gate.reached()
    with pytest.raises(StorageUnavailableError, match="still on its way, and may be stored"):
        change.wait(0)
    gate.open()
    change.wait(LONG)
    assert [b"1"] == a.copy.changes


def test_a_silent_store_is_waited_for_once(site: Any) -> None:
    """After a wait timed out, changes are refused at once with the same reason, until the store has answered."""
    gate = Gate()
    a = site("a", "", "forbid", gate, epoch=1)
    a.log.check(1)
    change = a.log.propose(b"1")
    gate.reached()
    a.log.check(1)
    with pytest.raises(StorageUnavailableError, match="still on its way"):
        change.wait(0)
    for _ in range(2):
        with pytest.raises(StorageUnavailableError, match=r"for 0 s \(403 Forbidden\); nothing was queued"):
            a.log.check(1)
    gate.open()
    change.wait(LONG)
    a.log.check(1)
    a.propose(b"2")
    assert [b"1", b"2"] == a.copy.changes


def test_a_wait_that_ends_late_refuses_nothing(site: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """If the store has answered meanwhile, and only applying takes long, further changes are accepted."""
    gate = Gate()
    a = site("a", epoch=1)
    write = a.copy.write

    def waits(entry: Entry, local: LocalWrite) -> None:
        gate.pass_through()
        write(entry, local)

    monkeypatch.setattr(a.copy, "write", waits)
    change = a.log.propose(b"1")
    gate.reached()
    with pytest.raises(StorageUnavailableError):
        change.wait(0)
    a.log.check(1)
    gate.open()
    change.wait(LONG)


def test_a_full_queue_of_a_silent_store_is_waited_for_once(site: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """After a wait for space in the queue timed out, changes are refused at once, until the store has answered."""
    monkeypatch.setattr(log, "_MOST_QUEUED", 3 * CHANGE_OVERHEAD)
    gate = Gate()
    a = site("a", "", gate, epoch=1)
    changes = [a.log.propose(b"")]
    gate.reached()
    changes += [a.log.propose(b"") for _ in range(3)]
    with pytest.raises(LogFullError):
        a.log.check(0)
    with pytest.raises(StorageUnavailableError, match="nothing was queued"):
        a.log.wait_for_room(0, 0)
    with pytest.raises(StorageUnavailableError, match="has not taken queued changes for 0 s; nothing was queued"):
        a.log.check(0)
    gate.open()
    for change in changes:
        change.wait(LONG)
    a.log.check(0)


def test_the_reason_for_which_the_store_refuses_is_reported(site: Any) -> None:
    """While a store refuses, its reason is in the waiting caller's error and in `failure`, until it answers again."""
    gate = Gate()
    a = site("a", "", "forbid", gate, epoch=1)
    assert None is a.log.failure
    change = a.log.propose(b"1")
    gate.reached()
    with pytest.raises(StorageUnavailableError, match=r"for 0 s \(403 Forbidden\); the change is still on its way"):
        change.wait(0)
    assert "403 Forbidden" == a.log.failure
    gate.open()
    change.wait(LONG)
    assert None is a.log.failure


def test_a_log_that_is_closed_while_nothing_answers_fails_what_is_pending(store: Objects) -> None:
    """If the log is closed while the store doesn't answer, pending changes fail with an unknown outcome."""
    gate = Gate("drop")
    a = Site(store, "a", "", "drop", "drop", gate)
    assert a.log.take_over(1)
    change = a.log.propose(b"1")
    gate.reached()
    closing = threading.Thread(target=a.log.close)
    closing.start()
    a.log._stopping.wait(LONG)
    gate.open()
    closing.join()
    with pytest.raises(StorageUnavailableError, match=r"answered \(no answer\); the change may be stored"):
        change.wait(LONG)
    with pytest.raises(StorageUnavailableError):
        a.log.propose(b"2")


def test_a_shard_is_taken_over_once_at_a_time_and_not_after_the_close(site: Any) -> None:
    a = site("a", epoch=1)
    with pytest.raises(InvalidArgumentError, match="site a owns shard 3 already, with epoch 1"):
        a.log.take_over(2)
    a.log.close()
    with pytest.raises(ShardMovedError, match="site a has stopped writing shard 3"):
        a.log.propose(b"1")
    with pytest.raises(DatabaseClosedError):
        a.log.take_over(2)


def test_an_engine_that_fails_stops_the_log(site: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """If the local engine fails, the log raises its error and accepts no more changes."""
    a, b = site("a", epoch=1), site("b")

    def fail(_entry: Entry, _write: LocalWrite) -> None:
        raise OSError("the disk is full")

    monkeypatch.setattr(a.copy, "write", fail)
    with pytest.raises(OSError, match="the disk is full"):
        a.propose(b"1")
    with pytest.raises(OSError, match="the disk is full"):
        a.log.propose(b"2")
    assert [b"1"] == b.follow()


def test_a_damaged_entry_stops_who_reads_it(site: Any, store: Objects) -> None:
    a, b = site("a", epoch=1), site("b")
    a.propose(b"1", b"2")
    name = names.entry(SHARD, 1)
    store.objects[name] = store.objects[name][:-1]
    with pytest.raises(CorruptionError, match=f"memory:///: log entry {name}: the checksum"):
        b.follow()


def test_a_missing_entry_is_reported(site: Any, store: Objects) -> None:
    """A missing entry is an error, after the entries before it were applied."""
    a, b = site("a", epoch=1), site("b")
    a.propose(b"1", b"2", b"3")
    store.delete(names.entry(SHARD, 2))
    with pytest.raises(CorruptionError, match="log entry 2: it is missing"):
        b.follow()
    assert [b"1"] == b.copy.changes


def test_a_log_that_was_set_back_is_reported(site: Any, store: Objects) -> None:
    """A restarted site that has applied more entries than the log has raises an error."""
    a = site("a", epoch=1)
    a.propose(b"1", b"2")
    store.delete(names.entry(SHARD, 2))
    again = LogReader(store, SHARD, a.copy)
    with pytest.raises(CorruptionError, match="log entry 2: it was applied here and is gone"):
        again.read()


def test_a_cut_without_a_base_is_reported(site: Any) -> None:
    a = site("a")
    name = names.cut(SHARD, 4)
    a.line.create(name, CUTS.encode(name, Cut(site="b")))
    with pytest.raises(CorruptionError, match="the log is cut, and there is no base"):
        a.follow()


@pytest.mark.parametrize("seed", range(4))
def test_sites_that_depose_each_other_keep_what_must_hold(seed: int, tmp_path: Path) -> None:
    """Three sites on a real directory take over at random, truncate the log and lose answers, without data loss."""
    store = open_log_store(tmp_path.as_uri())
    chosen = random.Random(seed)
    commands = ["", "", "", "lose", "drop", "refuse", "late"]
    sites = [Site(store, name, *chosen.choices(commands, k=200)) for name in "abc"]
    epochs = iter(range(1, 100))
    lock, acknowledged = threading.Lock(), []

    def run(one: Site, mine: random.Random) -> None:
        for turn in range(20):
            with lock:
                epoch = next(epochs)
            if one.log.take_over(epoch):
                try:
                    for number in range(mine.randrange(1, 6)):
                        change = f"{one.name}{turn}.{number}".encode()
                        one.propose(change)
                        with lock:
                            acknowledged.append(change)
                    one.line.commands.clear()
                    if mine.random() < 0.4:
                        with lock:
                            one.truncate()
                except (ShardMovedError, ObjectExistsError):
                    pass
            one.line.commands.extend(mine.choices(commands, k=12))
            one.line.arrive()
            one.log.release()

    together(*(partial(run, one, random.Random(seed * 3 + at)) for at, one in enumerate(sites)))
    followers = [one.follow() for one in (*sites, Site(store, "new"))]
    assert all(found == followers[0] for found in followers)
    assert len(set(followers[0])) == len(followers[0])
    assert set(acknowledged) <= set(followers[0])
    assert acknowledged
    store.close()
