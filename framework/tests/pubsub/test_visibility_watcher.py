"""`VisibilityWatcher` wakes waiters when stored messages become visible to readers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest.mock import patch

import pytest
import topicstore as ts
from topicstore.pubsub import visibility_watcher
from topicstore.pubsub.visibility_watcher import VisibilityWatcher
from topicstore_conformance.faults.threads import wait_until

ERRORS = [OSError("a bug"), ts.StorageFullError("a bug"), SystemExit("a bug")]


@pytest.fixture
def db(tmp_path: Path) -> Iterator[ts.Database]:
    with ts.open(tmp_path / "db", shards=2) as opened:
        yield opened


@pytest.fixture
def watcher(db: ts.Database, monkeypatch: pytest.MonkeyPatch) -> Iterator[VisibilityWatcher]:
    """A watcher that retries after a millisecond."""
    monkeypatch.setattr(visibility_watcher, "_AGAIN", 0.001)
    watcher = VisibilityWatcher(db.storage.shards)
    yield watcher
    watcher.stop()
    watcher.join()


@contextmanager
def together(watcher: VisibilityWatcher) -> Iterator[None]:
    """Let the watcher start only after all waiters in the ``with`` block were added."""
    with patch.object(watcher._task, "wake"):
        yield
    watcher._task.wake()


class Fails:
    """A callable that fails once with an error, and records the watcher's failure at each call."""

    def __init__(self, watcher: VisibilityWatcher, error: BaseException, then: Callable[..., object]) -> None:
        self.shown: list[str | None] = []
        self._watcher = watcher
        self._error = error
        self._then = then

    def __call__(self, argument: int) -> object:
        self.shown.append(self._watcher.failure)
        if len(self.shown) == 1:
            raise self._error
        return self._then(argument)


@pytest.mark.parametrize("error", ERRORS, ids=repr)
def test_a_waiter_is_woken_though_waiting_failed(
    db: ts.Database, watcher: VisibilityWatcher, monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    """A waiter is woken even if waiting for its shard fails once; the failure is reported, and the wait is retried.

    Waiters of other shards are woken meanwhile.
    """
    shard, on_stored = db.storage.shards[0], []
    fails = Fails(watcher, error, shard.reader.await_visible)
    monkeypatch.setattr(shard.reader, "await_visible", fails)
    with together(watcher):
        watcher.add(on_stored.append, 0, 1)
        watcher.add(lambda number: on_stored.append(number) or fails.shown.append("woken meanwhile"), 1, 1)
    wait_until(lambda: len(on_stored) == 2 and watcher.failure is None, "all to be woken, and the failure to be over")
    assert [1, 0] == on_stored
    assert [None, "woken meanwhile", "a bug"] == fails.shown


@pytest.mark.parametrize("error", ERRORS, ids=repr)
def test_a_waiter_is_woken_though_waking_another_failed(watcher: VisibilityWatcher, error: BaseException) -> None:
    """If waking one waiter fails, other waiters are woken without delay, once each, and the first is woken later."""
    on_stored: list[str] = []
    fails = Fails(watcher, error, lambda _: on_stored.append("fails"))
    names = [str(number) for number in range(8)]
    with together(watcher):
        watcher.add(fails, 0, 1)
        for name in names:
            watcher.add(lambda _, name=name: on_stored.append(name), 0, 1)  # type: ignore[misc]
    wait_until(lambda: "fails" in on_stored and watcher.failure is None, "all to be woken, and the failure to be over")
    assert [*names, "fails"] == [*sorted(on_stored[:-1]), on_stored[-1]]
    assert [None, "a bug"] == fails.shown


def test_the_watcher_does_not_wait_for_a_shard_that_takes_no_writes(
    db: ts.Database, watcher: VisibilityWatcher, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The watcher doesn't wait for a shard that takes no writes, because nothing will become visible there.

    Other shards are still watched.
    """
    shard, on_stored = db.storage.shards[0], []
    shard.writer.fail(OSError("no disk"))
    monkeypatch.setattr(shard.reader, "await_visible", lambda _: shard.writer.check_writable())
    with together(watcher):
        watcher.add(on_stored.append, 0, 1)
        watcher.add(on_stored.append, 1, 1)
    wait_until(lambda: on_stored, "the other to be woken")
    assert ([1], {}, None) == (on_stored, watcher._waiting, watcher.failure)
