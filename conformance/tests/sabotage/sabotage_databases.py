"""Databases whose logical layer breaks one promise each, and the test that must tell it."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import attrs
import msgspec
import topicstore.opening
from sabotage import Saboteur, suites_of
from topicstore import DataLossError, GenerationDroppedError, InvalidMessageError, Message, MessageBatch, StateWrite
from topicstore.contract.requests import ReadResult
from topicstore.database import Database
from topicstore.storage.shard_map import ShardMap
from topicstore_conformance.database.suite import DatabaseSuite
from topicstore_conformance.subjects.pairs import Pair, pair_of

S = DatabaseSuite
SABOTEURS: list[Saboteur] = []


def pair(database: type[Database], backend: str) -> Pair:
    """Have all databases that are opened from now on be the saboteur's; each has a test class of its own."""
    os.environ["SABOTEUR"] = database.__name__  # see sitecustomize.py
    take_over(database.__name__)
    return pair_of(backend, "block")


def take_over(name: str) -> None:
    """Have all databases that this process opens from now on be those of a saboteur."""
    topicstore.opening.Database = globals()[name]  # type: ignore[misc]


def breaks(promise: Callable[..., object], on: str = "memory", **how: Any) -> Any:
    """Register a saboteur, a subclass of `Database`, and the test that must fail of it."""

    def register(kind: type[Database]) -> type[Database]:
        what = (kind.__doc__ or "").strip()
        SABOTEURS.append(Saboteur(kind.__name__, what, promise.__qualname__, partial(pair, kind, on), **how))
        return kind

    return register


class Fetching(Database):
    """All its batches are fetched by `fetched`, which is given what would fetch them."""

    def __init__(self, *arguments: Any, **how: Any) -> None:
        super().__init__(*arguments, **how)
        self.storage.read = partial(self.fetched, self.storage.read)  # type: ignore[method-assign]

    def fetched(self, fetch: Callable[..., ReadResult], cursor: Any, limit: int, **how: Any) -> ReadResult:
        raise NotImplementedError


# --- storing ---------------------------------------------------------------------------------


@breaks(S.test_what_was_stored_is_seen_at_once)
class SeenLater(Fetching):
    """Shows a thread what it stored when it has stored again."""

    def __init__(self, *arguments: Any, **how: Any) -> None:
        super().__init__(*arguments, **how)
        self.seen = threading.local()

    def store(self, messages: Iterable[Message], **how: Any) -> Any:
        result = super().store(messages, **how)
        self.seen.last = min(result.ids).position - 1
        return result

    def fetched(
        self, fetch: Callable[..., ReadResult], cursor: Any, limit: int, *, bound: int | None = None, **how: Any
    ) -> ReadResult:
        if bound is not None:
            bound = min(bound, getattr(self.seen, "last", bound))
        return fetch(cursor, limit, bound=bound, **how)


@breaks(S.test_one_bad_message_refuses_its_batch)
class KeepsTheGood(Database):
    """Stores the messages in front of a bad one."""

    def store(self, messages: Any, **how: Any) -> Any:
        try:
            return super().store(messages, **how)
        except InvalidMessageError as refused:
            if refused.index:
                super().store(messages[: refused.index], **how)
            raise


class Moving(ShardMap):
    """Another shard for everybody at each turn."""

    turn = 0

    def of(self, client_id: str) -> int:
        return (super().of(client_id) + self.turn) % self.shards


@breaks(S.test_a_publisher_stays_in_its_shard)
class MovesPublishers(Database):
    """Sends publishers to other shards once there is another generation."""

    def add_generation(self, *arguments: Any) -> int:
        added = super().add_generation(*arguments)
        self.storage.shard_map = Moving(self.storage.shard_map.shards)
        self.storage.shard_map.turn = added
        return added


