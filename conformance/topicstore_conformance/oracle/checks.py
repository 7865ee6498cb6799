"""Comparisons of a database with the model."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pyarrow as pa
import topicstore as ts
from topicstore import Message, MessageId
from topicstore.contract.replay_plan import Order

from .model import Model, in_order

__all__ = [
    "check_all",
    "check_publishers",
    "check_replay",
    "drain",
    "follow_epochs",
    "replayed",
    "rows_of",
]


def rows_of(batches: Iterable[pa.RecordBatch]) -> list[tuple[MessageId, Message]]:
    """Return the messages, with ids, of record batches that have id columns."""
    rows: list[tuple[MessageId, Message]] = []
    for batch in batches:
        ids = map(MessageId, batch.column("shard").to_pylist(), batch.column("position").to_pylist())
        rows.extend(zip(ids, ts.MessageBatch.from_arrow(batch).to_messages(), strict=True))
    return rows


def replayed(
    db: ts.Database, topic_filter: str = "#", *times: int | None, **arguments: Any
) -> list[tuple[MessageId, Message]]:
    """Return the messages of a replay, with ids."""
    return rows_of(db.replay_arrow(topic_filter, *times, ids=True, **arguments))  # type: ignore[arg-type]


def check_replay(
    db: ts.Database,
    model: Model,
    topic_filter: str,
    start: int = 0,
    until: int | None = None,
    order: Order = "any",
    batch_size: int = 100,
) -> None:
    """Compare `Database.replay_arrow` and `Database.replay` with the model; with order "time" also in reverse."""
    batches = list(db.replay_arrow(topic_filter, start, until, order=order, batch_size=batch_size, ids=True))
    assert all(0 < batch.num_rows <= batch_size for batch in batches)
    got = rows_of(batches)
    expected = model.find(topic_filter, start, until)
    if order == "time":
        assert [(row.id, row.message) for row in expected] == got
    by_id = {row.id: row for row in expected}
    assert sorted(by_id) == sorted(id_ for id_, _ in got)
    assert [by_id[id_].message for id_, _ in got] == [message for _, message in got]
    assert in_order(by_id[id_] for id_, _ in got)
    again = list(db.replay(topic_filter, start, until, order=order, batch_size=batch_size))
    assert [message for _, message in got] == again
    if order == "time":
        few = len(got) // 3
        back = db.replay_arrow(topic_filter, start, until, reverse=True, batch_size=batch_size, ids=True)
        assert got[::-1] == rows_of(back)
        assert again[::-1][:few] == list(db.replay(topic_filter, start, until, reverse=True, limit=few))
        assert again[:few] == list(db.replay(topic_filter, start, until, order=order, limit=few))


def check_all(db: ts.Database, model: Model) -> None:
    """Compare a database's messages, generations, state, `info` and `verify` with the model."""
    check_replay(db, model, "#")
    check_replay(db, model, "$x/#", order="time")
    live = model.live_generations()
    said = {info.number: (info.layout, info.sealed is not None, info.messages) for info in db.generations()}
    held = dict.fromkeys(live, 0)
    for row in model.rows:
        held[row.generation] += 1
    assert {number: (gen.layout, gen.sealed, held[number]) for number, gen in live.items()} == said
    assert {shard: dict(db.state(shard).scan()) for shard in model.state} == model.state
    info = db.info()
    assert len(model.rows) == info.messages
    follow_epochs(db, model)
    assert model.last == {shard.number: shard.last_position for shard in info.shards}
    report = db.verify()
    assert (len(model.rows), []) == (report.messages, report.damages)


def follow_epochs(db: ts.Database, model: Model) -> None:
    """Set the model's last position of each shard in which a reader has ended the epoch to the epoch's end."""
    for shard in db.storage.shards:
        ended = model.last[shard.number] | (shard.generations.slab(shard.generations.current).epoch - 1)
        if shard.writer.tail.last_position == ended:
            model.last[shard.number] = ended


def drain(
    db: ts.Database, cursor: ts.Cursor, limit: int = 1_000
) -> tuple[list[tuple[MessageId, Message]], ts.Cursor, bool]:
    """Read from a cursor until no more is visible; return the rows, the next cursor, and whether the stream ended."""
    rows: list[tuple[MessageId, Message]] = []
    while True:
        result = db.read(cursor, limit)
        assert len(result.batch) <= limit
        if len(result.batch):
            rows.extend(zip(result.batch.ids(), result.batch.to_messages(), strict=True))
        cursor = result.cursor
        if result.caught_up or result.end_of_stream:
            return rows, cursor, result.end_of_stream


def check_publishers(rows: list[tuple[MessageId, Message]]) -> None:
    """Check that each publisher's messages of each topic are in order of position, and in one shard."""
    last: dict[tuple[str, str], MessageId] = {}
    for id_, message in rows:
        before = last.get((message.client_id, message.topic))
        assert before is None or (before.shard == id_.shard and before.position < id_.position)
        last[message.client_id, message.topic] = id_
