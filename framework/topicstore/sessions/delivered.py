"""`DeliveredMessages`: removes messages that were stored only for sessions, once no session needs them.

It goes through the spans of `topicstore.storage.interest`, the oldest first, up to the first message that a session has
still to deliver, or has in flight. So a session that is away holds the younger messages of a shard back until it has
come, or has expired. Subscriptions of programs, replays and queues hold nothing back. Messages younger than
`RetentionSettings.delivered` stay, so that a block of messages is rewritten rarely, and what a crash undoes (the place
of a session) is never older than what was removed. Topics that begin with ``$`` are left to the other limits.

What a session needs is read from the stored sessions, which may be behind the connected ones, and never ahead. Of
sessions in memory only their places count: what they have in flight was sent, and isn't sent again.
"""

from __future__ import annotations

from functools import partial

import numpy as np

from topicstore.contract.columns import to_list
from topicstore.contract.errors import GenerationDroppedError
from topicstore.contract.positions import Positions, first_position
from topicstore.contract.topics import TopicFilter
from topicstore.lifecycle.retention import Retention
from topicstore.lifecycle.retention_policy import micros
from topicstore.pubsub.filter_index import FilterIndex
from topicstore.runtime.background import BackgroundTask
from topicstore.storage.maintenance import delete_local
from topicstore.storage.storage import Storage

from .cursors import FilterCursor
from .lag import StoredPlaces
from .locks import Around
from .records import IN_FLIGHT, StoredInFlight, decode
from .registry import SessionRegistry
from .shared.group import Places, partition_of
from .shared.records import GROUP, RETURNED, REVOKED, Returned, group_of, messages_of

__all__ = ["DeliveredMessages"]

_ROWS = 2_500
_ALL = TopicFilter("#")
_PARTS = 4
"""The divisor of the age that gives the pause between two runs."""


class _Needs:
    """The messages that sessions need, by shard."""

    def __init__(self, shards: int) -> None:
        self.in_flight: list[int | None] = [None] * shards
        """By shard, the lowest position in flight."""
        self._places: dict[str, list[int]] = {}
        """By filter, the lowest places of its subscriptions."""
        self._groups: dict[str, Places] = {}
        """By shared subscription, the places up to which it has delivered, by shard and partition."""
        self._index: FilterIndex[str] = FilterIndex()

    def follow(self, text: str, places: list[int]) -> None:
        """Add a subscription that has delivered everything up to these places."""
        known = self._places.get(text)
        if known is None:
            self._index.add(TopicFilter(text), text)
        self._places[text] = places if known is None else list(map(min, known, places))

    def follow_group(self, text: str, topic_filter: TopicFilter, places: Places) -> None:
        """Add a shared subscription."""
        self._index.add(topic_filter, text)
        self._groups[text] = places

    def send(self, shard: int, first: int) -> None:
        """Add messages in flight, of which the first has this position."""
        known = self.in_flight[shard]
        self.in_flight[shard] = first if known is None else min(first, known)

    def place_of(self, shard: int, topic: str) -> int | None:
        """Return the position after which a topic's messages are needed; None if they aren't."""
        found = []
        for text in self._index.match(topic):
            group = self._groups.get(text)
            found.append(self._places[text][shard] if group is None else int(group[shard, partition_of(topic)]))
        return min(found, default=None)


