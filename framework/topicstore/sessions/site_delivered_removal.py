"""`SiteDeliveredRemoval`: the removal of messages that were stored only for sessions, on one site of a cluster.

A site removes such messages from the shards that it owns. It keeps a copy of every shard, and first applies the logs to
their ends, so it finds everything that any session had committed by then. Other sites write notes of the places that
only their memory holds (`topicstore.sessions.interest_notes`). While a shard of another site has no note, nothing is
removed. A subscription made during a removal receives later messages. If it begins in the past, its record ends the
removal within a step.

A message of a shared subscription moves between shards: it is unread, in flight at a member, handed back, waiting for
another member, and in flight again. The site applies the logs again before it reads each of these stages. So a copy of
one shard is never older than the records read before from another one. If a message was handed back meanwhile, the
reads are repeated.

A site that lacks a copy of any shard removes nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import attrs

from topicstore.contract.errors import ShardElsewhereError, ShardMovedError, TopicstoreError
from topicstore.lifecycle.retention import Retention
from topicstore.replication.site import Site
from topicstore.runtime.closing import raise_all
from topicstore.shard.state import Applied
from topicstore.storage.storage import Storage

from .delivered_removal import DeliveredRemoval, Needs
from .interest_notes import BEGUN_IN_PAST, InterestNotes
from .locks import Around
from .records import decode
from .registry import SessionRegistry
from .shared.records import (
    GROUP,
    HANDED_BACK,
    MEMBER,
    RETURNED,
    REVOKED,
    STANDING,
    WAITING,
    HandBackRecord,
    Returned,
    ReturnedRecord,
    group_of,
    messages_of,
    positions_of,
)
from .shared.stored_group import StoredGroup

__all__ = ["SiteDeliveredRemoval"]

_TRIES = 3
"""The number of times that one run reads the sessions' needs, if they change during the read."""
_Seen = tuple[Applied | None, ...]


@attrs.frozen
class _Copies:
    """The state of this site's copies when it read the sessions' needs."""

    opened: tuple[Applied, ...]
    """`ShardWriter.opened` of each shard, which changes when a copy replaces the shard's contents."""
    begun_in_past: _Seen
    """By shard, the last applied write that records a subscription begun in the past."""


class SiteDeliveredRemoval(DeliveredRemoval):
    """The removal of delivered messages on one site of a cluster."""

    def __init__(
        self, registry: SessionRegistry, retention: Retention, entered: Around, notes: InterestNotes, site: Site
    ) -> None:
        super().__init__(registry, retention, entered)
        self._notes = notes
        self._site = site
        self._copies: _Copies | None = None
        """The copies from which the current run has read the sessions' needs."""

    def remove(self) -> int:
        """Commit this site's notes, and remove the old messages that no session needs; return their number."""
        failures: Mapping[int, TopicstoreError] = {}
        if self._retention.settings.delivered is not None:
            epochs = self._registry.epochs()
            failures = self._notes.commit([shard for shard, epoch in enumerate(epochs) if epoch is not None])
        removed = super().remove()
        moved = (ShardElsewhereError, ShardMovedError)
        raise_all([failure for failure in failures.values() if not isinstance(failure, moved)], "could not be noted")
        return removed

    def _holds(self, storage: Storage, _: Needs) -> bool:
        self._site.refresh()
        return self._whole(storage) and self._copies == self._applied(storage)

    def _needs(self, storage: Storage) -> Needs | None:
        for _ in range(_TRIES):
            self._site.refresh()
            before = self._copies = self._applied(storage)
            if not self._whole(storage):
                return None
            needs = Needs(len(storage.shards))
            if not self._add_notes(needs):
                return None
            self._add_places(needs)
            texts = self._group_texts()
            unmoved = self._add_groups(needs, texts) if texts else True
            self._add_in_flight(needs)  # includes messages that the group has assigned to a member meanwhile
            if unmoved and self._whole(storage) and before.opened == self._applied(storage).opened:
                return needs
        return None

    def _applied(self, storage: Storage) -> _Copies:
        return _Copies(tuple(shard.writer.opened for shard in storage.shards), self._seen(BEGUN_IN_PAST))

    def _seen(self, *heads: bytes) -> _Seen:
        states = self._registry.states.states
        return tuple(
            None if state.last_applied is None else state.last_applied(head) for head in heads for state in states
        )

    @staticmethod
    def _whole(storage: Storage) -> bool:
        return not any(shard.writer.elsewhere for shard in storage.shards)

    def _add_notes(self, needs: Needs) -> bool:
        """Add the places in the notes of other sites' shards; return False if one of these shards has no note."""
        for shard, epoch in enumerate(self._registry.epochs()):
            note = self._notes.stored(shard) if epoch is None else None
            if note is not None:
                needs.bounds = list(map(min, needs.bounds, note.horizon))
                for text, places in note.filters.items():
                    needs.follow(text, places)
            elif epoch is None:
                return False
        return True

    # --- shared subscriptions ---

    def _group_texts(self) -> list[str]:
        """Return the shared subscriptions that have records, including those without a member."""
        states = self._registry.states.states
        heads = (GROUP, MEMBER, STANDING)
        return sorted({group_of(key) for state in states for head in heads for key, _ in state.scan(head)})

    def _add_groups(self, needs: Needs, texts: list[str]) -> bool:
        """Add the messages that shared subscriptions need, stage by stage, in the order in which messages pass them.

        Returns False if messages were handed back meanwhile, because some of these may have been missed.
        """
        states = self._registry.states
        for text in texts:
            group = StoredGroup(states.states, states.states[states.shard_of(text)], text)
            needs.follow_group(text, group.filter.topic_filter, group.places)
        self._site.refresh()
        self._add_in_flight(needs)
        self._site.refresh()
        handed_back = self._seen(HANDED_BACK, REVOKED)
        for key, value in self._scan(REVOKED):
            needs.send_all(*messages_of(key, decode(key, value, Returned)))
        for key, value in self._scan(HANDED_BACK):
            handed = decode(key, value, HandBackRecord)
            if handed.steps:
                needs.send_all(handed.shard, positions_of(handed))
        self._site.refresh()
        for key, value in self._scan(RETURNED):
            needs.send_all(*messages_of(key, decode(key, value, Returned)))
        for key, value in self._scan(WAITING):
            waiting = decode(key, value, ReturnedRecord)
            needs.send_all(waiting.shard, positions_of(waiting))
        self._site.refresh()
        return handed_back == self._seen(HANDED_BACK, REVOKED)

    def _scan(self, head: bytes) -> Iterator[tuple[bytes, bytes]]:
        for state in self._registry.states.states:
            yield from state.scan(head)
