"""Queues: checkpoints, names, arguments and files. `DatabasePartsSuite` tests their messages."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import attrs
import numpy as np
import pytest
import topicstore as ts
from topicstore.queues import queue as queues


@pytest.fixture
def db(tmp_path: Path) -> Iterator[ts.Database]:
    with ts.open(tmp_path / "db", backend="memory") as opened:
        yield opened


def numbered(*numbers: int) -> list[ts.Message]:
    return [ts.Message(f"a/{number}", b"%d" % number, "me") for number in numbers]


def numbers(batch: queues.QueueBatch) -> list[int]:
    return [int(message.payload) for message in batch.messages]


# --- copies ---


def test_a_checkpoint_has_all_queues(tmp_path: Path) -> None:
    """A checkpoint contains open queues, without committed messages, and closed queues, but no partly created one."""
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
    """Listing queues that aren't open changes no file."""
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
    """Recording the ids of uncommitted messages in many small parts copies at most four times their total number."""
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


@pytest.mark.parametrize("upto", [-1, 1 << 64, 1.5, None, True])
def test_what_is_no_id_is_refused(db: ts.Database, upto: object) -> None:
    queue = db.queues.open("q")
    for call in (queue.commit, lambda one: queue.peek(after=one)):
        with pytest.raises(ts.InvalidArgumentError):
            call(upto)


# --- bounds ---


@pytest.mark.parametrize(
    "arguments", [{"max_messages": 0}, {"max_bytes": "1"}, {"overflow": "drop"}, {"name": ""}, {"name": "\ud800"}]
)
def test_bounds_and_names_that_are_none_are_refused(db: ts.Database, arguments: dict[str, object]) -> None:
    with pytest.raises(ts.InvalidArgumentError):
        db.queues.open(**{"name": "q", **arguments})  # type: ignore[arg-type]


# --- names, restarts, the disk ---

NAMES = ["q", "Q/ü", "..", ".", "a.b", "%41", "A", "x" * 60_000, "x" * 59_999, " ", "q\n", "\U0001f680" * 30]


@pytest.mark.parametrize("backend", ["memory", "rocksdb"])
def test_any_text_is_a_name(tmp_path: Path, backend: str) -> None:
    """Every string names a distinct queue, also in the file system and in listings."""
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
            # disk sizes are left out, because the engine's log grows
            assert one_by_one == [attrs.evolve(info, disk_bytes=0) for info in db.queues]
            with pytest.raises(ts.InvalidArgumentError, match="no queue 'another'"):
                db.queues["another"]
            for name in NAMES:
                assert [name[:9].encode()] == [message.payload for message in db.queues.open(name).read().messages]


def test_a_dropped_queue_is_gone(tmp_path: Path) -> None:
    """A dropped queue's files are deleted, whether it was open or not; a new queue of that name is empty."""
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
    """An interrupted drop hides the queue at once, and the next drop removes its files."""
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


def test_a_read_only_database_reads_queues(tmp_path: Path) -> None:
    """A database that is open for reading can read its queues as they were at opening, but not change them."""
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


def test_files_of_operating_systems_are_no_queues(tmp_path: Path) -> None:
    """Files such as ``.DS_Store`` are neither queues nor damage, but a queue without its manifest is damage."""
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


def test_a_commit_beyond_the_last_id_leaves_later_messages(db: ts.Database) -> None:
    """A commit up to an id beyond the last removes the queue's messages; messages appended later are read."""
    queue = db.queues.open("q")
    queue.append([ts.Message("a", b"1")])
    assert 1 == queue.commit(2**64 - 1)
    ids = queue.append([ts.Message("a", b"2")])
    assert ids == queue.read().ids
    assert 1 == len(queue)
