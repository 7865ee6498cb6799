"""Replays of some columns: `Database.replay_arrow` with ``columns``."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import topicstore as ts
from hypothesis import given
from hypothesis import strategies as st
from topicstore.lifecycle import archive_slab
from topicstore_conformance.conditions.skipping import need
from topicstore_layouts.block.format import Block

PAIRS = [
    ("memory", "reference"),
    ("memory", "skipstream"),
    ("memory", "block"),
    ("rocksdb", "block"),
    ("duckdb", "table"),
]
NAMES = ts.SCHEMA_WITH_IDS.names


def messages(count: int) -> list[ts.Message]:
    """Return messages of several topics and clients, some of them with other timestamps and with properties."""
    return [
        ts.Message(
            f"a/{n % 3}/b",
            b"%d" % n * (1 + n % 5),
            f"c{n % 4}",
            qos=n % 3,
            retain=n % 7 == 0,
            timestamp=None if n % 2 else 1_748_779_200_000_000 + n,
            properties=ts.Properties(content_type="text") if n % 11 == 0 else None,
        )
        for n in range(count)
    ]


@pytest.fixture(scope="module", params=PAIRS, ids="/".join)
def db(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ts.Database]:
    """Yield a database with compacted, archived and new messages, as far as its backend and layout allow."""
    backend, layout = request.param
    need(backend, layout)
    directory = tmp_path_factory.mktemp("projection")
    with ts.open(directory / "db", backend=backend, layout=layout, shards=2, auto_compact=False) as opened:
        opened.store(messages(200))
        opened.add_generation()
        opened.store(messages(100))
        opened.compact()
        for _ in range(3):
            opened.store(messages(30))
        if backend != "memory":
            opened.archives.archive(directory / "cold")
        yield opened


@given(
    columns=st.lists(st.sampled_from(NAMES), min_size=1, unique=True),
    topic_filter=st.sampled_from(["#", "a/1/b", "a/+/b"]),
    how=st.fixed_dictionaries(
        {},
        optional={
            "order": st.sampled_from(["time", "any", "timestamp"]),
            "by": st.just("timestamp"),
            "limit": st.integers(0, 50),
            "batch_size": st.integers(1, 400),
        },
    ),
    start=st.sampled_from([0, 1_748_779_200_000_050]),
)
def test_some_columns_are_those_of_the_whole_replay(
    db: ts.Database, columns: list[str], topic_filter: str, how: dict[str, Any], start: int
) -> None:
    """A replay of some columns has the same rows as one of all columns, with these columns in the given order."""
    whole = db.replay_arrow(topic_filter, start, ids=True, **how).read_all()
    some = db.replay_arrow(topic_filter, start, columns=columns, **how)
    assert columns == some.schema.names
    assert whole.select(columns) == some.read_all()


def test_the_newest_columns(db: ts.Database) -> None:
    """A reverse replay returns the requested columns with the same rows."""
    whole = db.replay_arrow("#", reverse=True, limit=70, ids=True).read_all()
    assert (
        whole.select(["position", "payload"])
        == db.replay_arrow("#", reverse=True, limit=70, columns=["position", "payload"]).read_all()
    )


@pytest.mark.parametrize("columns", [[], ["topic", "topic"], ["topics"], "topic", ["shard", "time"]])
def test_columns_that_do_not_exist(db: ts.Database, columns: Any) -> None:
    """Invalid lists of columns are refused before anything is read, and the error lists the valid names."""
    with pytest.raises(ts.InvalidArgumentError, match="timestamp, topic, client_id"):
        db.replay_arrow("#", columns=columns)


def test_blocks_are_read_without_payloads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The layout `block` decompresses no payloads if they aren't requested, compacted or not."""
    need("rocksdb", "block")
    decompressed: list[Block] = []
    payloads = Block.payloads

    def counted(self: Block) -> Any:
        decompressed.append(self)
        return payloads(self)

    with ts.open(tmp_path / "db", auto_compact=False) as db:
        db.store(messages(500))
        db.compact()
        db.store(messages(500))
        monkeypatch.setattr(Block, "payloads", counted)
        for topic_filter in ("#", "a/1/b"):
            for order in ("time", "any", "timestamp"):
                found = db.replay_arrow(topic_filter, order=order, columns=["timestamp", "topic", "position"])
                assert found.read_all().num_rows > 300
        assert [] == decompressed
        db.replay_arrow("#", columns=["payload"]).read_all()
        assert len(decompressed) > 1


def test_exports_are_read_by_column(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of an archived generation, only the requested columns and the topics are read, each once."""
    need("rocksdb", "block")
    asked: list[str] = []
    read = archive_slab._File.read

    def noted(self: Any, group: int, columns: Any) -> Any:
        asked.extend(columns)
        return read(self, group, columns)

    with ts.open(tmp_path / "db") as db:
        db.store(messages(500))
        db.add_generation()
        db.archives.archive(tmp_path / "cold")
        monkeypatch.setattr(archive_slab._File, "read", noted)
        assert 500 == db.replay_arrow("#", columns=["qos"], batch_size=50).read_all().num_rows
        assert ["position", "qos", "topic"] == sorted(asked)
