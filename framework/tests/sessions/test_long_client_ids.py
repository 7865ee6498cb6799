"""Sessions with long client ids: their cost for other sessions, and the format of older releases."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest
import topicstore as ts
from topicstore.sessions import SubscribeOptions, Will
from topicstore.shard.state import FrameworkWrite, ShardState

STORED = Path(__file__).with_name("long_client_ids.json")
"""Stored keys and values of two sessions, in hexadecimal, of a release whose keys contained whole client ids."""
LONG = "é" * 40
"""The client id of the first session; that of the second ends with 2."""


def opened(path: Path, **options: Any) -> ts.Database:
    return ts.open(path, backend="rocksdb", shards=1, **options)


def longest_key(db: ts.Database) -> int:
    return max(len(key) for key, _ in db.state(0).scan(b"\1"))


def counted(monkeypatch: pytest.MonkeyPatch, call: Callable[[], object]) -> tuple[int, int]:
    """Return the number of state keys that a call reads, and their bytes including values."""
    read: list[int] = []
    get_many, scan, get = ShardState.get_many, ShardState.scan, ShardState.get

    def many(self: ShardState, keys: Sequence[bytes]) -> list[bytes | None]:
        found = get_many(self, keys)
        read.extend(len(key) + len(value or b"") for key, value in zip(keys, found, strict=True))
        return found

    def one(self: ShardState, key: bytes) -> bytes | None:
        found = get(self, key)
        read.append(len(key) + len(found or b""))
        return found

    def scanned(self: ShardState, prefix: bytes = b"") -> Any:
        for key, value in scan(self, prefix):
            read.append(len(key) + len(value))
            yield key, value

    with monkeypatch.context() as patched:
        patched.setattr(ShardState, "get_many", many)
        patched.setattr(ShardState, "get", one)
        patched.setattr(ShardState, "scan", scanned)
        call()
    return len(read), sum(read)


def test_what_a_connection_reads_does_not_depend_on_other_sessions(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Connecting reads an amount of state that doesn't depend on other sessions, their client ids or subscriptions."""
    with opened(tmp_path / "db") as db:

        def connect() -> None:
            db.sessions.open("me", expiry_interval=60, will=Will(ts.Message("w", b"", "me"))).disconnect()
            db.sessions.tick()

        connect()
        before = counted(monkeypatch, connect)
        for number in range(5):
            other = db.sessions.open("x" * 60_000 + str(number), expiry_interval=None)
            rows = [(other, f"f/{number}/{row}", SubscribeOptions(1)) for row in range(50)]
            db.sessions.subscribe([*rows, (other, "$share/g/f", SubscribeOptions(1))])
            other.disconnect()
        assert before == counted(monkeypatch, connect)
        assert longest_key(db) <= 100  # an engine reads a whole index block, with all its keys


def test_long_client_ids_are_found_again(tmp_path: Path) -> None:
    """Sessions with long client ids are found in listings, groups, by timers and after a crash.

    Their keys have only digests of the client ids.
    """
    names = ["x" * 60_000 + str(number) for number in range(2)]
    with opened(tmp_path / "db") as db:
        for name in names:
            session = db.sessions.open(name, expiry_interval=0 if name == names[1] else None)
            session.subscribe("a", qos=1)
            session.subscribe("$share/g/b", qos=1)
        db.checkpoint(tmp_path / "copy")
        sessions = db.sessions
        assert names == sessions.clients() == [info.client_id for info in sessions]
        sessions.lost([sessions.connected(names[1])])  # type: ignore[list-item]
        assert names[:1] == sessions.clients()
        assert 1 == len(sessions)
        assert longest_key(db) <= 100
    with opened(tmp_path / "copy") as db:  # both sessions are open, as after a crash
        assert set(names) == {member.client_id for group in db.sessions.groups for member in group.members}
        db.sessions.tick()
        assert names[:1] == db.sessions.clients()
        assert set(names[:1]) == {member.client_id for group in db.sessions.groups for member in group.members}
        db.publish([ts.Message("a", b"1", "p", qos=1)])
        assert 1 == db.sessions.lag(names[0])[names[0]]["a"].messages
        assert 1 == len(db.sessions.open(names[0], expiry_interval=None).deliver())
        db.sessions.expire(names[0])
        assert [] == [key for key, _ in db.state(0).scan(b"\1s")]


@pytest.fixture(name="old")
def _old(tmp_path: Path) -> Path:
    """A database with the stored sessions of the older release."""
    with opened(tmp_path / "old") as db:
        rows = msgspec.json.decode(STORED.read_bytes(), type=list[tuple[str, str]])
        db.storage.shards[0].writer.write_state([FrameworkWrite(bytes.fromhex(k), bytes.fromhex(v)) for k, v in rows])
    return tmp_path / "old"


def described(db: ts.Database) -> object:
    known = [
        (info.client_id, [text for text, _ in info.subscriptions], info.in_flight, info.awaiting_pubrel, info.connected)
        for info in db.sessions
    ]
    places = {name: sorted(lags) for name, lags in db.sessions.lag().items()}
    members = [member.client_id for group in db.sessions.groups for member in group.members]
    return known, places, members


def test_sessions_of_older_releases_are_whole(old: Path) -> None:
    """Sessions of older releases are intact, in read-only mode too; a writer shortens their keys."""
    expected = (
        [(LONG, ["a/#", "$share/g/b"], 2, 1, False), (LONG + "2", ["c"], 0, 0, True)],
        {LONG: ["$share/g/b", "a/#"], LONG + "2": ["c"]},
        [LONG],
    )
    with ts.open(old, mode="r") as db:
        assert expected == described(db)
    for _ in range(2):
        with opened(old) as db:
            assert expected == described(db)
            assert longest_key(db) <= 80
            assert [] == db.verify().damages
    with opened(old) as db:
        session = db.sessions.open(LONG, expiry_interval=None)
        assert session.present
        assert not session.publish([ts.Message("x", b"", LONG, qos=2)], [7]).ids
        db.sessions.tick()
        assert not db.sessions[LONG + "2"].connected
        for name in (LONG, LONG + "2"):
            db.sessions.expire(name)
        assert [] == [key for key, _ in db.state(0).scan(b"\1") if key[:2] in (b"\1s", b"\1t", b"\1i")]


def test_a_replacement_that_was_killed_goes_on(old: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If the process is killed while long keys are replaced, after any write, the next opening completes the work."""
    expected = None
    for writes in range(30):
        with opened(old) as db:
            rows = json.loads(STORED.read_text())
            now = [key for key, _ in db.state(0).scan(b"\1")]
            writer = db.storage.shards[0].writer
            writer.write_state([FrameworkWrite(key, None) for key in now])
            writer.write_state([FrameworkWrite(bytes.fromhex(k), bytes.fromhex(v)) for k, v in rows])
            left, write = [writes], ShardState.write

            def killed(self: ShardState, some: Any, left: list[int] = left, write: Any = write) -> None:
                if not left[0]:
                    raise ts.EngineError("killed")
                left[0] -= 1
                write(self, some)

            with monkeypatch.context() as patched:
                patched.setattr(ShardState, "write", killed)
                patched.setattr("topicstore.sessions.long_keys._BYTES", 0)  # each write replaces one key
                try:
                    db.sessions  # noqa: B018 - replaces the keys
                except ts.EngineError:
                    done = False
                else:
                    done = True
        with opened(old) as db:
            expected = expected or described(db)
            assert expected == described(db)
            assert longest_key(db) <= 80
        if done:
            return
    pytest.fail("it never ended")
