"""What the framework may do wrong, on any engine and layout, and the promise that it breaks."""

from __future__ import annotations

import itertools
import os
import time
from collections import Counter
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import attrs
import msgspec
import topicstore as ts
from changes import also, argument, disguise, fail, late, lie, nth, result, stale, swallow, when
from running import M, suites_of
from topicstore import MessageBatch, opening
from topicstore.contract.cursors import Cursor
from topicstore.contract.engine import WriteBatch
from topicstore.contract.layout import SlabStep
from topicstore.contract.requests import ReadResult
from topicstore.shard.commit_log import CommitLog
from topicstore.shard.epochs import Epochs
from topicstore.shard.generations import Generations
from topicstore.shard.reads import Reads
from topicstore.shard.shard import Shard
from topicstore.shard.state import ShardState
from topicstore.shard.write_path import WritePath
from topicstore.storage import opening as storage_opening
from topicstore.storage import shard_opener
from topicstore.storage.compaction import CompactionScheduler
from topicstore.storage.directory_lock import DirectoryLock
from topicstore.storage.shard_map import ShardMap
from topicstore.storage.shard_opener import ShardOpener
from topicstore.storage.storage import Storage
from topicstore.storage.synced_writes import SyncedWrites
from topicstore.storage.writer import Writer, _StoredLater
from topicstore_backends.rocksdb import RocksdbEngine
from topicstore_conformance.database.suite import DatabaseSuite
from topicstore_conformance.subjects.pairs import Pair, pair_of
from topicstore_layouts.block.layout import BlockLayout

Call = Callable[..., Any]
Given = dict[str, Any]
EMPTY = MessageBatch.empty()

# What rows name.
DATABASE, STORAGE, WRITER, FUTURE, CURSOR, MAP = ts.Database, Storage, Writer, _StoredLater, Cursor, ShardMap
LOG, WRITES, EPOCHS, READS, SHARD, STATE, OPENER = CommitLog, WritePath, Epochs, Reads, Shard, ShardState, ShardOpener
LOCK, SCHEDULER, SYNCED, ENGINE, BLOCK = DirectoryLock, CompactionScheduler, SyncedWrites, RocksdbEngine, BlockLayout
OPENING, MAKING, REACHING, GENERATIONS = opening, storage_opening, shard_opener, Generations


def subject_of(row: M) -> Pair:
    return pair_of(*row.on.split("-"))


# --- what rows say of messages and steps -----------------------------------------------------


def messages(changed: Callable[[Any], Any]) -> Any:
    """Store other messages, each a function of what was given."""
    return argument(messages=lambda given: [changed(message) for message in given])


def fetched(changed: Callable[[SlabStep, bool, Any, Given], tuple[SlabStep, bool]]) -> Any:
    """Return another step of a stream, and whether that has ended."""
    return lambda call, me, given: changed(*call(), me, given)


def but_the_first(found: SlabStep) -> SlabStep:
    return attrs.evolve(found, batch=found.batch[1:]) if len(found.batch) > 1 else found


LOSES = {"SHARD.next": fetched(lambda found, ended, me, given: (but_the_first(found), ended))}
SKIPS_DAMAGE = {
    "SHARD.next": lambda call, me, given: swallow(
        ts.CorruptionError,
        ts.NewerFormatError,
        value=(SlabStep(batch=EMPTY, place=given["place"], exhausted=True), True),
    )(call, me, given)
}
NO_DAMAGE = {"DATABASE.verify": result(lambda report: attrs.evolve(report, damages=[]))}
NO_END = {"SHARD.next": fetched(lambda found, ended, me, given: (found, False))}
COMPACTED = {
    "SHARD.compact": also(lambda me, given: vars(me).update(compacted=True)),
    "SHARD.next": lambda call, me, given: fetched(
        lambda found, ended, me, given: (but_the_first(found) if vars(me).get("compacted") else found, ended)
    )(call, me, given),
}


def in_parts(call: Call, me: Any, given: Given) -> None:
    """Write each run of a batch by itself."""
    for number, run in enumerate(given["batch"].runs):
        part = WriteBatch()
        part.ranges, part.runs = [] if number else given["batch"].ranges, [run]
        call(batch=part)


def keep_the_good(call: Call, me: Any, given: Given) -> Any:
    try:
        return call()
    except ts.InvalidMessageError as refused:
        if refused.index:
            call(messages=given["messages"][: refused.index])
        raise