class DeliveredMessages:
    """The removal of delivered messages of one open database.

    entered: calls a function under the sessions' mutex, and raises if the database is closed.
    """

    def __init__(self, registry: SessionRegistry, retention: Retention, entered: Around) -> None:
        self._registry = registry
        self._retention = retention
        self._entered = entered
        self._due = 0
        """The monotonic time of the next run in the background."""
        self._task = BackgroundTask("removal of delivered messages", lambda _: self.remove())

    @property
    def failure(self) -> str | None:
        """The error of the last run in the background; None if it succeeded."""
        return self._task.failure

    def look(self) -> None:
        """Begin a run in the background if one is due."""
        age = self._retention.settings.delivered
        if age is not None:
            now = self._registry.publisher.storage().clocks.monotonic()
            if now >= self._due:
                self._due = now + micros(age) // _PARTS
                self._task.wake()

    def stop(self) -> None:
        """Stop the background task, and wait until it has ended. Idempotent."""
        self._task.stop()
        self._task.join()

    def remove(self) -> int:
        """Remove what no session needs and is old enough; return the number of messages."""
        storage, age = self._registry.publisher.storage(), self._retention.settings.delivered
        if age is None or not any(storage.interest.of_shard(shard.number) for shard in storage.shards):
            return 0
        cutoff = first_position(min(storage.clock(), storage.steady()) - micros(age)) - 1
        marks = [shard.writer.watermark for shard in storage.shards]  # later messages may have other readers
        needs = self._needs(storage)
        spared = {rule.topic_filter for rule in self._registry.publisher.rules}
        bounds = [min(cutoff, mark) for mark in marks]
        return sum(self._remove_from(storage, shard, bound, needs, spared) for shard, bound in enumerate(bounds))

    def _remove_from(self, storage: Storage, shard: int, bound: int, needs: _Needs, spared: set[str]) -> int:
        removed, in_flight = 0, needs.in_flight[shard]
        bound = bound if in_flight is None else min(bound, in_flight - 1)
        for span in storage.interest.of_shard(shard):
            end = bound if span.last is None else min(span.last, bound)
            if end <= span.after or self._task.stopping.is_set():
                break
            needed = self._first_needed(storage, shard, span.after + 1, end, needs)
            end = end if needed is None else needed - 1
            if end > span.after:
                spare = sorted(spared.union(span.spare))
                removed += delete_local(storage, storage.shards[shard], _ALL, span.after + 1, end, spare)
                storage.interest.removed(shard, end)
            if needed is not None:
                break
        return removed

    def _first_needed(self, storage: Storage, shard: int, first: int, last: int, needs: _Needs) -> int | None:
        """Return the position of the first message that a session has still to deliver; None if there is none."""
        known: dict[str, int | None] = {}
        while True:
            try:
                for batch in storage.run_shards([storage.plan_shard(shard, _ALL, first, last)], _ROWS):
                    topics = to_list(batch.topics)
                    known.update({topic: needs.place_of(shard, topic) for topic in set(topics).difference(known)})
                    places = [known[topic] for topic in topics]
                    for place, position in zip(places, batch.positions.tolist(), strict=True):
                        if place is not None and position > place:
                            return int(position)
                    first = int(batch.positions[-1]) + 1
            except GenerationDroppedError:  # its messages are gone; the others are read again
                continue
            return None

    # --- what sessions need ---

    def _needs(self, storage: Storage) -> _Needs:
        registry, needs = self._registry, _Needs(len(storage.shards))
        stored = StoredPlaces(registry.states)
        for text, places in stored.of_filters():
            needs.follow(text, places)
        self._add_in_flight(needs)  # after the places, as messages that pass from one to the other are found then
        for state in registry.states.states:
            for prefix in (RETURNED, REVOKED):
                for key, value in state.scan(prefix):
                    shard, positions = messages_of(key, decode(key, value, Returned))
                    self._send(needs, shard, positions)
            for key, _ in state.scan(GROUP):
                self._entered(partial(self._follow_group, needs, group_of(key)))
        self._add_in_flight(needs)  # again, with what passed from returned messages to another member
        for client_id in list(registry.connected):
            self._entered(partial(self._follow_connected, needs, client_id))
        return needs

    def _add_in_flight(self, needs: _Needs) -> None:
        for state in self._registry.states.states:
            for key, value in state.scan(IN_FLIGHT):
                record = decode(key, value, StoredInFlight)
                if not record.topics:
                    needs.send(record.shard, record.first)

    def _follow_group(self, needs: _Needs, text: str) -> None:
        group = self._registry.groups.find(text)
        if group is not None:
            needs.follow_group(text, group.filter.topic_filter, group.delivered_places())
            for assignment in group.assignments:
                self._send(needs, assignment.shard, assignment.behind(assignment.settled))

    def _follow_connected(self, needs: _Needs, client_id: str) -> None:
        session = self._registry.connected.get(client_id)
        for cursor in () if session is None else session.cursors.values():
            if isinstance(cursor, FilterCursor) and cursor.places:
                needs.follow(cursor.topic_filter.text, cursor.settled_places())

    @staticmethod
    def _send(needs: _Needs, shard: int, positions: Positions) -> None:
        if len(positions):
            needs.send(shard, int(np.min(positions)))
