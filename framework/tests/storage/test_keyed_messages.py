"""Keyed messages are stored outside the streams by plugins, one for each key, and outlive generations."""

from __future__ import annotations

from collections.abc import Generator, Iterator
from pathlib import Path

import pytest
import topicstore as ts
from topicstore.contract.cursors import Cursor as Place
from topicstore.contract.engine import STATE
from topicstore.contract.requests import StoreRequest, StoreResult
from topicstore.plugins import registry
from topicstore.shard.state import FrameworkWrite
from topicstore.storage.keyed_messages import message_under, messages_under, state_key, store_under
from topicstore_conformance.backend.fixtures import put
from topicstore_conformance.conditions.skipping import need
from topicstore_conformance.faults.clock import START, Clock
from topicstore_conformance.subjects.pairs import known


@pytest.fixture
def db(tmp_path: Path) -> Iterator[ts.Database]:
    with ts.open(tmp_path / "db", backend="memory", shards=3, clock=Clock()) as opened:
        yield opened


def test_a_message_is_kept_whole_under_its_key(db: ts.Database) -> None:
    """A keyed message keeps all its fields, gets the commit's time, and is in no stream."""
    properties = ts.Properties(message_expiry_interval=7, user_properties=(("a", "b"), ("a", "c")))
    message = ts.Message("$sys/x", b"\0payload", "me", 2, True, None, properties)
    result = store_under(db.storage, [message], [b"wme\0"])
    assert (0, []) == (result.count, result.ids)
    shard = db.shard_of("me")
    assert ts.Message("$sys/x", b"\0payload", "me", 2, True, START, properties) == message_under(
        db.storage, shard, b"wme\0"
    )
    assert [] == list(db.replay("$sys/x"))


def test_the_last_one_of_a_key_is_there(db: ts.Database) -> None:
    """The last message of a key replaces earlier messages of the key, in one batch and over several."""
    store_under(db.storage, [ts.Message("a", b"%d" % n, "me") for n in range(3)], [b"wx", None, b"wx"])
    assert [b"2"] == [message.payload for _, message in messages_under(db.storage, db.shard_of("me"), b"w")]
    store_under(db.storage, [ts.Message("a", b"3", "me")], [b"wx"])
    assert [b"3"] == [message.payload for _, message in messages_under(db.storage, db.shard_of("me"), b"w")]


def test_they_come_by_prefix_in_order_of_keys(db: ts.Database) -> None:
    """A scan by prefix returns exactly the keys that begin with it, in order of bytes."""
    keys = [b"wb", b"wa\xff\xff", b"w", b"wa", b"x", b"wa\xff", b"v", b"wa\0"]
    store_under(db.storage, [ts.Message("a", key) for key in keys], keys, shards=[1] * len(keys))
    assert [b"wa", b"wa\0", b"wa\xff", b"wa\xff\xff"] == [key for key, _ in messages_under(db.storage, 1, b"wa")]
    assert [b"wa\xff", b"wa\xff\xff"] == [key for key, _ in messages_under(db.storage, 1, b"wa\xff")]
    assert [(key, key) for key in sorted(keys)] == [
        (k, m.payload) for p in b"vwx" for k, m in messages_under(db.storage, 1, bytes((p,)))
    ]
    assert [] == list(messages_under(db.storage, 0, b"w"))


def test_one_is_removed_by_its_state_key(db: ts.Database) -> None:
    """Deleting the state key of a keyed message removes the message, in one write with messages and other state."""
    shard = db.shard_of("me")
    store_under(db.storage, [ts.Message("a", b"1", "me")], [b"wx"])
    db.store([ts.Message("b", b"2", "me")], state={shard: [FrameworkWrite(state_key(b"wx"), None)]})
    assert message_under(db.storage, shard, b"wx") is None


def test_rows_go_where_they_are_sent(db: ts.Database) -> None:
    """Each row is stored in a stream, under its key, in both or in neither, as requested.

    `ids` are those of the rows in streams.
    """
    rows = [ts.Message("a", b"%d" % n, f"client {n}") for n in range(40)]
    keys = [b"w%02d" % n if n % 2 else None for n in range(40)]
    stored = [n % 3 == 0 for n in range(40)]
    result = store_under(db.storage, rows, keys, shards=[n % 3 for n in range(40)], stored=stored)
    assert [row.payload for row, flag in zip(rows, stored, strict=True) if flag] == [
        message.payload for message in result.batch.to_messages()
    ]
    assert [db.shard_of(row.client_id) for row, flag in zip(rows, stored, strict=True) if flag] == [
        one.shard for one in result.ids
    ]
    assert sorted(b"%d" % n for n in range(0, 40, 3)) == sorted(message.payload for message in db.replay("a"))
    found = [
        (shard, key, message.payload) for shard in range(3) for key, message in messages_under(db.storage, shard, b"w")
    ]
    assert sorted((n % 3, b"w%02d" % n, b"%d" % n) for n in range(1, 40, 2)) == found


