"""Queues: first in first out, bounded, durable, and whole after a kill."""

from __future__ import annotations

import tempfile
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import attrs
import numpy as np
import pytest
import topicstore as ts
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from topicstore.contract.errors import QuotaExceededError
from topicstore.queues import queue as queues
from topicstore.queues.queue import Overflow
from topicstore.storage.generations import generation_infos
from topicstore_conformance.conditions.profiles import MACHINE, tries
from topicstore_conformance.conditions.skipping import need
from topicstore_conformance.faults.clock import START, Clock
from topicstore_conformance.subjects.pairs import Pair, known

EMPTY = queues.QueueBatch(messages=[], ids=[])
RunUntil = Callable[..., list[tuple[str, int]]]


@pytest.fixture(params=["memory", "rocksdb"])
def db(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[ts.Database]:
    with ts.open(tmp_path / "db", backend=request.param, shards=2, clock=Clock()) as opened:
        yield opened


def numbered(*numbers: int) -> list[ts.Message]:
    return [ts.Message(f"a/{number}", b"%d" % number, "me") for number in numbers]


def numbers(batch: queues.QueueBatch) -> list[int]:
    return [int(message.payload) for message in batch.messages]


# --- copies ---


def test_a_checkpoint_has_all_queues(tmp_path: Path) -> None:
    """Those that are open, of which some is read and committed, those that aren't, and none that was never made."""
    with ts.open(tmp_path / "db") as db:
        db.queues.open("closed", max_messages=7).append(numbered(1, 2))
    with ts.open(tmp_path / "db") as db:
        queue = db.queues.open("open/ä")
        queue.commit(queue.append(numbered(3, 4, 5))[0])
        (tmp_path / "db" / "queues" / "begun").mkdir()
        db.checkpoint(tmp_path / "copy")
        queue.append(numbered(6))
        assert [1, 2] == numbers(db.queues.open("closed").read())
    with ts.open(tmp_path / "copy") as copy:
        assert [("closed", 2, 7), ("open/ä", 2, None)] == [(q.name, q.messages, q.max_messages) for q in copy.queues]
        assert [[1, 2], [4, 5]] == [numbers(copy.queues.open(name).read()) for name in ("closed", "open/ä")]
        assert copy.verify().ok


# --- listing ---


def test_listing_changes_nothing(tmp_path: Path) -> None:
    """Queues that aren't open are only read."""
    with ts.open(tmp_path / "db") as db:
        queue = db.queues.open("q")
        queue.commit(queue.append(numbered(1, 2, 3))[0])

    def files() -> dict[str, tuple[int, bytes]]:
        found = [path for path in (tmp_path / "db" / "queues").rglob("*") if path.is_file()]
        return {str(path): (path.stat().st_mtime_ns, path.read_bytes()) for path in found}

    with ts.open(tmp_path / "db") as db:
        before = files()
        assert [("q", 2)] == [(info.name, info.messages) for info in db.queues]
        assert 2 == db.queues["q"].messages
        assert before == files()


def test_much_that_is_not_committed_is_copied_seldom(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reading all of a queue in small parts copies no more than a few times what it has."""
    copied: list[int] = []

    def concatenate(arrays: Sequence[Any], _concatenate: Any = np.concatenate) -> Any:
        copied.append(len(arrays[0]))
        return _concatenate(arrays)

    monkeypatch.setattr(queues.np, "concatenate", concatenate)
    known, parts, size = queues._Known(), 1_000, 10
    for part in range(parts):
        known.add(np.arange(part * size, (part + 1) * size, dtype=np.uint64), np.ones(size, np.int64))
    assert (parts * size, parts * size) == (len(known), known.size(parts * size))
    assert sum(copied) <= 4 * parts * size


# --- in and out ---


def test_peeking_leaves_the_place_of_reading(db: ts.Database) -> None:
    """What follows an id, or the head if that is further."""
    queue = db.queues.open("q")
    ids = queue.append(numbered(1, 2, 3, 4))
    assert [1] == numbers(queue.read(1))
    assert [1, 2] == numbers(queue.peek(2))
    assert [3, 4] == numbers(queue.peek(after=ids[1]))
    assert EMPTY == queue.peek(after=ids[3])
    assert [2] == numbers(queue.read(1))
    queue.commit(ids[2])
    assert [4] == numbers(queue.peek(after=ids[0]))
    for wrong in (-1, 1 << 64):
        with pytest.raises(ts.InvalidArgumentError):
            queue.peek(after=wrong)


def test_messages_come_out_whole_and_in_order(db: ts.Database) -> None:
    """All fields, of any topic; the time is that of appending where they had none; the database has none of them."""
    queue = db.queues.open("to the cloud")
    properties = ts.Properties(correlation_data=b"\0", user_properties=(("a", "b"),))
    rows = [
        ts.Message("$SYS/x", b"", "é", 2, True, 7, properties),
        ts.Message("a" * 65_535, b"\xff" * 1_000, "c" * 65_535, 1, True, 8, None),
        ts.Message("/", b"1", "", 0, False, START, None),
    ]
    ids = queue.append([*rows[:2], ts.Message("/", b"1")])
    assert sorted(ids) == ids
    batch = queue.read()
    assert (rows, ids) == (batch.messages, batch.ids)
    assert [] == list(db.replay("#"))


def test_committing_is_idempotent(db: ts.Database) -> None:
    """Ids that were committed, or never were, remove what lies up to them and no more; none need have been read."""
    queue = db.queues.open("q")
    ids = queue.append(numbered(*range(5)))
    assert [0, 2, 0, 0] == [queue.commit(one) for one in (0, ids[1], ids[0], ids[1])]
    assert [2, 3, 4] == numbers(queue.read())
    assert [2, 1, 0] == [queue.commit(one) for one in (ids[4] - 1, 2**64 - 1, 2**64 - 1)]
    assert (0, 0) == (len(queue), queue.bytes)


@pytest.mark.parametrize("upto", [-1, 1 << 64, 1.5, None, True])
def test_what_is_no_id_is_refused(db: ts.Database, upto: object) -> None:
    with pytest.raises(ts.InvalidArgumentError):
        db.queues.open("q").commit(upto)  # type: ignore[arg-type]


def test_bad_messages_are_refused_whole(db: ts.Database) -> None:
    queue = db.queues.open("q")
    with pytest.raises(ts.InvalidMessageError) as refused:
        queue.append([*numbered(1), ts.Message("#", b"")])
    assert (1, 0) == (refused.value.index, len(queue))
    assert [] == queue.append([])


# --- bounds ---


def test_bounds_that_are_not_named_stay_and_none_lifts_one(db: ts.Database) -> None:
    """Whoever opens a queue again need not know how it is bounded."""
    queue = db.queues.open("q", max_messages=2, max_bytes=1_000, overflow="drop_newest")
    assert queue is db.queues.open("q")
    queue.append([ts.Message("a", b"")] * 3)
    assert 2 == len(queue)
    db.queues.open("q", max_messages=None, overflow="refuse")
    queue.append([ts.Message("a", b"")] * 3)
    assert 5 == len(queue)
    with pytest.raises(QuotaExceededError):
        queue.append([ts.Message("a", bytes(1_000))])


@pytest.mark.parametrize(
    "arguments", [{"max_messages": 0}, {"max_bytes": "1"}, {"overflow": "drop"}, {"name": ""}, {"name": "\ud800"}]
)
def test_bounds_and_names_that_are_none_are_refused(db: ts.Database, arguments: dict[str, object]) -> None:
    with pytest.raises(ts.InvalidArgumentError):
        db.queues.open(**{"name": "q", **arguments})  # type: ignore[arg-type]


class QueueModel(RuleBasedStateMachine):
    """A queue against a list, with reopening."""

    @initialize(
        overflow=st.sampled_from(["refuse", "drop_oldest", "drop_newest"]),
        most=st.none() | st.integers(1, 12),
        most_bytes=st.none() | st.integers(10, 200),
    )
    def begin(self, overflow: Overflow, most: int | None, most_bytes: int | None) -> None:
        self.directory = tempfile.TemporaryDirectory()
        self.db = ts.open(Path(self.directory.name) / "db", layout="reference")
        self.queue = self.db.queues.open("q", max_messages=most, max_bytes=most_bytes, overflow=overflow)
        self.overflow, self.most, self.most_bytes = overflow, most or 10**9, most_bytes or 10**9
        self.held: deque[tuple[int, bytes]] = deque()
        self.read_upto = self.dropped = 0

    def over(self) -> bool:
        size = sum(6 + len(payload) for _, payload in self.held)
        return len(self.held) > self.most or size > self.most_bytes

    @rule(sizes=st.lists(st.integers(0, 31), min_size=1, max_size=6))
    def append(self, sizes: list[int]) -> None:
        before = list(self.held)
        payloads = [bytes(size) for size in sizes]
        taken, self.held = self.model_append(payloads)
        try:
            ids = self.queue.append([ts.Message("t", payload) for payload in payloads])
        except QuotaExceededError:
            assert self.overflow == "refuse"
            assert taken is None
            self.held = deque(before)
            return
        assert taken is not None
        assert taken == len(ids)
        new = [self.held.pop() for _ in range(taken)][::-1]
        self.held.extend((one, payload) for one, (_, payload) in zip(ids, new, strict=True))

    def model_append(self, payloads: list[bytes]) -> tuple[int | None, deque[tuple[int, bytes]]]:
        """Return how many are taken (None: refused), and what is held then."""
        old = list(self.held)
        for payload in payloads:
            if self.overflow == "drop_oldest" and 6 + len(payload) > self.most_bytes:
                continue
            self.held.append((0, payload))
            if self.overflow == "drop_newest" and self.over():
                self.held.pop()
                break
        if self.overflow == "refuse":
            return (None if self.over() else len(payloads)), self.held
        while self.over():
            self.held.popleft()
        taken = min(len(payloads), sum(one == 0 for one, _ in self.held))
        self.dropped += len(old) + len(payloads) - len(self.held)
        return taken, self.held

    @rule(limit=st.integers(1, 8))
    def read(self, limit: int) -> None:
        expected = [(one, payload) for one, payload in self.held if one > self.read_upto][:limit]
        batch = self.queue.read(limit)
        assert expected == list(zip(batch.ids, (message.payload for message in batch.messages), strict=True))
        self.read_upto = expected[-1][0] if expected else self.read_upto

    @rule(share=st.floats(0, 1))
    def commit(self, share: float) -> None:
        count = int(len(self.held) * share)
        upto = self.held[count - 1][0] if count else 0
        assert count == self.queue.commit(upto)
        for _ in range(count):
            self.held.popleft()
        self.read_upto = max(self.read_upto, upto)

    @rule(reopened=st.booleans())
    def begin_anew(self, reopened: bool) -> None:
        """Go back to the first that was not committed; so does another opening, with the same bounds and counters."""
        if reopened:
            self.db.close()
            self.db = ts.open(self.db.path)
            self.queue = self.db.queues.open("q")
        else:
            self.queue.rewind()
        self.read_upto = 0

    @invariant()
    def counts(self) -> None:
        if hasattr(self, "queue"):
            size = sum(6 + len(payload) for _, payload in self.held)
            assert (len(self.held), size, self.dropped) == (len(self.queue), self.queue.bytes, self.queue.dropped)

    def teardown(self) -> None:
        if hasattr(self, "db"):
            self.db.close()
            self.directory.cleanup()


TestQueueModel = QueueModel.TestCase
TestQueueModel.settings = settings(MACHINE, max_examples=tries(50, 100), stateful_step_count=20)


# --- names, restarts, the disk ---

NAMES = ["q", "Q/ü", "..", ".", "a.b", "%41", "A", "x" * 60_000, "x" * 59_999, " ", "q\n", "\U0001f680" * 30]


@pytest.mark.parametrize("backend", ["memory", "rocksdb"])
def test_any_text_is_a_name(tmp_path: Path, backend: str) -> None:
    """Each is a queue of its own, also for the file system, and is listed by its name."""
    with ts.open(tmp_path / "db", backend=backend) as db:
        for name in NAMES:
            db.queues.open(name).append([ts.Message("a", name[:9].encode())])
            assert db.queues.open(name) is db.queues.open(name)
        assert sorted(NAMES) == [info.name for info in db.queues]
    if backend == "rocksdb":
        assert {"db"} == {path.name for path in tmp_path.iterdir()}
        with ts.open(tmp_path / "db") as db:
            assert sorted(NAMES) == [info.name for info in db.queues]
            assert len(NAMES) == len(db.queues)
            one_by_one = [attrs.evolve(db.queues[name], disk_bytes=0) for name in sorted(NAMES)]
            assert one_by_one == [attrs.evolve(info, disk_bytes=0) for info in db.queues]  # the engine's log grows
            with pytest.raises(ts.InvalidArgumentError, match="no queue 'another'"):
                db.queues["another"]
            for name in NAMES:
                assert [name[:9].encode()] == [message.payload for message in db.queues.open(name).read().messages]


@pytest.mark.parametrize("pair", known("persistent"), ids=str)
def test_it_goes_on_after_a_restart(tmp_path: Path, pair: Pair) -> None:
    """At the first that was not committed, with its bounds and counters, on every backend and layout."""
    need(pair)
    with pair.open(tmp_path / "db", shards=2) as db:
        queue = db.queues.open("q", max_messages=6, overflow="drop_oldest")
        queue.append(numbered(*range(8)))
        assert 2 == queue.commit(queue.read(2).last)
        info = queue.info()
    with pair.open(tmp_path / "db") as db:
        queue = db.queues.open("q")
        assert (4, 2, 6, None, "drop_oldest") == (
            len(queue),
            queue.dropped,
            info.max_messages,
            info.max_bytes,
            info.overflow,
        )
        assert info == attrs.evolve(queue.info(), disk_bytes=info.disk_bytes)
        assert [4, 5, 6] == numbers(queue.read(3))
        queue.append(numbered(8, 9, 10))
        assert [7, 8, 9, 10] == numbers(queue.read())
        queue.rewind()
        assert [5, 6, 7, 8, 9, 10] == numbers(queue.read())


def test_the_disk_comes_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """However much passes through, only what waits is kept, and a generation or two."""
    monkeypatch.setattr("topicstore.queues.queue._GENERATION_BYTES", 100_000)
    with ts.open(tmp_path / "db") as db:
        queue = db.queues.open("q")
        rows = [ts.Message("a", n.to_bytes(2, "big") * 500) for n in range(50)]
        for _ in range(100):
            queue.append(rows)
            queue.commit(queue.read(30).last)
            queue.commit(queue.read(20).last)
            assert sum(one.live_bytes for one in generation_infos(queue._storage)) < 300_000
            assert len(generation_infos(queue._storage)) <= 3
        assert 0 == len(queue)
        queue.append(rows[:1])
        assert rows[0].payload == queue.read().messages[0].payload
        assert [] == queue.damages()


def test_a_dropped_queue_is_gone(tmp_path: Path) -> None:
    """With its files, whether it was open or not; one made anew is empty."""
    with ts.open(tmp_path / "db") as db:
        for name in ("open", "closed", "other"):
            db.queues.open(name).append(numbered(1))
    with ts.open(tmp_path / "db") as db:
        held = db.queues.open("open")
        assert [True, True, False, False] == [db.queues.drop(name) for name in ("open", "closed", "open", "none")]
        with pytest.raises(ts.DatabaseClosedError):
            held.append(numbered(2))
        assert ["other"] == [path.name for path in (tmp_path / "db" / "queues").iterdir()]
        assert 0 == len(db.queues.open("open"))


def test_a_drop_that_was_interrupted_is_finished(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The queue is gone at once; the next drop removes what is left of it."""
    with ts.open(tmp_path / "db") as db:
        db.queues.open("a").append(numbered(1))
        monkeypatch.setattr(
            "topicstore.queues.queues.shutil.rmtree", lambda _: (_ for _ in ()).throw(KeyboardInterrupt)
        )
        with pytest.raises(KeyboardInterrupt):
            db.queues.drop("a")
        monkeypatch.undo()
        assert [] == list(db.queues)
        assert 0 == len(db.queues.open("a"))
        assert db.queues.drop("a")
        assert [] == list((tmp_path / "db" / "queues").iterdir())


def test_they_are_closed_with_their_database(tmp_path: Path) -> None:
    with ts.open(tmp_path / "db") as db:
        queue = db.queues.open("q")
    for call in (queue.read, queue.info, lambda: queue.append(numbered(1)), lambda: db.queues.open("q")):
        with pytest.raises(ts.DatabaseClosedError):
            call()


def test_who_only_reads_looks_into_queues(tmp_path: Path) -> None:
    """As they were when it opened them; it makes, empties, changes and drops none."""
    with ts.open(tmp_path / "db") as db:
        db.queues.open("q").append(numbered(1, 2, 3))
        with ts.open(tmp_path / "db", mode="r") as view:
            queue = view.queues.open("q")
            db.queues.open("q").append(numbered(1))
            assert [1, 2, 3] == numbers(queue.read())
            assert ["q"] == [info.name for info in view.queues]
            for call in (
                lambda: queue.append(numbered(1)),
                lambda: queue.commit(1 << 63),
                lambda: view.queues.open("q", max_messages=1),
                lambda: view.queues.open("another"),
                lambda: view.queues.drop("q"),
            ):
                with pytest.raises(ts.ReadOnlyDatabaseError):
                    call()
    with ts.open(tmp_path / "db") as db:
        assert [1, 2, 3, 1] == numbers(db.queues.open("q").read())


def test_plugins_see_what_is_queued(tmp_path: Path, reversing: str) -> None:
    """An encrypting plugin of the database keeps queued topics and payloads from the disk."""
    message = ts.Message("secret topic", b"secret payload", "secret client", timestamp=1)
    with ts.open(tmp_path / "db", plugins=[reversing]) as db:
        db.queues.open("q").append([message])
        db.queues.open("q")._storage.flush()
    files = [path.read_bytes() for path in (tmp_path / "db").rglob("*") if path.is_file()]
    assert not any(b"secret" in content for content in files)
    with ts.open(tmp_path / "db") as db:
        assert [message] == db.queues.open("q").read().messages


# --- kills ---

APPENDING = """
import topicstore as ts, topicstore.queues.queue
topicstore.queues.queue._GENERATION_BYTES = 20_000
path, number = arguments
counts(RocksdbEngine, "write")
db = ts.open(path)
queue = db.queues.open("q", max_messages=2_000, overflow="drop_oldest")
while True:
    queue.append([ts.Message("a", b"%d " % n + bytes(50), "me") for n in range(number, number + 7)])
    number += 7
    say("appended", number)
    if number % 5 == 0:
        read = queue.read(25)
        queue.commit(read.last)
        say("committed", int(read.messages[-1].payload.split()[0]) + 1)
"""


@pytest.mark.parametrize("moment", ["before", "after"])
def test_killed_at_any_moment_it_holds_what_it_said(tmp_path: Path, run_until: RunUntil, moment: str) -> None:
    """All that was appended and not committed, in order, and its counters are right."""
    appended = committed = 0
    for write in (150, 4, 9, 13, 400):
        for what, number in run_until((write, moment), APPENDING, tmp_path / "db", appended):
            appended, committed = (number, committed) if what == "appended" else (appended, number)
        with ts.open(tmp_path / "db") as db:
            queue = db.queues.open("q")
            messages = [message for batch in iter(queue.read, EMPTY) for message in batch.messages]
            found = [int(message.payload.split()[0]) for message in messages]
            assert list(range(found[0], found[-1] + 1)) == found
            assert found[-1] + 1 in (appended, appended + 7)
            assert committed <= found[0] <= committed + 25
            assert (len(found), sum(len(message.payload) + 8 for message in messages)) == (
                len(queue),
                queue.bytes,
            )
            assert [] == queue.damages()
            appended = found[-1] + 1
    assert appended > 1_000


def test_files_of_operating_systems_are_no_queues(tmp_path: Path) -> None:
    """They are neither listed nor called damage, and stay; a queue that lost its files is damage."""
    with ts.open(tmp_path / "db") as db:
        for name in ("a", "x" * 300, "lost+found"):
            db.queues.open(name).append([ts.Message("t", b"1")])
    directory = tmp_path / "db" / "queues"
    for name in (".DS_Store", "Thumbs.db", "README"):
        (directory / name).write_bytes(b"1")
    for name in ("lost+found", "@eaDir", "__MACOSX", ".Trash-1000"):
        (directory / name).mkdir()
        (directory / name / "._a").write_bytes(b"1")
    with ts.open(tmp_path / "db") as db:
        assert ["a", "lost+found", "x" * 300] == [queue.name for queue in db.queues]
        assert db.verify().ok
        assert db.queues.drop("lost+found")
        assert 2 == len(db.queues)
    (directory / "a" / "topicstore.json").unlink()
    with ts.open(tmp_path / "db") as db:
        assert not db.verify().ok
    assert 7 + 2 == len(list(directory.iterdir()))
