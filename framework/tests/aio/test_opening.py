"""Opening and closing: no thread, file or lock remains after a cancellation or an error."""

from __future__ import annotations

import asyncio
import gc
import threading
from pathlib import Path

import pytest
import topicstore as ts
import topicstore.opening
from topicstore.aio.opening import Opening
from topicstore.lifecycle.retention import Retention
from topicstore_conformance.conditions.skipping import need
from topicstore_conformance.faults.threads import PATIENCE, wait_until


def held() -> tuple[int, list[str]]:
    """Return the number of open files, and the names of the threads that topicstore has started."""
    gc.collect()
    threads = [thread.name for thread in threading.enumerate() if thread.name.startswith("topicstore")]
    return len(list(Path("/proc/self/fd").iterdir())) if Path("/proc/self/fd").exists() else 0, threads


def free(path: Path) -> bool:
    """Return whether the database exists and is not locked."""
    try:
        ts.open(path, "r+").close()
    except (ts.DatabaseLockedError, ts.DatabaseNotFoundError):
        return False
    return True


async def test_awaited_or_entered(tmp_path: Path) -> None:
    """A database is opened by awaiting it or by entering it, and may be closed twice."""
    need("leveldb")
    db = await ts.aopen(tmp_path / "db", backend="leveldb")
    await db.store([ts.Message("a", b"1")])
    await db.close()
    await db.close()
    async with ts.aopen(tmp_path / "db", "r") as view:
        assert view.read_only
        assert 1 == len([message async for message in view.replay("#")])
        await view.refresh()
        with pytest.raises(ts.ReadOnlyDatabaseError):
            await view.store([])
        assert [] == [session async for session in view.sessions]
    async with await ts.aopen(tmp_path / "db") as entered:
        assert entered.path == tmp_path / "db"


@pytest.mark.parametrize("backend", ["rocksdb", "leveldb", "memory"])
def test_nothing_stays_behind(tmp_path: Path, backend: str) -> None:
    """Closing leaves neither threads nor open files, even with writers, subscriptions and replays still open."""

    async def main() -> None:
        async with ts.aopen(tmp_path / "db", backend=backend) as db:
            writer, subscription = await db.writer(), await db.subscribe("#")
            await writer.put(ts.Message("a/b", b"1", "me"))
            await subscription.fetch()
            left = db.replay("#")
            await anext(left)
            await db.sessions.open("me", expiry_interval=None)
            await db.queues.open("q")
            await db.verify()
        with pytest.raises(ts.DatabaseClosedError):
            await db.info()
        for late in (writer, subscription):
            await late.close()

    need(backend)
    asyncio.run(main())  # this first run imports modules and fills caches
    before = held()
    asyncio.run(main())
    assert before == held()
    assert [] == before[1]


@pytest.mark.parametrize("settings", [{"backend": "nothing"}, {"mode": "r"}, {"shards": 0}])
def test_what_can_not_be_opened(tmp_path: Path, settings: dict[str, object]) -> None:
    """`aopen` raises the same error as `open`, and leaves no thread."""

    async def main() -> None:
        with pytest.raises(ts.TopicstoreError) as there:
            ts.open(tmp_path / "db", **settings)  # type: ignore[arg-type]
        with pytest.raises(type(there.value)):
            await ts.aopen(tmp_path / "db", **settings)  # type: ignore[arg-type]

    asyncio.run(main())
    wait_until(lambda: [] == held()[1], "the threads have ended")


def test_a_cancelled_opening_is_closed(tmp_path: Path) -> None:
    """A database whose opening was cancelled is closed once its opening has finished, and can then be opened again."""
    entered, gate = threading.Event(), threading.Event()

    def slow() -> ts.Database:
        entered.set()
        assert gate.wait(PATIENCE)
        return topicstore.opening.open(tmp_path / "db")

    async def main() -> None:
        opening = asyncio.ensure_future(_await(Opening(slow)))
        await asyncio.to_thread(entered.wait, PATIENCE)
        opening.cancel()
        with pytest.raises(asyncio.CancelledError):
            await opening
        gate.set()

    asyncio.run(main())
    wait_until(lambda: [] == held()[1], "the threads have ended")
    assert free(tmp_path / "db")