def test_a_stored_message_keeps_its_own_time(tmp_path: Path) -> None:
    """With positions from the messages' own times, a keyed message has the same time as its copy in the stream."""
    with ts.open(tmp_path / "db", backend="memory", timestamps="message", clock=Clock()) as db:
        rows = [ts.Message("a", b"1", timestamp=5_000_000), ts.Message("b", b"2"), ts.Message("c", b"3", timestamp=7)]
        store_under(db.storage, rows, [b"wa", b"wb", b"wc"], stored=[True, True, False])
        assert [5_000_000, START, 7] == [message.timestamp for _, message in messages_under(db.storage, 0, b"w")]
        assert [5_000_000, START] == [message.timestamp for message in db.replay("#", order="time")]


def test_state_and_kept_commit_together_or_not_at_all(db: ts.Database) -> None:
    """State and keyed messages are committed together; if a condition doesn't hold, none of them is committed."""
    shard = db.shard_of("me")
    wrong = {shard: [ts.StateWrite(b"z", b"1", expect=b"other")]}
    with pytest.raises(ts.StateConflictError):
        store_under(db.storage, [ts.Message("a", b"1", "me")], [b"wx"], stored=[True], state=wrong)
    assert (None, []) == (message_under(db.storage, shard, b"wx"), list(db.replay("#")))
    store_under(
        db.storage, [ts.Message("a", b"1", "me")], [b"wx"], state={shard: [ts.StateWrite(b"z", b"1", expect=None)]}
    )
    assert b"1" == db.state(shard).get(b"z")
    assert message_under(db.storage, shard, b"wx") is not None


@pytest.mark.parametrize("backend", sorted({pair.backend for pair in known("persistent")}))
def test_they_outlive_generations_and_restarts(tmp_path: Path, backend: str) -> None:
    """Keyed messages remain after their generation was dropped and the database reopened."""
    need(backend)
    with ts.open(tmp_path / "db", backend=backend) as db:
        store_under(db.storage, [ts.Message("a", b"1")], [b"wx"], stored=[True])
        db.add_generation()
        db.drop_generation(1)
        assert [] == list(db.replay("#"))
    with ts.open(tmp_path / "db") as db:
        assert [(b"wx", b"1")] == [(key, message.payload) for key, message in messages_under(db.storage, 0, b"w")]


def test_more_than_one_fetch(db: ts.Database) -> None:
    """Keyed messages that need several reads are all returned, in order of keys."""
    keys = [b"w%05d" % n for n in range(3_000)]
    store_under(db.storage, [ts.Message("a", key) for key in keys], keys, shards=[0] * len(keys))
    identity = bytes.fromhex(db.manifest.id)
    cursor, found, ended = Place(identity, 0, 0, 0, "#", b"\x92\xc4\x01w\xc4\x01x"), [], False
    while not ended:
        result = db.read(cursor, 700)
        assert len(result.batch) <= 700
        found += result.batch.to_messages()
        cursor, ended = result.cursor, result.end_of_stream
    assert keys == [message.payload for message in found]


def test_a_large_payload_ends_a_fetch(db: ts.Database) -> None:
    """A read ends early after large payloads, so that it holds a few megabytes at a time."""
    store_under(
        db.storage, [ts.Message("a", bytes(6 << 20)) for _ in range(3)], [b"w1", b"w2", b"w3"], shards=[0, 0, 0]
    )
    place = Place(bytes.fromhex(db.manifest.id), 0, 0, 0, "#", b"\x92\xc4\x01w\xc4\x01x")
    first = db.read(place, 100)
    assert (2, False) == (len(first.batch), first.end_of_stream)
    assert 1 == len(db.read(first.cursor, 100).batch)


