"""`DeliveredRemoval`: removes messages that were stored only for sessions, once no session needs them.

The removal visits the spans of `topicstore.storage.interest`, oldest first. It stops at the first message that a
session has not delivered yet, or has in flight. So a disconnected session keeps the later messages of a shard until its
client returns, or the session expires. Subscriptions of programs, replays and queues keep no messages. Messages younger
than `RetentionSettings.delivered` stay, so that a block of messages is rewritten rarely, and so that a place that a
crash resets is never before a removed message. Topics that begin with ``$`` are left to the limits of retention.

A subscription that begins in the past receives the messages that exist when it is made: it ends a running removal.

The removal reads the stored sessions, whose places may be behind those of the connected ones, but never ahead. Of
sessions in memory only the places count, because their messages in flight are never sent again.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from functools import partial

import numpy as np

from topicstore.contract.columns import to_list
from topicstore.contract.errors import GenerationDroppedError, ShardElsewhereError, ShardMovedError
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
from .shared.reader import Places, partition_of
from .shared.records import GROUP, REVOKED, Returned, group_of, messages_of

__all__ = ["DeliveredRemoval", "Needs"]

_Removable = tuple[int, int, tuple[str, ...]]
"""Positions of a shard, the first and the last, between which all messages can go but those of these filters."""

LAST = (1 << 64) - 1
"""The highest position."""
_ROWS = 5_000
"""The number of messages that are read, and then removed, in one step."""
_ALL = TopicFilter("#")
_TOPICS = frozenset({"topics"})
_TRIES = 3
"""The number of attempts to read the needs of sessions without holding the sessions' mutex."""
_PARTS = 4
"""The divisor of the age that gives the pause between two runs."""


class Needs:
    """The messages that sessions need, by shard."""

    def __init__(self, shards: int) -> None:
        self.in_flight: list[int | None] = [None] * shards
        """By shard, the lowest position in flight."""
        self._places: dict[str, list[int]] = {}
        """By filter, the lowest places of its subscriptions."""
        self._groups: dict[str, Places] = {}
        """By shared subscription, the places up to which it has delivered, by shard and partition."""
        self._index: FilterIndex[str] = FilterIndex()
        self.bounds = [LAST] * shards
        """By shard, the position above which other messages may be needed."""

    def follow(self, text: str, places: list[int]) -> None:
        """Add a subscription that has delivered everything up to these positions, by shard."""
        known = self._places.get(text)
        if known is None:
            self._index.add(TopicFilter(text), text)
        self._places[text] = places if known is None else list(map(min, known, places))

    def follow_group(self, text: str, topic_filter: TopicFilter, places: Places) -> None:
        """Add a shared subscription."""
        self._index.add(topic_filter, text)
        self._groups[text] = places

    def send(self, shard: int, first: int) -> None:
        """Record messages in flight in a shard, of which the first has the position ``first``."""
        known = self.in_flight[shard]
        self.in_flight[shard] = first if known is None else min(first, known)

    def send_all(self, shard: int, positions: Positions) -> None:
        """Record the messages in flight at these positions of a shard, if there are any."""
        if len(positions):
            self.send(shard, int(np.min(positions)))

    def place_of(self, shard: int, topic: str) -> int | None:
        """Return the position after which a topic's messages are needed; None if they aren't."""
        found = []
        for text in self._index.match(topic):
            group = self._groups.get(text)
            found.append(self._places[text][shard] if group is None else int(group[shard, partition_of(topic)]))
        return min(found, default=None)


