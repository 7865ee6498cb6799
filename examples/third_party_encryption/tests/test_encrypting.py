"""Tests that no payload is on disk in plaintext, and that every way to read decrypts payloads."""

import io
import json
import os
import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pytest
import topicstore as ts
from topicstore_encrypting import KEY_VARIABLE, DecryptionError, MissingKeyError, new_key

SECRET = b"the safe opens with 17 left, 4 right"
MESSAGES = [ts.Message(f"house/{number % 3}", SECRET + b" %d" % number, f"c{number % 2}") for number in range(200)]


@pytest.fixture(autouse=True)
def key(monkeypatch):
    """Set a new key in the environment."""
    monkeypatch.setenv(KEY_VARIABLE, new_key())


@pytest.fixture(params=["block", "skipstream", "wildcard_optimized", "reference"])
def path(request, tmp_path):
    """The path of a database whose messages were stored as objects and as Arrow, and partly compacted."""
    with ts.open(tmp_path / "db", mode="x", layout=request.param, plugins=["encrypting"], shards=2) as db:
        db.store(MESSAGES[:100])
        db.compact()
        db.store(ts.MessageBatch.from_messages(MESSAGES[100:]).to_arrow())
    return tmp_path / "db"


def payloads(messages):
    """Return the payloads, sorted."""
    return sorted(message.payload for message in messages)


def test_no_payload_is_on_disk(path):
    """No file of the database, such as an SST file or a log, contains a payload in plaintext."""
    files = [each for each in path.rglob("*") if each.is_file()]
    assert sum(each.stat().st_size for each in files) > 200 * len(SECRET)
    assert not [each for each in files if SECRET[:12] in each.read_bytes()]


def test_every_way_of_reading_decrypts(path):
    """Payloads are decrypted in replays as objects and as Arrow, in cursor reads, and on the command line."""
    expected = payloads(MESSAGES)
    with ts.open(path) as db:
        assert payloads(db.replay("#")) == expected
        assert payloads(db.replay("house/+", order="time")) == expected
        arrow = pa.Table.from_batches(db.replay_arrow("#"))
        assert sorted(arrow.column("payload").to_pylist()) == expected
        found = []
        for stream in db.streams("#"):
            cursor, ended = db.cursor(stream, "#"), False
            while not ended:
                result = db.read(cursor, 30)
                found += result.batch.to_messages()
                cursor, ended = result.cursor, result.caught_up
        assert set(payloads(found)) <= set(expected)
        assert db.explain("#").messages == len(expected)
    lines = command("replay", path, "--format", "jsonl")
    assert sorted(json.loads(line)["payload"].encode() for line in io.StringIO(lines)) == expected


def test_what_the_database_counts_and_deletes(path):
    """Topics are not encrypted, so filters, deletes and `verify` work as without the plugin."""
    with ts.open(path) as db:
        assert db.delete("house/1") == len([message for message in MESSAGES if message.topic == "house/1"])
        assert payloads(db.replay("#")) == payloads(message for message in MESSAGES if message.topic != "house/1")
        assert not db.verify().damages


def test_the_wrong_key(path, monkeypatch):
    """Reading with another key raises, opening without a valid key raises, and no message is lost by either."""
    right = os.environ[KEY_VARIABLE]
    monkeypatch.setenv(KEY_VARIABLE, new_key())
    with ts.open(path) as db, pytest.raises(DecryptionError, match="can't be decrypted"):
        list(db.replay("#"))
    for wrong in ("", "no key", "c2hvcnQ="):
        monkeypatch.setenv(KEY_VARIABLE, wrong)
        with pytest.raises(MissingKeyError, match=KEY_VARIABLE):
            ts.open(path)
    monkeypatch.setenv(KEY_VARIABLE, right)
    with ts.open(path) as db:
        assert payloads(db.replay("#")) == payloads(MESSAGES)


def command(*arguments):
    """Run the program, and return its output."""
    done = subprocess.run(
        [Path(sys.executable).parent / "topicstore", *map(str, arguments)], capture_output=True, text=True, check=True
    )
    return done.stdout
