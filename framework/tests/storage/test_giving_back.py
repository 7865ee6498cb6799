"""If opening, using or closing a database fails, nothing is left open, and the database can be opened again."""

from __future__ import annotations

import contextlib
import errno
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, Self

import attrs
import pytest
import topicstore as ts
from topicstore.plugins import registry
from topicstore_conformance.backend.leaks import open_files
from topicstore_conformance.conditions.skipping import need
from topicstore_conformance.conditions.tries import full, tries

pytestmark = pytest.mark.slow

SYSTEM = frozenset(
    (
        "fsync",
        "ftruncate",
        "flock",
        "listdir",
        "mkdir",
        "open",
        "pwrite",
        "rename",
        "replace",
        "scandir",
        "stat",
        "unlink",
        "write",
    )
)
"""System calls that the test makes fail before they do anything."""
GIVES_BACK = frozenset(
    ("_close", "_unlock", "abandon", "close", "detach", "join", "release", "stop", "topicstore_closed", "on_end")
)
"""Functions that release something; the test makes them fail after they have done it."""
MAKES = frozenset(
    (
        "CompactionScheduler.__init__",
        "CountingScheduler.__init__",
        "Database.__init__",
        "Hub.__init__",
        "Noting.topicstore_opened",
        "Queue.__init__",
        "Shard.__init__",
        "Storage.__init__",
        "Subscription.__init__",
        "check_identity",
        "complete_generations",
    )
)
"""Functions that the test makes fail before they do anything; all public methods of engines belong to them, too."""
WAITS = "call of Calls.end"
"""The step in which closing an engine waits for calls in it. The test interrupts it, but doesn't make it fail."""
ROOT = Path(__file__).parents[3]
OURS = tuple(str(ROOT / part) for part in ("framework/topicstore", "backends/topicstore_backends", "framework/tests"))
ENGINES = str(ROOT / "backends" / "topicstore_backends")
PAYLOADS = [b"1", b"2"]


@attrs.define
class Faults:
    """A profiler that counts steps and makes one fail: a system call, an engine call, or the release of a resource."""

    failing: int | None = None
    """Index of the step that fails, from 0; None if none fails."""
    interrupting: bool = False
    """Whether the step raises `KeyboardInterrupt` instead of an error."""
    steps: list[str] = attrs.field(factory=list)
    """The steps so far; after a failure, up to the one that failed."""

    def __enter__(self) -> Self:
        sys.setprofile(self._profile)
        return self

    def __exit__(self, *_: object) -> None:
        sys.setprofile(None)

    def _profile(self, frame: FrameType, event: str, argument: Any) -> None:
        if event == "c_call":
            name = argument.__name__
            if name in SYSTEM:
                self._step(f"{name}()", OSError(errno.ENOSPC, "No space left on device"))
        elif event in ("call", "return") and frame.f_code.co_filename.startswith(OURS):
            code = frame.f_code
            if event == ("return" if code.co_name in GIVES_BACK else "call") and _is_step(code):
                self._step(f"{event} of {code.co_qualname}", ts.EngineError("it fails here"))

    def _step(self, what: str, error: Exception) -> None:
        self.steps.append(what)
        if self.failing == len(self.steps) - 1:
            if what == WAITS and not self.interrupting:
                self.failing += 1  # this step isn't in every run, so the next step fails instead
                return
            sys.setprofile(None)
            raise KeyboardInterrupt if self.interrupting else error


def _is_step(code: CodeType) -> bool:
    """Return whether a function of the product is a step that can fail."""
    if code.co_name in GIVES_BACK:
        return code.co_name != "close" or "Scan" not in code.co_qualname
    engine = code.co_filename.startswith(ENGINES) and not code.co_name.startswith("_") and "." in code.co_qualname
    return engine or code.co_qualname in MAKES


class Noting:
    """A plugin with hooks for opening and closing."""

    @ts.hookimpl
    def topicstore_opened(self, db: object) -> None:
        """Do nothing."""

    @ts.hookimpl
    def topicstore_closed(self, db: object) -> None:
        """Do nothing."""