async def _await(opening: Opening) -> ts.AsyncDatabase:
    return await opening


def test_another_event_loop(tmp_path: Path) -> None:
    """Calls from another event loop are refused, because nothing would wake them; the first loop can still close."""
    with asyncio.Runner() as runner:
        db = runner.run(_await(ts.aopen(tmp_path / "db")))
        other = asyncio.new_event_loop()
        for call in (db.info, db.close):
            with pytest.raises(RuntimeError, match="another event loop"):
                other.run_until_complete(call())
        other.close()
        runner.run(db.store([ts.Message("a", b"1")]))
        runner.run(db.close())


def test_a_failed_opening_closes_all_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If opening fails while the retention settings are read, all opened files are closed."""
    ts.open(tmp_path / "db").close()
    with monkeypatch.context() as patch:
        patch.setattr(Retention, "settings", property(_fail))
        with pytest.raises(ts.EngineError, match="broken"):
            asyncio.run(_await(ts.aopen(tmp_path / "db")))
    assert free(tmp_path / "db")


def test_closing_beside_all_that_waits(tmp_path: Path) -> None:
    """Closing ends all waiting calls with an error; messages of stores that have returned are kept."""

    async def store(db: ts.AsyncDatabase, stored: list[int], number: int) -> None:
        await db.store([ts.Message("a", b"%d" % number)])
        stored.append(number)

    async def main() -> list[int]:
        stored: list[int] = []
        db = await ts.aopen(tmp_path / "db")
        subscription = await db.subscribe("never/#")
        waiting = [
            asyncio.create_task(subscription.fetch()),
            asyncio.create_task(db.sessions.wait()),
            asyncio.create_task(_all(db)),
        ]
        stores = [asyncio.create_task(store(db, stored, number)) for number in range(100)]
        await asyncio.wait(stores, return_when=asyncio.FIRST_COMPLETED)
        await asyncio.wait_for(db.close(), PATIENCE)
        results = await asyncio.wait_for(asyncio.gather(*waiting, *stores, return_exceptions=True), PATIENCE)
        assert all(isinstance(result, ts.DatabaseClosedError) for result in results[:2])
        assert all(result is None or isinstance(result, ts.DatabaseClosedError) for result in results[2:])
        return stored

    stored = asyncio.run(main())
    with ts.open(tmp_path / "db") as db:
        assert set(stored) <= {int(message.payload) for message in db.replay("#")}


async def _all(db: ts.AsyncDatabase) -> None:
    async for _ in db.replay("#"):
        pass


def test_an_error_in_the_block_closes_it(tmp_path: Path) -> None:
    """An error or a cancellation within the block closes the database, and is raised unchanged."""

    async def main() -> None:
        async with ts.aopen(tmp_path / "db"):
            raise KeyError("of the program")

    with pytest.raises(KeyError):
        asyncio.run(main())
    assert free(tmp_path / "db")


async def test_a_failing_engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An error of the engine is raised by the awaited calls concerned, and by no other call."""
    async with ts.aopen(tmp_path / "db", backend="memory") as db:
        engine = db.synchronous.storage.shards[0].writer.open_engine()
        with monkeypatch.context() as patch:
            patch.setattr(engine, "write", _fail)
            stores = [db.store([ts.Message("a", b"1")]) for _ in range(3)]
            results = await asyncio.gather(*stores, return_exceptions=True)
            assert all(isinstance(result, ts.TopicstoreError) for result in results)
        assert [] == [message async for message in db.replay("#")]


def _fail(*_: object, **__: object) -> None:
    raise ts.EngineError("broken")