def state_later(call: Call, me: Any, given: Given) -> Any:
    found = call(state=None)
    for shard, writes in (given["state"] or {}).items():
        me.state(shard).write(writes)
    return found


def state_by_shard(call: Call, me: Any, given: Given) -> Any:
    for shard, writes in (given["state"] or {}).items():
        me.state(shard).write(writes)
    return call(state=None)


def delete_on(call: Call, me: Any, given: Given) -> Any:
    found = call()
    if "deleted" in vars(me):
        DATABASE.delete(me, me.deleted)
    return found


def watermark_late(call: Call, me: Any, given: Given) -> Any:
    """Show each commit with the next one."""
    before, found = vars(me).get("committed", me.watermark), call()
    me.committed, me.watermark = me.watermark, before
    return found


def watermark_back(call: Call, me: Any, given: Given) -> None:
    """Take back, after a flush, what was shown meanwhile."""
    before = me.watermark
    call()
    me.watermark = before


def watermark_early(me: Any, given: Given) -> None:
    me.watermark = me.tail.last_position


def own_cursors_only(call: Call, me: Any, given: Given) -> ReadResult:
    """Go on one message too late with a cursor of an earlier opening."""
    made = vars(me).setdefault("made", set())
    cursor = given["cursor"]
    found = call(cursor=cursor if cursor.to_bytes() in made else call(limit=1).cursor)
    made.add(found.cursor.to_bytes())
    return found


def note_cursor(call: Call, me: Any, given: Given) -> Any:
    cursor = call()
    vars(me).setdefault("made", set()).add(cursor.to_bytes())
    return cursor


def by_name_less(call: Call, me: Any, given: Given) -> Iterator[Any]:
    batches = list(call())
    return iter(batches if "#" in given["topic_filter"] or "+" in given["topic_filter"] else batches[1:])


def empty_copy(me: Any, given: Given) -> None:
    with ts.open(given["path"]) as copy:
        copy.delete("#")


def forget_position(call: Call, me: Any, given: Given) -> Any:
    shard = call()
    shard.log.tail = msgspec.structs.replace(shard.log.tail, last_position=1, last_time=0)
    return shard


def sealed_ends(call: Call, me: Any, given: Given) -> Any:
    """End a stream whose generation was sealed, as if it had been read."""
    sealed = given["generation"] < me.current
    return (SlabStep(batch=EMPTY, place=given["place"], exhausted=True), True) if sealed else call()


def stand_still(call: Call, me: Any, given: Given) -> Any:
    timed = given["deadline"] is not None and given["deadline"] <= time.monotonic()
    return (SlabStep(batch=EMPTY, place=given["place"], exhausted=False), False) if timed else call()


def note_flush(call: Call, me: Any, given: Given) -> None:
    me.flushing = True
    try:
        call()
    finally:
        me.flushing = False