@pytest.fixture(autouse=True)
def _plugin(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(registry().plugins, "noting", Noting())


def live(path: Path, backend: str, opened: list[ts.Database]) -> None:
    """Open a database, use all its features, and close it."""
    with ts.open(path, backend=backend, shards=2, plugins=["noting"]) as db:
        opened.append(db)
        with db.subscribe("#"), db.writer() as writer:
            db.sessions.open("me", on_end=lambda *_: None).subscribe("a/#")
            db.queues.open("q").append([ts.Message("a", b"q")])
            writer.put(ts.Message("a/b", b"w"))
            db.publish([ts.Message("a/b", payload, "p") for payload in PAYLOADS])


def chosen(steps: Sequence[str]) -> list[int]:
    """Return the indexes of steps to fail: of each kind of step the first and the last, or more in a long run."""
    numbers: dict[str, list[int]] = {}
    for number, what in enumerate(steps):
        numbers.setdefault(what, []).append(number)
    most = tries(1, 3)
    return sorted({one for same in numbers.values() for one in (*same[:most], same[-1])})


FILES = pytest.mark.skipif(not Path("/proc/self/fd").is_dir(), reason="there is no /proc/self to count files in")


@FILES
@pytest.mark.parametrize("backend", ["rocksdb", "leveldb", pytest.param("duckdb", marks=full)])
@pytest.mark.parametrize("made", ["anew", "before"])
def test_every_failure_releases_everything(tmp_path: Path, backend: str, made: str) -> None:
    """After any failure, the same process can open the database again at once, and no thread or file is left.

    That also holds while the caller keeps the error, whose traceback refers to frames and their objects.
    """
    need(backend)
    live(tmp_path / "there", backend, [])
    with Faults() as counting:
        live(tmp_path / ("counted" if made == "anew" else "there"), backend, [])
    assert len(counting.steps) > 50
    threads = set(threading.enumerate())
    for step in chosen(counting.steps):
        directory, opened, held = tmp_path / (f"{step}" if made == "anew" else "there"), [], None
        with Faults(step) as faults:
            try:
                live(directory, backend, opened)
            except (ts.TopicstoreError, OSError, ExceptionGroup) as failure:
                held = failure  # keeps the traceback with its frames, and so their objects
        what = f"step {step}, {faults.steps[-1]}: {held!r}"
        assert set(threading.enumerate()) <= threads, what
        assert open_files(tmp_path) == [], what
        for db in opened:
            db.close()  # must not raise after the failure
        with ts.open(directory, backend=backend, shards=2, plugins=["noting"]) as db:
            db.store([ts.Message("a", b"")])
            assert db.queues.open("q").info().name == "q"


@FILES
@pytest.mark.parametrize("backend", ["rocksdb", "leveldb", "duckdb"])
@pytest.mark.parametrize("interrupting", [False, True])
def test_a_close_that_failed_is_finished_by_the_next(tmp_path: Path, backend: str, interrupting: bool) -> None:
    """After a failed or interrupted close, the next close releases the rest without an error or loss of messages."""
    need(backend)

    def stored(directory: Path) -> ts.Database:
        db = ts.open(directory, backend=backend, shards=2, plugins=["noting"], auto_compact=False)
        db.store([ts.Message("a", payload, f"c{number}") for number, payload in enumerate(PAYLOADS * 4)])
        return db

    db = stored(tmp_path / "counted")
    with Faults() as counting:
        db.close()
    assert {"fsync()", "return of DirectoryLock.release"} <= set(counting.steps)
    for step in chosen(counting.steps):
        db = stored(tmp_path / f"{step}")
        failures = KeyboardInterrupt if interrupting else (ts.TopicstoreError, OSError, ExceptionGroup)
        with contextlib.suppress(failures), Faults(step, interrupting=interrupting) as faults:
            db.close()
        what = f"step {step}, {faults.steps[-1]}"
        db.close()
        assert open_files(tmp_path) == [], what
        with ts.open(tmp_path / f"{step}") as again:
            assert sorted(PAYLOADS * 4) == sorted(message.payload for message in again.replay("a")), what