@breaks(S.test_state_beside_messages)
class StateLater(Database):
    """Commits state after the messages, in a write of its own."""

    def store(self, messages: Any, *, state: Mapping[int, Sequence[StateWrite]] | None = None) -> Any:
        result = super().store(messages)
        for shard, writes in (state or {}).items():
            self.state(shard).write(writes)
        return result


@breaks(S.test_state_conflict_refuses_all_shards)
class ShardByShard(Database):
    """Commits state shard by shard, each as far as its own conditions hold."""

    def store(self, messages: Any, *, state: Mapping[int, Sequence[StateWrite]] | None = None) -> Any:
        for shard, writes in (state or {}).items():
            self.state(shard).write(writes)
        return super().store(messages)


@breaks(S.test_delete_leaves_what_comes_after_the_call)
class DeletesOn(Database):
    """Goes on deleting what is stored after a delete."""

    deleted = ""

    def delete(self, topic_filter: str, *times: Any) -> int:
        self.deleted = topic_filter
        return super().delete(topic_filter, *times)

    def store(self, messages: Any, **how: Any) -> Any:
        result = super().store(messages, **how)
        if self.deleted:
            super().delete(self.deleted)
        return result


# --- reading ---------------------------------------------------------------------------------


@breaks(S.test_a_long_batch)
class LosesTheLast(Fetching):
    """Loses the last message of a batch that is read."""

    def fetched(self, fetch: Callable[..., ReadResult], cursor: Any, limit: int, **how: Any) -> ReadResult:
        found = fetch(cursor, limit, **how)
        return attrs.evolve(found, batch=found.batch[:-1]) if len(found.batch) > 1 else found


@breaks(S.test_empty_batch_is_not_the_end)
class EndsWhenEmpty(Fetching):
    """Says that a stream is at its end when there is nothing more yet."""

    def fetched(self, fetch: Callable[..., ReadResult], cursor: Any, limit: int, **how: Any) -> ReadResult:
        found = fetch(cursor, limit, **how)
        return attrs.evolve(found, end_of_stream=found.caught_up)


@breaks(S.test_until_does_not_end_a_sealed_stream_early)
class EndsAtUntil(Fetching):
    """Says that a sealed stream is at its end when it was read up to a time."""

    def fetched(self, fetch: Callable[..., ReadResult], cursor: Any, limit: int, **how: Any) -> ReadResult:
        found = fetch(cursor, limit, **how)
        sealed = cursor.generation < self.storage.shards[cursor.shard].current
        return attrs.evolve(found, end_of_stream=found.end_of_stream or (found.caught_up and sealed))


@breaks(S.test_start_inclusive_until_exclusive)
class UntilIsInside(Database):
    """Gives the messages of the very time at which it is to end."""

    def read(self, cursor: Any, *arguments: Any, until: Any = None, **how: Any) -> ReadResult:
        return super().read(cursor, *arguments, until=None if until is None else until + 1, **how)


@breaks(S.test_into_a_dropped_generation)
class SilentOnDropped(Fetching):
    """Leaves a cursor into a dropped generation without messages, and without a word."""

    def fetched(self, fetch: Callable[..., ReadResult], cursor: Any, limit: int, **how: Any) -> ReadResult:
        try:
            return fetch(cursor, limit, **how)
        except GenerationDroppedError:
            return ReadResult(batch=MessageBatch.empty(), cursor=cursor, end_of_stream=False, caught_up=True)


@breaks(S.test_replay_into_a_dropped_generation)
class ReplaysWhatIsLeft(Database):
    """Ends a replay whose generation goes under it, as if that were all."""

    def replay(self, *arguments: Any, **how: Any) -> Iterator[Message]:
        messages = super().replay(*arguments, **how)

        def left() -> Iterator[Message]:
            try:
                yield from messages
            except GenerationDroppedError:
                return

        return left()


@breaks(S.test_own_times_are_asked_for_exactly)
class ComparesPositions(Database):
    """Compares the bounds of a replay with positions, whatever it is told."""

    def replay(self, *arguments: Any, **how: Any) -> Iterator[Message]:
        return super().replay(*arguments, **{**how, "by": "position"})