BESIDE_A_FLUSH = {"LOG._flush": note_flush, "LOG.settle": when(lambda me, given: vars(me).get("flushing"), lie())}
UNFINISHED = {
    "MAKING.complete_generations": when(lambda me, given: any(shard.current for shard in given["shards"]), lie())
}
OWNER, TURNS = os.getpid(), Counter[str]()
STORE, READ, REPLAY, NEXT, DROP = (
    "DATABASE.store",
    "DATABASE.read",
    "DATABASE.replay",
    "SHARD.next",
    "DATABASE.drop_generation",
)
MEMORY, EPOCHAL, DISK = "memory-block", "memory-wildcard_optimized", "rocksdb-block"
# fmt: off
ROWS = [
    *(M("nothing", "", {}, on) for on in (MEMORY, EPOCHAL, DISK)),
    # storing
    M("each commit is shown with the next", "test_what_was_stored_is_seen_at_once", {"LOG.commit_locked": watermark_late}, MEMORY),
    M("what is before a bad message is stored", "test_one_bad_message_refuses_its_batch", {STORE: keep_the_good}, MEMORY),
    M("large payloads are stored as far as they go", "test_payload_too_large", {STORE: swallow(ts.MessageTooLargeError)}, MEMORY),
    M("what isn't messages is left out", "test_what_is_not_messages", {STORE: swallow(ts.InvalidMessageError, ts.InvalidArgumentError)}, MEMORY),
    M("publishers move with each generation", "test_a_publisher_stays_in_its_shard", {"DATABASE.add_generation": also(lambda me, given: TURNS.update("g")), "MAP.of": lambda call, me, given: (call() + TURNS["g"]) % me.shards}, MEMORY),
    M("state is committed after the messages", "test_state_beside_messages", {STORE: state_later}, MEMORY),
    M("state is committed shard by shard", "test_state_conflict_refuses_all_shards", {STORE: state_by_shard}, MEMORY),
    M("everybody wins", "test_one_of_many_wins_a_condition", {STORE: swallow(ts.StateConflictError, value=SimpleNamespace(count=1))}, MEMORY),
    M("a shard's state is in reverse", "test_state_scan_is_ordered_and_hides_what_is_not_its_own", {"STATE.scan": result(lambda pairs: iter(list(pairs)[::-1]))}, MEMORY),
    M("messages too far ahead are stored", "test_too_far_ahead", {"WRITES._refuse_ahead": lie()}, MEMORY),
    M("late messages are left out", "test_late", {STORE: swallow(ts.LateMessageError)}, MEMORY),
    M("lifted messages aren't counted", "test_late_is_lifted_and_counted", {STORE: result(lambda found: attrs.evolve(found, lifted=0))}, MEMORY),
    M("own timestamps are dropped", "test_timestamp_of_a_message_that_is_read", {STORE: messages(lambda m: msgspec.structs.replace(m, timestamp=None))}, MEMORY),
    M("payloads are cut", "test_empty_and_large_payloads", {STORE: messages(lambda m: msgspec.structs.replace(m, payload=m.payload[: 1 << 20]))}, MEMORY),
    M("positions begin anew", "test_positions_increase_over_restarts", {"OPENER.open": forget_position}, DISK, raises=ts.DataLossError),
    M("a clock that is behind isn't told", "test_a_last_position_in_the_future_is_told", {"WRITES._warn_of_clock": lie()}, DISK),
    # reading
    M("fetched batches lack their first message", "test_a_long_batch", LOSES, MEMORY),
    M("fetched batches lack their first message", "test_hostile_topics", LOSES, MEMORY),
    M("fetched batches lack their first message", "test_more_topics_than_memory_keeps", LOSES, MEMORY),
    M("topics have no upper case", "test_every_edge_topic_by_itself", {STORE: messages(lambda m: msgspec.structs.replace(m, topic=m.topic.lower().replace(" ", "")  or "x"))}, MEMORY),
    M("nothing more yet is the end", "test_empty_batch_is_not_the_end", {NEXT: fetched(lambda found, ended, me, given: (found, found.exhausted))}, MEMORY),
    M("a time is the end of a sealed stream", "test_until_does_not_end_a_sealed_stream_early", {NEXT: fetched(lambda found, ended, me, given: (found, ended or (found.exhausted and given["generation"] < me.current)))}, MEMORY),
    M("sealed streams end at once", "test_end_of_stream_comes_with_the_last_message_or_after", {NEXT: fetched(lambda found, ended, me, given: (found, ended or given["generation"] < me.current))}, MEMORY),
    M("until is inside", "test_start_inclusive_until_exclusive", {READ: argument(until=lambda until: None if until is None else until + 1)}, MEMORY),
    M("no time is no step", "test_time_limited_next_moves_on", {NEXT: stand_still}, MEMORY),
    M("replays ignore their times", "test_own_times_are_asked_for_exactly", {REPLAY: argument(by="position")}, MEMORY),
    M("a replay ends where it begins to be read", "test_replay_ends_at_the_watermark_of_its_call", {REPLAY: lambda call, me, given: (message for part in [call] for message in part())}, MEMORY),
    M("replays end when their generation is sealed", "test_replay_spans_a_generation_added_under_it", {NEXT: sealed_ends}, MEMORY),
    M("streams are listed once", "test_new_streams_appear", {"DATABASE.streams": stale(lambda given: tuple(given.values()))}, MEMORY),
    M("the start of streams is ignored", "test_streams_leave_out_generations_before_the_start", {"DATABASE.streams": argument(start=0)}, MEMORY),
    M("no order is kept", "test_order_over_layouts_and_shards", {REPLAY: argument(order="any"), "DATABASE.replay_arrow": argument(order="any")}, MEMORY),
    M("deletes do nothing", "test_machine", {"DATABASE.delete": lie(0)}, MEMORY),
    # cursors
    M("cursors of an earlier opening skip", "test_survive_restarts_and_drops", {"DATABASE.cursor": note_cursor, READ: own_cursors_only}, DISK),
    M("cursors of others are taken", "test_cursors_of_another_database", {READ: lambda call, me, given: call(cursor=msgspec.structs.replace(given["cursor"], database=me.id))}, MEMORY),
    M("dropped generations are empty", "test_into_a_dropped_generation", {READ: lambda call, me, given: swallow(ts.GenerationDroppedError, value=ReadResult(batch=EMPTY, cursor=given["cursor"], end_of_stream=False, caught_up=True))(call, me, given)}, MEMORY),
    M("dropped generations end a replay", "test_replay_into_a_dropped_generation", {REPLAY: swallow(ts.GenerationDroppedError)}, MEMORY),
    M("deletes only count", "test_deleted_messages_never_come_later", {"DATABASE.delete": lie(100)}, MEMORY),
    M("a delete goes on", "test_delete_leaves_what_comes_after_the_call", {"DATABASE.delete": also(lambda me, given: vars(me).update(deleted=given["topic_filter"])), STORE: delete_on}, MEMORY),
    M("compacted batches lack their first message", "test_survive_compaction", COMPACTED, MEMORY),
    M("compacted batches lack their first message", "test_cursors_made_by_one_form_and_used_on_another", COMPACTED, MEMORY),
    M("any bytes are a cursor", "test_garbled_cursors", {"CURSOR.from_bytes": swallow(ts.InvalidCursorError)}, MEMORY),
    M("forged cursors read nothing", "test_forged_cursors", {READ: swallow(ts.InvalidCursorError)}, MEMORY),
    M("newer cursors are damaged", "test_newer_cursor", {"CURSOR.from_bytes": disguise(ts.InvalidCursorError, lambda _: ts.InvalidCursorError("damaged"))}, MEMORY),
    M("missing streams have cursors", "test_stale_streams", {"DATABASE.cursor": swallow(ts.InvalidCursorError)}, MEMORY),
    # refusals
    M("bad filters match nothing", "test_bad_filters", {"DATABASE.streams": swallow(ts.InvalidFilterError)}, MEMORY),
    M("shards are counted from the end", "test_bad_arguments_of_reading", {"STORAGE.check_shard": lie()}, MEMORY),
    M("bad generations are left out", "test_bad_generations", {"DATABASE.add_generation": swallow(ts.UnknownPluginError)}, MEMORY),
    M("bad arguments are left out", "test_bad_arguments_of_open", {"OPENING.wanted_fields": swallow(ts.InvalidArgumentError, value={})}, MEMORY),
    M("contradictions are ignored", "test_contradicting_arguments", {"OPENING.check_same": lie()}, DISK),
    M("any directory is a new database", "test_what_is_not_a_database", {"OPENING.read_manifest": swallow(ts.NotADatabaseError)}, MEMORY),
    M("x opens what is there", "test_create_where_one_is", {"OPENING._open_or_create": argument(mode=lambda mode: mode.replace("x", "a"))}, DISK),
    M("who comes last creates", "test_creation_that_lost_a_race", {"MAKING._check_not_overtaken": lie()}, DISK, raises=ts.EngineError),
    M("nobody holds the lock", "test_second_object_in_one_process", {"LOCK._holder": lie("somebody")}, DISK),
    M("nobody holds the lock", "test_second_process", {"LOCK._holder": lie("somebody")}, DISK),
    M("newer records are any error", "test_newer_records", {"OPENING._open_or_create": disguise(ts.NewerFormatError, ts.EngineError)}, DISK, raises=ts.EngineError),
    M("newer messages are left out", "test_newer_messages", SKIPS_DAMAGE, MEMORY),
    M("closed databases answer", "test_closed", {"STORAGE.check_open": lie()}, MEMORY),
    # generations
    M("generations have the first one's layout", "test_each_keeps_its_layout", {"DATABASE.add_generation": argument(layout=None)}, MEMORY),
    M("generations are made later", "test_times_of_generations", {"DATABASE.generations": result(lambda infos: [attrs.evolve(info, created=info.created + 1) for info in infos])}, MEMORY),
    M("each drop is the first", "test_dropping_twice", {DROP: result(lambda _: True)}, MEMORY),
    M("each drop is the first", "test_stays_dropped", {DROP: result(lambda _: True)}, DISK),
    M("generations aren't completed", "test_interrupted_addition_goes_on", UNFINISHED, DISK),
    M("generations aren't completed", "test_interrupted_drop_goes_on", UNFINISHED, DISK),
    M("generations aren't completed", "test_killed_while_adding_and_dropping", {**UNFINISHED, "ENGINE.write": late}, DISK, raises=ts.EngineError),
    M("dropped messages are left", "test_tombstone_is_removed_at_open", {"GENERATIONS._remove": lie()}, DISK),
    M("streams are many", "test_few_streams", {"DATABASE.streams": result(lambda streams: streams * 40)}, MEMORY),
    M("nothing is inherited", "test_learned_structure_is_inherited", {"BLOCK.create": argument(parent=None)}, MEMORY),
    M("nothing is inherited", "test_learned_structure_is_inherited_over_restarts", {"BLOCK.create": argument(parent=None)}, DISK),
    M("checkpoints overwrite", "test_checkpoint", {"DATABASE.checkpoint": swallow(ts.NotADatabaseError)}, DISK),
    M("checkpoints are made by nothing", "test_no_checkpoint", {"DATABASE.checkpoint": swallow(ts.UnsupportedError)}, MEMORY),
    # visibility
    M("fetched batches lack their first message", "test_nothing_is_skipped_or_reordered", LOSES, EPOCHAL),
    M("commits are shown before their epoch ends", "test_an_epoch_is_seen_when_it_is_over", {"READS._visible": lambda call, me, given: me._log.watermark}, EPOCHAL),
    M("epochs don't end in the engine", "test_nothing_comes_before_what_was_seen", {"EPOCHS._commit_end_locked": lie()}, EPOCHAL),
    M("no stream ends", "test_a_generation_ends_its_epoch", NO_END, EPOCHAL),
    M("nobody waits for an epoch", "test_short_epochs_in_real_time", {"EPOCHS.end": argument(wait=False)}, EPOCHAL),
    M("nobody waits for an epoch", "test_a_replay_waits_an_epoch_and_not_longer", {"EPOCHS.end": argument(wait=False)}, EPOCHAL),
    M("replays beside a flush don't wait", "test_two_replays_at_the_end_of_an_epoch", BESIDE_A_FLUSH, EPOCHAL, brief=True),
    M("failures are forgotten", "test_a_shard_that_takes_no_writes", {"LOG.fail": lie()}, MEMORY),
    M("closed is any error", "test_who_waits_is_let_go", {"EPOCHS.end": disguise(ts.DatabaseClosedError, ts.EngineError)}, EPOCHAL),
    # threads
    M("replays lack their first message", "test_readers_beside_writers", {"DATABASE.replay_arrow": result(lambda batches: itertools.islice(batches, 1, None))}, MEMORY),
    M("generations are listed twice", "test_generations_beside_writers", {"DATABASE.generations": result(lambda infos: [*infos, infos[-1]])}, MEMORY),
    M("deletes are miscounted", "test_deleting_beside_writers", {"DATABASE.delete": result(lambda count: count + 1)}, MEMORY),
    M("closed is any error", "test_close_while_others_work", {STORE: disguise(ts.DatabaseClosedError, ts.EngineError)}, MEMORY),
    M("closing ends a replay", "test_close_in_the_middle_of_a_replay", {REPLAY: swallow(ts.DatabaseClosedError)}, MEMORY),
    M("a flush takes back what came meanwhile", "test_a_flush_takes_nothing_back", {"LOG._flush": watermark_back}, MEMORY),
    M("commits are shown before their flush", "test_nothing_is_seen_before_it_is_on_disk", {"LOG.commit_locked": also(watermark_early)}, MEMORY, brief=True),
    M("drops fail beside a flush", "test_everything_at_once_during_a_flush", {DROP: fail(ts.EngineError("now is not the time"))}, MEMORY),
    M("the buffer is stored in reverse", "test_writer_keeps_the_order_of_puts", {"WRITER._store": argument(items=lambda items: items[::-1])}, MEMORY),
    M("the interval never ends", "test_writer_flushes_by_time", {"WRITER._due": lie(False), "WRITER._wait": lie()}, MEMORY, waits="TimeoutError", raises=TimeoutError),
    M("any buffer is stored at once", "test_writer_waits_for_its_interval_or_flush", {"WRITER._due": lambda call, me, given: bool(me._buffer)}, MEMORY),
    M("closed writers take messages", "test_writer_close", {"WRITER.put": swallow(ts.DatabaseClosedError)}, MEMORY),
    M("closed writers take messages", "test_writer_over_a_closed_database", {"WRITER.put": swallow(ts.DatabaseClosedError)}, MEMORY),
    M("failures are kept", "test_writer_failures_go_to_the_futures", {"WRITER._tell_locked": lie()}, MEMORY),
    M("cancelled messages are stored", "test_writer_cancelled_futures", {"FUTURE.cancel": lie(True)}, MEMORY),
    # compaction
    M("replays lack their first message", "test_readers_beside_writers_and_compactions", {"DATABASE.replay_arrow": result(lambda batches: itertools.islice(batches, 1, None))}, MEMORY),
    M("deletes are miscounted", "test_deletes_beside_compactions", {"DATABASE.delete": result(lambda count: count + 1)}, MEMORY),
    M("drops count twice", "test_generations_beside_compactions", {DROP: result(lambda dropped: 2 * dropped)}, MEMORY),
    M("checkpoints are empty", "test_checkpoints_beside_compactions", {"DATABASE.checkpoint": also(empty_copy)}, DISK),
    M("closed is any error", "test_close_beside_a_compaction", {"DATABASE.compact": disguise(ts.DatabaseClosedError, ts.EngineError)}, MEMORY),
    M("the background does nothing", "test_the_background_compacts", {"SCHEDULER._compact": lie(True)}, DISK, waits="seconds for the background to compact everything"),
    M("fetched batches lack their first message", "test_readers_beside_the_background", LOSES, MEMORY),
    M("the background doesn't end", "test_close_beside_the_background", {"SCHEDULER.stop": lie()}, DISK, waits="seconds for the background's threads to end"),
    M("failures of the background are hidden", "test_a_failure_in_the_background_is_shown", {"DATABASE.info": result(lambda info: attrs.evolve(info, compaction_failure=None))}, MEMORY),
    # durability
    M("nothing is flushed", "test_every_batch_is_synced_before_it_is_acknowledged", {"ENGINE.flush_log": lie()}, DISK),
    M("every second flush does nothing", "test_every_thread_waits_for_a_sync", {"LOG._flush": nth(2, lie())}, DISK),
    M("stores beside a flush don't wait", "test_flushes_are_shared", BESIDE_A_FLUSH, MEMORY, brief=True),
    M("commit flushes", "test_commit_does_not_sync", {"LOG.settle": also(lambda me, given: me.engine.flush_log())}, DISK),
    M("batches are written in parts", "test_cut_log", {"ENGINE.write": in_parts}, DISK),
    M("fetched batches lack their first message", "test_cut_log_after_restarts", LOSES, DISK),
    M("nothing is flushed", "test_power_failure", {"ENGINE.flush_log": lie()}, DISK, raises=ts.DataLossError),
    M("what is on disk is noted nowhere", "test_synced_writes_do_not_vanish", {"SYNCED.note": lie(True)}, DISK),
    M("writes wait for the next", "test_kill", {"ENGINE.write": late}, DISK, raises=ts.EngineError),
    M("writes wait for the next", "test_kill_while_the_background_compacts", {"ENGINE.write": late}, DISK, raises=ts.EngineError),
    M("a database is there before its shards", "test_kill_while_creating", {"MAKING.write_manifest": argument(manifest=lambda manifest: attrs.evolve(manifest, complete=True))}, DISK, raises=ts.EngineError),
    M("failures are forgotten", "test_full_disk", {"LOG.fail": lie()}, DISK),
    # damage
    M("damaged messages end a stream", "test_flipped_value", SKIPS_DAMAGE, MEMORY),
    M("verify finds no damage", "test_missing_value", NO_DAMAGE, MEMORY),
    M("verify finds no damage", "test_missing_names", NO_DAMAGE, DISK),
    M("verify finds no damage", "test_flipped_anything", NO_DAMAGE, DISK),
    M("verify finds no damage", "test_flipped_byte_in_a_table", NO_DAMAGE, DISK),
    M("damaged messages end a stream", "test_rest_is_readable_beside_a_damaged_table", SKIPS_DAMAGE, DISK),
    M("lost writes aren't missed", "test_flipped_byte_in_the_log", {"REACHING.check_reached": lie()}, DISK),
    M("a lost manifest is a new database", "test_lost_manifest_and_lost_shard", {"OPENING.read_manifest": swallow(ts.NotADatabaseError), "MAKING.read_manifest": swallow(ts.NotADatabaseError)}, DISK),
    M("a name has fewer messages", "test_what_is_salvaged_was_stored", {"DATABASE.replay_arrow": by_name_less}, DISK),
    M("forked children flush nothing", "test_a_forked_child", {"DATABASE.flush": when(lambda me, given: os.getpid() != OWNER, lie())}, DISK),
]
# fmt: on
globals().update(suites_of("database", DatabaseSuite, ROWS, subject_of, "pair"))
