"""A model of the database, which is simple enough to be obviously correct.

It consists of a list of rows, a filter matcher that compares level by level, and positions counted one by one. It
shares no code with the database, except `Message`, `MessageId` and the mapping from publishers to shards.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import attrs
import msgspec
from topicstore import Message, MessageId

__all__ = ["Generation", "Model", "Row", "match"]

_COUNTER = 2**11
_LAST_TIME = 2**53 - 2**32


def match(topic_filter: str, topic: str) -> bool:
    """Return whether a topic matches a filter (MQTT 5, section 4.7)."""
    if topic.startswith("$") and topic_filter[0] in "+#":
        return False
    wanted, levels = topic_filter.split("/"), topic.split("/")
    for number, want in enumerate(wanted):
        if want == "#":
            return True
        if number == len(levels) or want not in ("+", levels[number]):
            return False
    return len(wanted) == len(levels)


def first_of(time: int) -> int:
    """Return the lowest position of a time in microseconds."""
    return max(0, min(time, _LAST_TIME + 1)) * _COUNTER


@attrs.frozen(kw_only=True)
class Row:
    """A stored message; if it had no timestamp, with the time at which it was stored."""

    shard: int
    position: int
    generation: int
    message: Message

    @property
    def id(self) -> MessageId:
        """Return the message's id."""
        return MessageId(self.shard, self.position)


@attrs.define(kw_only=True)
class Generation:
    """A generation over all shards."""

    layout: str
    sealed: bool = False
    dropped: bool = False


@attrs.define(kw_only=True)
class Model:
    """The expected state of a database."""

    shards: int
    shard_of: Callable[[str], int]
    layout: str
    timestamps: str = "commit"
    late: str = "raise"
    max_skew: float = 60.0
    rows: list[Row] = attrs.field(factory=list)
    generations: dict[int, Generation] = attrs.field(init=False)
    state: dict[int, dict[bytes, bytes]] = attrs.field(init=False)
    last: dict[int, int] = attrs.field(init=False)
    """The highest position ever assigned, by shard."""
    newest: dict[int, int] = attrs.field(init=False)
    """The newest message time in microseconds, by shard."""
    lifted: int = 0

    def __attrs_post_init__(self) -> None:
        self.generations = {1: Generation(layout=self.layout)}
        self.state = {shard: {} for shard in range(self.shards)}
        self.last = dict.fromkeys(range(self.shards), 0)
        self.newest = dict.fromkeys(range(self.shards), 0)

    def copy(self) -> Model:
        """Return an independent copy."""
        made = attrs.evolve(self, rows=[*self.rows])
        made.generations = {number: attrs.evolve(generation) for number, generation in self.generations.items()}
        made.state = {shard: {**values} for shard, values in self.state.items()}
        made.last, made.newest = {**self.last}, {**self.newest}
        return made

    @property
    def current(self) -> int:
        """Return the number of the generation in which new messages are stored."""
        return max(self.generations)

    # --- writing ---

    def refusal(self, messages: Sequence[Message], now: int) -> set[tuple[str, int]]:
        """Return (name of the error, index) of each message for which `Database.store` may reject the batch."""
        found: set[tuple[str, int]] = set()
        if self.timestamps == "commit":
            return found
        newest = dict(self.newest)
        for index, message in enumerate(messages):
            shard = self.shard_of(message.client_id)
            time = max(now, newest[shard]) if message.timestamp is None else message.timestamp
            if message.timestamp is None:
                pass  # never rejected: its time is at least the newest one
            elif time > now + int(self.max_skew * 1_000_000):
                found.add(("TimestampAheadError", index))
            elif time < newest[shard] and self.late == "raise":
                found.add(("LateMessageError", index))
            newest[shard] = max(newest[shard], time)
        return found

    def store(self, messages: Iterable[Message], now: int) -> list[Row]:
        """Store messages that must not be rejected; return their rows in the given order."""
        stored = []
        for message in messages:
            shard = self.shard_of(message.client_id)
            time = now if message.timestamp is None else message.timestamp
            wanted = now
            if self.timestamps == "message":
                wanted = time if message.timestamp is not None else max(now, self.newest[shard])
                self.lifted += wanted < self.newest[shard]
                self.newest[shard] = max(self.newest[shard], wanted)
            self.last[shard] = max(self.last[shard] + 1, first_of(wanted))
            stored.append(
                Row(
                    shard=shard,
                    position=self.last[shard],
                    generation=self.current,
                    message=msgspec.structs.replace(message, timestamp=time),
                )
            )
        self.rows.extend(stored)
        return stored

    def write_state(self, shard: int, values: Mapping[bytes, bytes | None]) -> None:
        """Set state values of a shard; None deletes a key."""
        for key, value in values.items():
            self.state[shard].pop(key, None)
            if value is not None:
                self.state[shard][key] = value

    def delete(self, topic_filter: str, start: int, until: int | None) -> int:
        """Delete the matching rows from ``start`` (inclusive) to ``until`` (exclusive); return their number."""
        gone = {row.id for row in self.find(topic_filter, start, until)}
        self.rows = [row for row in self.rows if row.id not in gone]
        return len(gone)

    def add_generation(self, layout: str) -> int:
        """Seal the current generation and begin another; return its number."""
        self.generations[self.current].sealed = True
        self.generations[self.current + 1] = Generation(layout=layout)
        return self.current

    def drop_generation(self, number: int) -> bool:
        """Drop a sealed generation; return False if it was dropped before."""
        first = not self.generations[number].dropped
        self.generations[number].dropped = True
        self.rows = [row for row in self.rows if row.generation != number]
        return first

    # --- reading ---

    def find(self, topic_filter: str, start: int = 0, until: int | None = None) -> list[Row]:
        """Return the matching rows from ``start`` (inclusive) to ``until`` (exclusive), by position, then shard.

        The range is compared with message times if ``timestamps`` is "message", else with the times of positions.
        """
        own = self.timestamps == "message"
        found = [
            row
            for row, time in ((row, first_of(row.message.timestamp or 0) if own else row.position) for row in self.rows)
            if time >= first_of(start)
            and (until is None or time < first_of(until))
            and match(topic_filter, row.message.topic)
        ]
        return sorted(found, key=lambda row: (row.position, row.shard))

    def find_from(self, topic_filter: str, start: int) -> list[Row]:
        """Return the matching rows whose positions' times are ``start`` or later, in order of position, then shard.

        Cursors compare times in the same way.
        """
        found = [row for row in self.rows if row.position >= first_of(start) and match(topic_filter, row.message.topic)]
        return sorted(found, key=lambda row: (row.position, row.shard))

    def live_generations(self) -> dict[int, Generation]:
        """Return the generations that can be read."""
        return {number: generation for number, generation in self.generations.items() if not generation.dropped}


def in_order(rows: Iterable[Row]) -> bool:
    """Return whether each publisher's messages of a topic, and each shard's generations, are in ascending order."""
    last: dict[Any, int] = {}
    oldest: dict[int, int] = {}
    for row in rows:
        of = row.shard, row.message.client_id, row.message.topic
        if row.position <= last.get(of, -1) or row.generation < oldest.get(row.shard, 0):
            return False
        last[of] = row.position
        oldest[row.shard] = row.generation
    return True