@pytest.mark.parametrize(
    "arguments",
    [
        {"keys": [b"w"]},
        {"keys": [b"w", None, None]},
        {"keys": [b"", None]},
        {"keys": ["w", None]},
        {"keys": [b"w", None], "stored": [True]},
        {"keys": [b"w", None], "shards": [0]},
        {"keys": [b"w", None], "shards": [3, 0]},
    ],
)
def test_what_does_not_fit_is_refused(db: ts.Database, arguments: dict[str, object]) -> None:
    """Arguments of wrong length, type or range are refused, and nothing is stored."""
    with pytest.raises(ts.InvalidArgumentError):
        store_under(db.storage, [ts.Message("a", b"1"), ts.Message("b", b"2")], **arguments)  # type: ignore[arg-type]
    assert [] == [found for shard in range(3) for found in messages_under(db.storage, shard, b"w")]


def test_a_bad_message_is_named_by_its_row(db: ts.Database) -> None:
    """An invalid message is reported with its row in the batch, even if rows before it aren't stored in a stream."""
    with pytest.raises(ts.InvalidMessageError) as refused:
        store_under(db.storage, [ts.Message("a", b"1"), ts.Message("a/#", b"2")], [None, b"w"])
    assert 1 == refused.value.index


def test_a_late_message_is_named_by_its_row(tmp_path: Path) -> None:
    """A late message is reported by its row in the batch, even if rows before it aren't stored in a stream."""
    with ts.open(tmp_path / "db", backend="memory", timestamps="message", clock=Clock()) as db:
        rows = [ts.Message("a", b"1", timestamp=time) for time in (1, 9_000, 2, 3)]
        with pytest.raises(ts.LateMessageError) as refused:
            store_under(db.storage, rows, [b"w", None, None, None], stored=[False, True, False, True])
        assert 3 == refused.value.index
        assert message_under(db.storage, 0, b"w") is None


def test_cursors_that_are_not_over_kept_messages_are_refused(db: ts.Database) -> None:
    """A cursor with a forged place is refused or finds nothing, so that it can't read the shard's own state."""
    identity = bytes.fromhex(db.manifest.id)
    for place in (b"", b"\x92", b"\x92\x01\x02", b"\x91\xc4\x01w"):
        with pytest.raises(ts.InvalidCursorError):
            db.read(Place(identity, 0, 0, 0, "#", place))
    everything = db.read(Place(identity, 0, 0, 0, "#", b"\x92\xc4\x00\xc4\x03\xff\xff\xff"))
    assert 0 == len(everything.batch)


def test_damage_is_an_error_that_names_the_key(db: ts.Database) -> None:
    """A flipped bit, or the value of another key, raises an error and is reported by `verify`."""
    shard = db.shard_of("me")
    store_under(db.storage, [ts.Message("a", b"1", "me"), ts.Message("a", b"2", "me")], [b"wx", b"wy"])
    engine = db.storage.shards[shard].writer.open_engine()
    value = engine.get(STATE, state_key(b"wx"))
    assert value is not None
    for wrong in (value[:-1] + bytes((value[-1] ^ 1,)), engine.get(STATE, state_key(b"wy")), b""):
        put(engine, STATE, {state_key(b"wx"): wrong})
        with pytest.raises(ts.CorruptionError, match=r"keyed message b'wx'"):
            message_under(db.storage, shard, b"wx")
        damages = db.verify().damages
        assert [f"shard {shard}, state {state_key(b'wx')!r}"] == [damage.place for damage in damages]
    assert message_under(db.storage, shard, b"wy") is not None


# --- plugins ---


class Thinning:
    """A plugin that stores only the first message of a batch."""

    @ts.hookimpl(wrapper=True)
    def topicstore_store(self, request: StoreRequest) -> Generator[None, StoreResult, StoreResult]:
        request.batch = request.batch[:1]
        return (yield)


def test_a_plugin_that_changes_the_number_of_rows_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A plugin that changes the number of rows is refused for keyed messages, but not for ordinary batches."""
    monkeypatch.setitem(registry().plugins, "thinning", Thinning())
    with ts.open(tmp_path / "db", backend="memory", plugins=["thinning"]) as db:
        two = [ts.Message("a", b"1"), ts.Message("b", b"2")]
        assert 1 == db.store(two).count
        with pytest.raises(ts.PluginError, match="number of messages"):
            store_under(db.storage, two, [b"wx", b"wy"])
        assert [] == list(messages_under(db.storage, 0, b"w"))
