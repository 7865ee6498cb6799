"""`SharedCursor`: the cursor of the messages of a shared subscription that are assigned to one member."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

from topicstore.contract.errors import TopicstoreError
from topicstore.contract.positions import Positions, time_of
from topicstore.contract.state import StateWrite
from topicstore.contract.topics import TopicFilter
from topicstore.pubsub.message_expiry import left_of
from topicstore.pubsub.read_cache import ReadSlice
from topicstore.sessions.cursors import SessionCursor
from topicstore.sessions.delivery_batch import SelectedMessages, only, selected_at
from topicstore.sessions.model import SubscribeOptions
from topicstore.sessions.records import VERSION, Keys, OptionsPeriod, SubscriptionRecord, put

from .reader import ABOVE_ALL, ROWS, Assignment, GroupReader, Partitions, pack_places, partitions_of_locked
from .records import LeaseRecord, returned

__all__ = ["SharedCursor"]


class SharedCursor(SessionCursor):
    """A member of a group: the messages of the partitions assigned to it, and messages returned to the group.

    The group assigns and revokes partitions between two calls of a session. All of the group's messages are stored, so
    the member reads from the streams also at QoS 0.
    """

    __slots__ = (
        "_assignments_fail",
        "_behind",
        "_failing",
        "_keys",
        "_last_assignment",
        "_moved",
        "_ready",
        "_refused",
        "assignments",
        "delivering",
        "group",
        "mine",
        "needs_packet_id",
        "number",
        "options",
        "slow",
        "topic_filter",
    )

    cost = 64
    """The number of reads for which one `read` counts: perhaps only few of the rows that it reads are its own."""
    missed = 0
    """Always 0, because all of the group's messages are stored."""

    def __init__(
        self,
        group: GroupReader,
        keys: Keys,
        number: int,
        options: SubscribeOptions,
        ready: Callable[[SessionCursor], None],
    ) -> None:
        self.group = group
        self._keys = keys
        self._ready = ready
        self.number = number
        self.topic_filter = TopicFilter(group.filter.text)
        self.change(options)
        self.mine: Partitions = np.zeros(group.places.shape, np.bool_)
        """By shard, the partitions assigned to this member. Changed by the group."""
        self.assignments: list[Assignment] = []
        """The returned messages that this member delivers. Changed by the group."""
        self.slow = False
        """Whether the window has been full for long, so that other members get the partitions."""
        self.delivering = False
        """Whether there is an uncommitted delivery, so that no partition can be revoked."""
        self._behind: dict[int, None] = {}
        """The shards that may have messages to read."""
        self._failing: dict[int, None] = {}
        """The shards that could not be read."""
        self._assignments_fail = False
        """Whether returned messages could not be read; then newer messages wait for them."""
        self._moved = False
        self._last_assignment: tuple[Assignment, int] | None = None
        """The assignment of the last read, and its place before; None if the last read was from the streams."""
        self._refused: list[tuple[int, Positions]] = []
        """Shards and positions of messages of the streams that ``allow`` refused, until they are committed."""

    def change(self, options: SubscribeOptions) -> None:
        """Change the options by which messages are delivered from now on."""
        self.options = options
        self.needs_packet_id = options.qos > 0

    # --- as `Member` ---

    @property
    def client_id(self) -> str:
        """The client id of the cursor's session."""
        return self._keys.client_id

    def wake(self, shard: int) -> None:
        """Record that a shard may have messages to read."""
        self._behind[shard] = None
        self._ready(self)

    def assign(self, assignment: Assignment) -> None:
        """Deliver messages that were returned to the group."""
        self.assignments.append(assignment)
        self._ready(self)

    def forget(self, shard: int) -> None:
        """Stop reading a shard, because the member has no partition of it any more."""
        self._behind.pop(shard, None)
        self._failing.pop(shard, None)

    # --- reading ---

    def read(self, limit: int, now: int) -> SelectedMessages | None:
        """Return at most ``limit`` of the next messages; None if there are none now."""
        if self._assignments_fail:
            return None
        for assignment in self.assignments:
            if assignment.place < assignment.last:
                return self._read_assignment(assignment, limit, now)
        for shard in self._behind:
            return self._read(shard, limit, now)
        return None

    def _read(self, shard: int, limit: int, now: int) -> SelectedMessages:
        """Read a shard after the lowest place of this member's partitions."""
        group = self.group
        self._last_assignment = None
        places = group.places[shard]
        del self._behind[shard]
        try:
            read_slice = group.feed.read(shard, int(places[self.mine[shard]].min()), ROWS)
        except TopicstoreError:
            self._failing[shard] = None  # other shards are still read
            raise
        group.note_dropped(read_slice.dropped)
        rows = self._rows(read_slice, shard, places)
        place, more = read_slice.position, len(rows) > limit
        if more:
            rows = rows[:limit]
            place = int(read_slice.whole.positions[rows[-1]])
        group.advance(shard, self.mine[shard], place)
        self._moved = True
        if more or not read_slice.caught_up:
            self._behind[shard] = None  # the shard's turn comes last
        else:
            group.rest(self, shard)
        selected = selected_at(read_slice.whole, rows, self.topic_filter.text, shard, self.options, now)
        self.delivering |= len(selected) > 0
        return selected

    def _rows(self, read_slice: ReadSlice, shard: int, places: npt.NDArray[np.uint64]) -> npt.NDArray[np.intp]:
        """Return the rows of the read batch that are in this member's partitions, and after their places."""
        if not len(read_slice):
            return np.empty(0, np.intp)
        behind = np.where(self.mine[shard], places, ABOVE_ALL)
        own = (
            read_slice.whole.positions[read_slice.rows]
            > behind[partitions_of_locked(read_slice.whole)[read_slice.rows]]
        )
        rows: npt.NDArray[np.intp] = np.flatnonzero(own) + read_slice.rows.start
        return rows

    def _read_assignment(self, assignment: Assignment, limit: int, now: int) -> SelectedMessages:
        """Read messages of an assignment; messages that were deleted or have expired are left out."""
        before = assignment.place
        positions = assignment.behind(before)[:limit]
        try:
            found = self.group.feed.fetch(assignment.shard, positions.tolist())
        except TopicstoreError:
            self._assignments_fail = True
            raise
        assignment.place = int(positions[-1])
        self._last_assignment = assignment, before
        self._moved = True
        kept, messages, expiry = [], [], []
        for position, message in sorted(found.items()):
            left = left_of(message, time_of(position), now)
            if left != 0:
                kept.append(position)
                messages.append(message)
                expiry.append(left)
        self.delivering |= bool(kept)
        if not kept and assignment.committed == before:
            assignment.committed = assignment.place  # all messages up to the place have expired or were deleted
        options = self.options
        return SelectedMessages(
            self.topic_filter.text,
            assignment.shard,
            options,
            messages,
            [min(message.qos, options.qos) for message in messages],
            np.array(kept, np.uint64),
            None,
            [message.retain for message in messages] if options.retain_as_published else False,
            expiry,
        )

    def permitted(self, selected: SelectedMessages, answers: Sequence[bool]) -> SelectedMessages:
        """Return ``selected``, the result of the last `read`, without the messages that ``answers`` refuses.

        Refused messages are returned to the group, for another member. Messages read from the streams are returned when
        the selected messages are committed. Messages of an assignment are returned at once, and the rest of the
        assignment is read again.
        """
        if all(answers) or selected.positions is None:
            return selected
        refused = selected.positions[~np.array(answers, np.bool_)]
        if self._last_assignment is None:
            self._refused.append((selected.shard, refused))
            return only(selected, answers)
        assignment, before = self._last_assignment
        assignment.place = before
        self.group.part(assignment, refused, self)
        return SelectedMessages(self.topic_filter.text, selected.shard, self.options, (), 0, None)

    def try_again(self) -> None:
        """Read again the shards and assignments that failed."""
        self._assignments_fail = False
        self._behind.update(self._failing)
        self._failing.clear()

    # --- storing ---

    def everything(self) -> list[StateWrite]:
        """Return the writes that store the subscription."""
        record = SubscriptionRecord(VERSION, self.topic_filter.text, (OptionsPeriod(self.options),))
        return [put(self._keys.subscription(self.number), record)]

    def writes(self) -> list[StateWrite]:
        """Return the writes that store the places, if they have moved."""
        if not self._moved:
            return []
        places = pack_places(self.group.places, self.mine)
        read_to = tuple((assignment.shard, assignment.first, assignment.place) for assignment in self.assignments)
        revoked = [
            put(self.group.keys.revoked_at(shard, int(refused[0])), returned(refused))
            for shard, refused in self._refused
        ]
        return [put(self._keys.leases(self.number), LeaseRecord(VERSION, places, read_to)), *revoked]

    def committed(self) -> None:
        """Make the current places final, because the write that stores them is committed."""
        if self._moved:
            self._moved = self.delivering = False
            refused, self._refused = self._refused, []
            self.group.note_refused(self, refused)
            self.group.apply(self)

    def rewind(self) -> None:
        """Return to the places of the last `committed`, so that the messages read since are read again."""
        if self._moved:
            self._moved = self.delivering = False
            self._refused = []
            self.group.rewind(self)
            for shard in np.flatnonzero(self.mine.any(axis=1)).tolist():
                self.wake(shard)
            self._ready(self)

    def close(self) -> None:
        """Return all partitions and assignments to the group."""
        self.group.detach(self)

    # --- inspecting ---

    @property
    def places(self) -> list[int]:
        """By shard, the position up to which this member's messages were read; 0 for a shard without its partitions."""
        own = np.where(self.mine, self.group.places, ABOVE_ALL).min(axis=1)
        return [0 if place == ABOVE_ALL else int(place) for place in own]

    @property
    def dropped(self) -> tuple[int, ...]:
        """The generations that were dropped, since this member's last disconnect, before the group had read them."""
        membership = self.group.members.get(self.client_id)
        return self.group.dropped[membership.reported if membership else 0 :]

    def unread(self) -> list[int]:
        """Return the shards that may have messages to read, including those whose read failed."""
        return [*self._behind, *self._failing]
