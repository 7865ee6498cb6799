"""Ctrl-C within calls of the main thread: other threads' calls, and closing the database, still finish."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import signal
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import attrs
import pytest
import topicstore as ts
from topicstore.sessions import Publish, Session
from topicstore_conformance.faults.steps import Handler
from topicstore_conformance.faults.threads import PATIENCE, begin

MESSAGES = [ts.Message(f"a/{number}", b"1", f"c{number}", qos=1) for number in range(4)]
"""Messages for both shards."""


LEAVING = {"__exit__", "guarded", "leave", "release", "retake", "_release", "_give_back"}
"""Functions that release a lock, or call functions that do."""


@attrs.frozen
class Scene:
    """An open database with a session for the main thread and one for another thread, both with messages to deliver."""

    db: ts.Database
    mine: Session
    other: Session
    folder: Path


def subscribe(scene: Scene) -> None:
    scene.mine.subscribe("b/#", qos=1)
    scene.mine.subscribe("$share/g/b/#", qos=1)
    scene.mine.unsubscribe("b/#")


def deliver(scene: Scene) -> None:
    packets = scene.mine.deliver()
    scene.mine.puback(*[one.packet_id for one in packets if isinstance(one, Publish) and one.packet_id is not None])
    scene.mine.checkpoint()


def deliver_to_all(scene: Scene) -> None:
    assert scene.db.sessions.wait(0)
    scene.db.sessions.deliver()
    scene.db.sessions.checkpoint()


def publish(scene: Scene) -> None:
    sent = [ts.Message("a/1", b"2", "mine", qos=1), ts.Message("a/2", b"2", "mine", qos=2)]
    scene.mine.publish(sent, [5, 6])
    scene.mine.pubrel(6)


def connect(scene: Scene) -> None:
    sessions = scene.db.sessions
    sessions.open("new", expiry_interval=60).disconnect()
    sessions.open("mine", expiry_interval=60).lost()
    sessions.open("new", expiry_interval=60, will=ts.sessions.Will(ts.Message("w", b"", "new"))).checkpoint()
    sessions.kick("new")
    sessions.expire("mine")


def look(scene: Scene) -> None:
    sessions = scene.db.sessions
    list(sessions)
    len(sessions.groups)
    sessions.lag()
    sessions.tick()
    scene.mine.lag()


def close_sessions(scene: Scene) -> None:
    scene.db.sessions.close()


def queue(scene: Scene) -> None:
    waiting = scene.db.queues.open("q", max_messages=30)
    waiting.append(MESSAGES)
    waiting.commit(waiting.read(2).ids[-1])
    scene.db.queues.drop("q")


def follow(scene: Scene) -> None:
    with scene.db.subscribe("#", 0, window=100) as followed:
        scene.db.publish(MESSAGES)
        followed.acknowledge(followed.fetch(timeout=0).sequence)


def write(scene: Scene) -> None:
    with scene.db.writer(max_items=2) as writer:
        for message in MESSAGES:
            writer.put(message)


def retain(scene: Scene) -> None:
    db = scene.db
    db.publish([ts.Message("r", b"1", "c", retain=True)])
    db.retained("#")
    db.retention.set(max_age=1_000_000)
    db.retention.run()
    db.add_generation()
    db.delete("a/1")
    db.drop_generation(db.generations()[0].number)


def archive(scene: Scene) -> None:
    db = scene.db
    db.add_generation()
    db.archives.export(scene.folder / "exports")
    db.archives.archive(scene.folder / "exports")


def aio(scene: Scene) -> None:
    async def run() -> None:
        async with ts.aopen(scene.folder / "aio", backend="memory") as db:
            await db.store(MESSAGES)
            session = await db.sessions.open("mine", expiry_interval=60)
            await session.subscribe("a/#", qos=1, start=0)
            await session.deliver()
            async with db.subscribe("#", 0) as followed:
                await followed.fetch()

    asyncio.run(run())


CALLS = [
    subscribe,
    deliver,
    deliver_to_all,
    publish,
    connect,
    look,
    close_sessions,
    queue,
    follow,
    write,
    retain,
    archive,
    aio,
]


def others(scene: Scene) -> None:
    """Use all parts of a database, as other threads do; parts that the interrupted call has closed may raise."""
    db = scene.db

    def serve() -> None:
        session = db.sessions.open("other", expiry_interval=60)
        session.subscribe("a/#", qos=1)
        db.publish(MESSAGES)
        packets = session.deliver()
        session.puback(*[one.packet_id for one in packets if isinstance(one, Publish) and one.packet_id is not None])
        session.publish([ts.Message("x", b"", "other", qos=2)], [1])
        db.sessions.tick()

    def work() -> None:
        db.store(MESSAGES)
        waiting = db.queues.open("r")
        waiting.append(MESSAGES)
        with db.subscribe("#", 0) as followed:
            followed.fetch(timeout=0)
        with db.writer() as writer:
            writer.put(MESSAGES[0])
        db.add_generation()
        list(db.replay("#"))

    for one in (serve, work):
        with contextlib.suppress(ts.TopicstoreError, RuntimeError):
            one()


@pytest.fixture(name="staged")
def _staged(tmp_path: Path) -> Iterator[Callable[[], Scene]]:
    numbers = iter(range(1_000_000))
    before = signal.signal(signal.SIGINT, signal.default_int_handler)

    def staged() -> Scene:
        folder = tmp_path / f"{next(numbers)}"
        db = ts.open(folder / "db", backend="memory", shards=2)
        mine, other = (db.sessions.open(name, expiry_interval=60) for name in ("mine", "other"))
        for session in (mine, other):
            session.subscribe("a/#", qos=1)
        db.publish(MESSAGES)
        return Scene(db, mine, other, folder)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)  # for subscriptions that were interrupted while being created;
        warnings.simplefilter("ignore", RuntimeWarning)  # for coroutines that were never awaited
        yield staged
    signal.signal(signal.SIGINT, before)


def close(db: ts.Database) -> None:
    with contextlib.suppress(ts.TopicstoreError):
        db.close()


def interrupted_in_a_loop() -> None:
    """Interrupt a step if the SIGINT handler of `asyncio.run`, which cancels the task, is installed.

    Steps of asyncio's own code aren't interrupted. There, an interrupt may lose the wake-up of a task, for which
    `asyncio.run` then waits for ever.
    """
    interrupted = sys._getframe(2).f_globals.get("__name__", "")
    if signal.getsignal(signal.SIGINT) is not signal.default_int_handler and not interrupted.startswith("asyncio"):
        signal.raise_signal(signal.SIGINT)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("most", [pytest.param(10, id="some"), pytest.param(100_000, id="all", marks=pytest.mark.slow)])
@pytest.mark.parametrize("call", CALLS)
def test_an_interrupted_call_blocks_no_other(
    staged: Callable[[], Scene], call: Callable[[Scene], Any], most: int
) -> None:
    """Wherever Ctrl-C interrupts a call, other threads' calls and closing the database finish.

    The raised error is referenced meanwhile, as an interactive interpreter references the last error.
    """
    counting = Handler(lambda: None)
    for run in (lambda work: work(), counting.run):  # the first run does one-time work, and is not traced
        scene = staged()
        run(lambda scene=scene: call(scene))
        close(scene.db)
    interrupt = interrupted_in_a_loop if call is aio else lambda: signal.raise_signal(signal.SIGINT)
    steps = list(counting.kinds.values())
    assert len(steps) > 30
    leaving = [step for kind, step in counting.kinds.items() if LEAVING.intersection(".".join(kind[1:]).split("."))]
    for step in sorted({*steps[:: max(len(steps) // most, 1)], *leaving[:: max(len(leaving) // most, 1)]}):
        scene, kept = staged(), None
        try:
            Handler(interrupt, step).run(lambda scene=scene: call(scene))  # type: ignore[misc]
        # `threading.Condition` itself may raise RuntimeError. `asyncio.run` raises CancelledError if the signal arrives
        # after it has installed its handler and before it resets its count of interrupts.
        except (KeyboardInterrupt, RuntimeError, asyncio.CancelledError) as error:
            kept = error  # so that its frames, and all objects in them, stay alive, as in an interactive interpreter
        begin(lambda scene=scene: others(scene)).result(PATIENCE)  # type: ignore[misc]
        begin(lambda scene=scene: close(scene.db)).result(PATIENCE)  # type: ignore[misc]
        del kept
    # An interrupt within asyncio's own closing leaves an event loop open. Its warning must not come in a later test.
    gc.collect()