class DeliveredRemoval:
    """The removal of delivered messages of one open database.

    entered: calls a function under the sessions' mutex, and raises if the database is closed.
    """

    def __init__(self, registry: SessionRegistry, retention: Retention, entered: Around) -> None:
        self._registry = registry
        self._retention = retention
        self._entered = entered
        self._next: tuple[float | None, int] = (None, 0)
        """The age for which the next run in the background was planned, and the monotonic time of that run."""
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
            if self._next[0] != age or now >= self._next[1]:
                self._next = age, now + micros(age) // _PARTS
                self._task.wake()

    def stop(self) -> None:
        """Stop the background task, and wait until it has ended. Idempotent."""
        self._task.stop()
        self._task.join()

    def remove(self) -> int:
        """Remove the old messages that no session needs; return their number."""
        storage = self._registry.publisher.storage()
        storage.check_may_write()
        removed = 0
        while True:
            count, whole = self._remove(storage)
            removed += count
            if whole or not count:
                return removed

    def _remove(self, storage: Storage) -> tuple[int, bool]:
        """Remove messages until a subscription that begins in the past is made; return their number.

        Also returns False if such a subscription has ended the removal.
        """
        replays, age, removed = self._registry.replays, self._retention.settings.delivered, 0
        shards = [shard.number for shard in storage.shards]
        if age is None or not any(map(storage.interest.of_shard, shards)):
            return 0, True
        made = replays.made
        cutoff = first_position(min(storage.clock(), storage.steady()) - micros(age)) - 1
        # Under all locks, no subscription is half made; later ones begin after these watermarks. So only messages up to
        # the watermarks are removed.
        marks = self._registry.locks.hold_all(lambda: [shard.writer.watermark for shard in storage.shards])
        needs = self._needs(storage)
        if needs is None:
            return 0, True
        spared = {rule.topic_filter for rule in self._registry.publisher.rules}
        for shard in shards:
            with suppress(ShardElsewhereError, ShardMovedError):  # the next owner of the shard removes the rest
                for first, last, filters in self._removable(storage, shard, min(cutoff, marks[shard]), needs):
                    with replays.lock:
                        stopping = self._task.stopping.is_set()
                        if stopping or not (replays.none_since(made) and self._holds(storage, needs)):
                            return removed, stopping
                        spare = sorted(spared.union(filters))
                        removed += delete_local(storage, storage.shards[shard], _ALL, first, last, spare)
                        storage.interest.removed(shard, last)
        return removed, True

    def _removable(self, storage: Storage, shard: int, bound: int, needs: Needs) -> Iterator[_Removable]:
        """Yield the ranges of messages that can be removed from a shard up to a position, one for each step."""
        in_flight, bound = needs.in_flight[shard], min(bound, needs.bounds[shard])
        bound = bound if in_flight is None else min(bound, in_flight - 1)
        for span in storage.interest.of_shard(shard):
            end = bound if span.last is None else min(span.last, bound)
            reached = span.after
            for upto in self._unneeded(storage, shard, reached + 1, end, needs) if end > reached else ():
                if upto > reached:
                    yield reached + 1, upto, span.spare
                    reached = upto
            if reached < end or end == bound:
                return

    def _unneeded(self, storage: Storage, shard: int, first: int, last: int, needs: Needs) -> Iterator[int]:
        """Yield ascending positions up to which no message is needed, at most until ``last``."""
        known: dict[str, int | None] = {}
        while True:
            plan = storage.plan_shard(shard, _ALL, first, last)
            try:
                for batch in storage.run_shards([plan], _ROWS, columns=_TOPICS):
                    topics = to_list(batch.topics)
                    known.update({topic: needs.place_of(shard, topic) for topic in set(topics).difference(known)})
                    for topic, position in zip(topics, batch.positions.tolist(), strict=True):
                        place = known[topic]
                        if place is not None and position > place:
                            yield position - 1
                            return
                    first = int(batch.positions[-1]) + 1
                    yield first - 1
            except GenerationDroppedError:  # continue with the messages of other generations
                continue
            yield last
            return

    def _holds(self, storage: Storage, needs: Needs) -> bool:
        """Return whether the result of `_needs` still applies, so that the removal may take another step."""
        return True

    # --- what sessions need ---

    def _needs(self, storage: Storage) -> Needs | None:
        """Return the messages that sessions need; None if a site lacks the data to know.

        If a group took messages back from a session during the reads, they are repeated.
        """
        groups = self._registry.groups
        for _ in range(_TRIES):
            before = groups.taken_back
            needs = self._read_needs(len(storage.shards))
            if groups.taken_back == before:
                return needs
        return self._entered(partial(self._read_needs, len(storage.shards)))

    def _read_needs(self, shards: int) -> Needs:
        """Read the needs of sessions, in the order in which messages advance: first places, then messages in flight.

        Messages also move from sessions to a group, which `Groups.taken_back` counts, or in one commit of one shard.
        """
        registry, needs = self._registry, Needs(shards)
        self._add_places(needs)
        groups = [group_of(key) for state in registry.states.states for key, _ in state.scan(GROUP)]
        for text in groups:
            self._entered(partial(self._follow_group, needs, text))
        self._add_in_flight(needs)
        if groups:
            for state in registry.states.states:
                for key, value in state.scan(REVOKED):
                    needs.send_all(*messages_of(key, decode(key, value, Returned)))
            for text in groups:
                self._entered(partial(self._follow_returned, needs, text))
            self._add_in_flight(needs)  # again, because messages may have gone to another member meanwhile
        return needs

    def _add_places(self, needs: Needs) -> None:
        """Add the places of stored sessions, and of those that are connected here."""
        for text, places in StoredPlaces(self._registry.states).of_filters():
            needs.follow(text, places)
        for client_id in list(self._registry.connected):
            self._entered(partial(self._follow_connected, needs, client_id))

    def _add_in_flight(self, needs: Needs) -> None:
        for state in self._registry.states.states:
            for key, value in state.scan(IN_FLIGHT):
                record = decode(key, value, StoredInFlight)
                if not record.topics:
                    needs.send(record.shard, record.first)

    def _follow_group(self, needs: Needs, text: str) -> None:
        group = self._registry.groups.find(text)
        if group is not None:
            needs.follow_group(text, group.filter.topic_filter, group.delivered_places())

    def _follow_returned(self, needs: Needs, text: str) -> None:
        group = self._registry.groups.find(text)
        for assignment in () if group is None else group.assignments:
            needs.send_all(assignment.shard, assignment.behind(assignment.committed))

    def _follow_connected(self, needs: Needs, client_id: str) -> None:
        session = self._registry.connected.get(client_id)
        for cursor in () if session is None else session.cursors.values():
            if isinstance(cursor, FilterCursor) and cursor.places:
                needs.follow(cursor.topic_filter.text, cursor.settled_places())
