"""The oracle: the answers that a database must give, written so that they are obviously right.

It consists of a list of rows, a filter matcher by recursion, and positions counted one by one. Nothing
here is shared with the code under test, except `Message` and the map from publishers to shards.
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
    """Return whether a topic matches a filter, by MQTT 5, section 4.7."""
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
    """Return the lowest position of a time."""
    return max(0, min(time, _LAST_TIME + 1)) * _COUNTER


@attrs.frozen(kw_only=True)
class Row:
    """A stored message, with the time that it was given if it had none."""

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
    """The highest position ever given out, by shard."""
    newest: dict[int, int] = attrs.field(init=False)
    """The newest message time, by shard."""
    lifted: int = 0

    def __attrs_post_init__(self) -> None:
        self.generations = {1: Generation(layout=self.layout)}
        self.state = {shard: {} for shard in range(self.shards)}
        self.last = dict.fromkeys(range(self.shards), 0)
        self.newest = dict.fromkeys(range(self.shards), 0)

    def copy(self) -> Model:
        """Return a copy that changes by itself."""
        made = attrs.evolve(self, rows=[*self.rows])
        made.generations = {number: attrs.evolve(generation) for number, generation in self.generations.items()}
        made.state = {shard: {**values} for shard, values in self.state.items()}
        made.last, made.newest = {**self.last}, {**self.newest}
        return made

    @property
    def current(self) -> int:
        """Return the number of the generation that is written to."""
        return max(self.generations)

    # --- writing ---

    def refusal(self, messages: Sequence[Message], now: int) -> set[tuple[str, int]]:
        """Return the (name of the error, index) of each message for which the batch may be refused."""
        found: set[tuple[str, int]] = set()
        if self.timestamps == "commit":
            return found
        newest = dict(self.newest)
        for index, message in enumerate(messages):
            shard = self.shard_of(message.client_id)
            time = max(now, newest[shard]) if message.timestamp is None else message.timestamp
            if message.timestamp is None:
                pass  # never refused: it follows the message before it
            elif time > now + int(self.max_skew * 1_000_000):
                found.add(("TimestampAheadError", index))
            elif time < newest[shard] and self.late == "raise":
                found.add(("LateMessageError", index))
            newest[shard] = max(newest[shard], time)
        return found

    def store(self, messages: Iterable[Message], now: int) -> list[Row]:
        """Store messages that are not to be refused; return their rows in the order of the call."""
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
        """Set or delete values."""
        for key, value in values.items():
            self.state[shard].pop(key, None)
            if value is not None:
                self.state[shard][key] = value

    def delete(self, topic_filter: str, start: int, until: int | None) -> int:
        """Delete matching rows; return how many."""
        gone = {row.id for row in self.find(topic_filter, start, until)}
        self.rows = [row for row in self.rows if row.id not in gone]
        return len(gone)

    def add_generation(self, layout: str) -> int:
        """Seal the current generation and begin another."""
        self.generations[self.current].sealed = True
        self.generations[self.current + 1] = Generation(layout=layout)
        return self.current

    def drop_generation(self, number: int) -> bool:
        """Drop a sealed generation."""
        first = not self.generations[number].dropped
        self.generations[number].dropped = True
        self.rows = [row for row in self.rows if row.generation != number]
        return first

    # --- asking ---

    def find(self, topic_filter: str, start: int = 0, until: int | None = None) -> list[Row]:
        """Return the matching rows of a range of times in order of position, then of shard.

        Where positions go by the messages' own times, those are compared, and the times of positions otherwise.
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
        """Return the matching rows whose positions begin at a time, as cursors do, in order of position and shard."""
        found = [row for row in self.rows if row.position >= first_of(start) and match(topic_filter, row.message.topic)]
        return sorted(found, key=lambda row: (row.position, row.shard))

    def live_generations(self) -> dict[int, Generation]:
        """Return the generations that can be read."""
        return {number: generation for number, generation in self.generations.items() if not generation.dropped}


def in_order(rows: Iterable[Row]) -> bool:
    """Return whether each publisher's messages of each topic come in the order stored, and no generation too early."""
    last: dict[Any, int] = {}
    oldest: dict[int, int] = {}
    for row in rows:
        of = row.shard, row.message.client_id, row.message.topic
        if row.position <= last.get(of, -1) or row.generation < oldest.get(row.shard, 0):
            return False
        last[of] = row.position
        oldest[row.shard] = row.generation
    return True
