"""Readers that follow a database as it grows, and what they must see."""

from __future__ import annotations

import attrs
import topicstore as ts
from topicstore import Message, MessageId

from topicstore_conformance.oracle.checks import check_publishers, drain, replayed

__all__ = ["Follower", "Replayer", "epoch_of"]

Place = tuple[int, int, int]
"""A shard, a generation, and the number of a stream in it."""


def epoch_of(db: ts.Database, generation: int, shard: int = 0) -> int:
    """Return how many positions an epoch of a generation has: 1 if the layout has no epochs."""
    return db.storage.shards[shard].generations.slab(generation).epoch


@attrs.define
class Follower:
    """A reader of every stream as it grows, from cursors that are saved after each step."""

    saved: dict[Place, bytes] = attrs.field(factory=dict)
    seen: dict[Place, list[tuple[MessageId, Message]]] = attrs.field(factory=dict)

    @property
    def ids(self) -> set[MessageId]:
        """The ids of all messages that were seen, none of them twice."""
        ids = [id_ for rows in self.seen.values() for id_, _ in rows]
        assert len(set(ids)) == len(ids)
        return set(ids)

    def read(self, db: ts.Database, limit: int = 1_000) -> None:
        """Read on, up to the end of what is visible."""
        for stream in db.streams("#"):
            place = stream.shard, stream.generation, stream.number
            saved = self.saved.get(place)
            cursor = db.cursor(stream, "#") if saved is None else ts.Cursor.from_bytes(saved)
            rows, cursor, _ = drain(db, cursor, limit)
            self.seen.setdefault(place, []).extend(rows)
            self.saved[place] = cursor.to_bytes()

    def check_order(self, db: ts.Database) -> None:
        """Check that each stream's messages came, over the follower's life, in an order that the layout allows."""
        for (shard, generation, _), rows in self.seen.items():
            epochs = [id_.position // epoch_of(db, generation, shard) for id_, _ in rows]
            assert sorted(epochs) == epochs
            check_publishers(rows)


@attrs.define
class Replayer:
    """A reader that replays a filter again and again: what it saw stays, and each shard only grows at its end."""

    topic_filter: str
    seen: list[MessageId] = attrs.field(factory=list)

    def read(self, db: ts.Database) -> None:
        """Replay in order of time."""
        rows = replayed(db, self.topic_filter, order="time")
        check_publishers(rows)
        before, self.seen = self.seen, [id_ for id_, _ in rows]
        for shard in {id_.shard for id_ in before}:
            old, new = ([id_ for id_ in ids if id_.shard == shard] for ids in (before, self.seen))
            assert new[: len(old)] == old