@breaks(S.test_replay_ends_at_the_watermark_of_its_call)
class ReplaysLater(Database):
    """Finds out where a replay ends when its first message is asked for."""

    def replay(self, *arguments: Any, **how: Any) -> Iterator[Message]:
        yield from super().replay(*arguments, **how)


@breaks(S.test_survive_restarts_and_drops, on="rocksdb")
class SkipsAfterRestarts(Database):
    """Goes on one message too late with a cursor of an earlier life."""

    def __init__(self, *arguments: Any, **how: Any) -> None:
        super().__init__(*arguments, **how)
        self.made: set[bytes] = set()

    def cursor(self, *arguments: Any) -> Any:
        cursor = super().cursor(*arguments)
        self.made.add(cursor.to_bytes())
        return cursor

    def read(self, cursor: Any, *arguments: Any, **how: Any) -> ReadResult:
        if cursor.to_bytes() not in self.made:
            cursor = super().read(cursor, 1).cursor
        found = super().read(cursor, *arguments, **how)
        self.made.add(found.cursor.to_bytes())
        return found


@breaks(S.test_cursors_of_another_database)
class TakesAnyCursor(Database):
    """Reads on with a cursor of another database."""

    def read(self, cursor: Any, *arguments: Any, **how: Any) -> ReadResult:
        return super().read(msgspec.structs.replace(cursor, database=self.id), *arguments, **how)


@breaks(S.test_new_streams_appear)
class ListsOnce(Database):
    """Lists the streams that there were when it was asked first."""

    def streams(self, topic_filter: str, *start: Any) -> Any:
        listed = self.__dict__.setdefault("listed", {})
        if (topic_filter, start) not in listed:
            listed[topic_filter, start] = super().streams(topic_filter, *start)
        return listed[topic_filter, start]


# --- damage ----------------------------------------------------------------------------------


@breaks(S.test_what_is_salvaged_was_stored, "rocksdb")
class MissesByName(Database):
    """Has fewer messages for who asks for a topic by its name."""

    def replay_arrow(self, topic_filter: str, *arguments: Any, **how: Any) -> Iterator[Any]:
        batches = list(super().replay_arrow(topic_filter, *arguments, **how))
        return iter(batches if "#" in topic_filter or "+" in topic_filter else batches[1:])


@breaks(S.test_power_failure, "rocksdb", raises=(DataLossError,))
class TrustsTheSystem(Database):
    """Calls durable what only the operating system has."""

    def __init__(self, *arguments: Any, **how: Any) -> None:
        super().__init__(*arguments, **how)
        for shard in self.storage.shards:
            shard.log.engine.flush_log = lambda: None  # type: ignore[method-assign]


@breaks(S.test_synced_writes_do_not_vanish, "rocksdb")
class TakesNoNotes(Database):
    """Notes nowhere which write has reached the disk."""

    def __init__(self, *arguments: Any, **how: Any) -> None:
        super().__init__(*arguments, **how)
        for shard in self.storage.shards:
            shard.log._note_synced = lambda *_: True


# --- living on -------------------------------------------------------------------------------


@breaks(S.test_closed)
class AnswersWhenClosed(Database):
    """Answers what it can from memory when it is closed."""

    def __init__(self, *arguments: Any, **how: Any) -> None:
        super().__init__(*arguments, **how)
        self.storage.check_open = lambda: None  # type: ignore[method-assign]


@breaks(S.test_a_forked_child, "rocksdb")
class FlushesInForks(Database):
    """Lets a forked child believe that it has flushed its parent's messages."""

    def __init__(self, *arguments: Any, **how: Any) -> None:
        super().__init__(*arguments, **how)
        self.owner = os.getpid()

    def flush(self) -> None:
        if os.getpid() == self.owner:
            super().flush()


globals().update(suites_of(DatabaseSuite, SABOTEURS, "pair"))
