"""Waiting for what is stored and can't be seen yet."""

from __future__ import annotations

from pathlib import Path

import pytest
import topicstore as ts
from topicstore.pubsub import visibility_watcher
from topicstore.pubsub.visibility_watcher import VisibilityWatcher
from topicstore_conformance.faults.threads import wait_until


@pytest.mark.parametrize("fails", ["waiting", "waking"])
def test_after_an_error_whoever_waits_is_still_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fails: str
) -> None:
    """What fails is shown, and tried again."""
    failures, woken, shown = [OSError("a bug")], [], []
    monkeypatch.setattr(visibility_watcher, "_AGAIN", 0.001)
    with ts.open(tmp_path / "db") as db:
        shard = db.storage.shards[0]
        watcher = VisibilityWatcher(db.storage.shards)

        def fail_once(*_: object) -> None:
            shown.append(watcher.failure)
            if failures:
                raise failures.pop()

        if fails == "waiting":
            monkeypatch.setattr(shard, "await_visible", fail_once)
        else:
            watcher.add(fail_once, 0, 1)
        watcher.add(woken.append, 0, 1)
        wait_until(lambda: woken, "who waits to be woken")
        wait_until(lambda: watcher.failure is None, "the failure to be over")
        if fails == "waiting":
            assert shown == [None, "a bug"]
        assert woken == [0]
        watcher.stop()
        watcher.join()
