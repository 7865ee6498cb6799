"""Readers that follow a growing database, and check the messages that they read."""

from __future__ import annotations

import attrs
import topicstore as ts
from topicstore import Message, MessageId

from topicstore_conformance.oracle.checks import check_publishers, drain, replayed

__all__ = ["Follower", "Replayer", "epoch_of"]

Place = tuple[int, int, int]
"""A shard, a generation, and the number of a stream in it."""


def epoch_of(db: ts.Database, generation: int, shard: int = 0) -> int:
    """Return the number of positions in an epoch of a generation, which is 1 if the layout has no epochs."""
    return db.storage.shards[shard].generations.slab(generation).epoch


@attrs.define
class Follower:
    """A reader of every stream of a growing database, with cursors that are serialized after each step."""

    saved: dict[Place, bytes] = attrs.field(factory=dict)
    seen: dict[Place, list[tuple[MessageId, Message]]] = attrs.field(factory=dict)

    @property
    def ids(self) -> set[MessageId]:
        """Return the ids of all messages that were read, and check that none was read twice."""
        ids = [id_ for rows in self.seen.values() for id_, _ in rows]
        assert len(set(ids)) == len(ids)
        return set(ids)

    def read(self, db: ts.Database, limit: int = 1_000) -> None:
        """Read every stream from its saved cursor to the end of the visible messages, ``limit`` messages at a time."""
        for stream in db.streams("#"):
            place = stream.shard, stream.generation, stream.number
            saved = self.saved.get(place)
            cursor = db.cursor(stream, "#") if saved is None else ts.Cursor.from_bytes(saved)
            rows, cursor, _ = drain(db, cursor, limit)
            self.seen.setdefault(place, []).extend(rows)
            self.saved[place] = cursor.to_bytes()

    def check_order(self, db: ts.Database) -> None:
        """Check that each stream's messages were read in ascending epochs, and in order within each publisher."""
        for (shard, generation, _), rows in self.seen.items():
            epochs = [id_.position // epoch_of(db, generation, shard) for id_, _ in rows]
            assert sorted(epochs) == epochs
            check_publishers(rows)


@attrs.define
class Replayer:
    """A reader that replays a filter repeatedly, and checks for each shard that a replay extends the previous one."""

    topic_filter: str
    seen: list[MessageId] = attrs.field(factory=list)

    def read(self, db: ts.Database) -> None:
        """Replay in order of time; check that each shard's ids begin with those of the previous replay."""
        rows = replayed(db, self.topic_filter, order="time")
        check_publishers(rows)
        before, self.seen = self.seen, [id_ for id_, _ in rows]
        for shard in {id_.shard for id_ in before}:
            old, new = ([id_ for id_ in ids if id_.shard == shard] for ids in (before, self.seen))
            assert new[: len(old)] == old
