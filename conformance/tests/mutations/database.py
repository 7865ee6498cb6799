"""The table of mutations of the framework, independent of engine and layout, each with the test that must find it."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterator
from typing import Any

import attrs
import msgspec
import topicstore as ts
from changes import also, argument, disguise, late, lie, nth, result, when
from running import M, suites_of
from topicstore import MessageBatch
from topicstore.contract.engine import WriteBatch
from topicstore.contract.requests import ReadResult
from topicstore.shard.reader import ShardReader
from topicstore.shard.rewriter import Rewriter
from topicstore.shard.state import ShardState
from topicstore.shard.writer import ShardWriter
from topicstore.storage import opening
from topicstore.storage.directory.closed_files import ClosedFiles
from topicstore.storage.directory.recovery_points import RecoveryPoints
from topicstore.storage.opening import ShardOpener
from topicstore_backends.rocksdb import RocksdbEngine
from topicstore_conformance.database.suite import DatabaseSuite
from topicstore_conformance.subjects.pairs import Pair, pair_of

Call = Callable[..., Any]
Given = dict[str, Any]
EMPTY = MessageBatch.empty()

# the classes and modules that the table's rows name
DATABASE, WRITER, READER, STATE, OPENER = ts.Database, ShardWriter, ShardReader, ShardState, ShardOpener
REWRITER, RECOVERY_POINTS, CLOSED_FILES, ENGINE, MAKING = Rewriter, RecoveryPoints, ClosedFiles, RocksdbEngine, opening


def subject_of(row: M) -> Pair:
    return pair_of(*row.on.split("-"))


# --- changes of messages and steps -----------------------------------------------------------


def messages(changed: Callable[[Any], Any]) -> Any:
    """Replace each message with a function of it before it is stored."""
    return argument(messages=lambda given: [changed(message) for message in given])


def but_the_first(found: ReadResult) -> ReadResult:
    return attrs.evolve(found, batch=found.batch[1:]) if len(found.batch) > 1 else found


LOSES = {"READER.next": result(but_the_first)}
NO_DAMAGE = {"DATABASE.verify": result(lambda report: attrs.evolve(report, damages=[]))}
COMPACTED = {
    "REWRITER.compact": also(lambda me, given: vars(me._writer).update(compacted=True)),
    "READER.next": lambda call, me, given: but_the_first(call()) if vars(me._writer).get("compacted") else call(),
}


def in_parts(call: Call, me: Any, given: Given) -> None:
    """Write each run of a batch as a separate batch."""
    for number, run in enumerate(given["batch"].runs):
        part = WriteBatch()
        part.ranges, part.runs = [] if number else given["batch"].ranges, [run]
        call(batch=part)


def watermark_late(call: Call, me: Any, given: Given) -> Any:
    """Make each commit visible only with the next one."""
    before, found = vars(me).get("committed", me.watermark), call()
    me.committed, me.watermark = me.watermark, before
    return found


def by_name_less(call: Call, me: Any, given: Given) -> Iterator[Any]:
    batches = list(call())
    return iter(batches if "#" in given["topic_filter"] or "+" in given["topic_filter"] else batches[1:])


def empty_copy(me: Any, given: Given) -> None:
    with ts.open(given["path"]) as copy:
        copy.delete("#")


def forget_position(call: Call, me: Any, given: Given) -> Any:
    shard = call()
    forgetful = msgspec.structs.replace(shard.writer.tail, last_position=1, last_time=0)
    shard.writer.tail = shard.writer.pending_tail = forgetful
    return shard


UNFINISHED = {
    "MAKING.complete_generations": when(
        lambda me, given: any(shard.generations.current for shard in given["shards"]), lie()
    )
}
OWNER = os.getpid()
STORE, REPLAY, DROP = "DATABASE.store", "DATABASE.replay", "DATABASE.drop_generation"
MEMORY, EPOCHAL, DISK = "memory-block", "memory-wildcard_optimized", "rocksdb-block"
# fmt: off
ROWS = [
    *(M("nothing", "", {}, on) for on in (MEMORY, EPOCHAL, DISK)),
    # --- storing ---
    M("each commit is shown with the next", "test_what_was_stored_is_seen_at_once", {"WRITER.commit_locked": watermark_late}, MEMORY),
    M("a shard's state is in reverse", "test_machine", {"STATE.scan": result(lambda pairs: iter(list(pairs)[::-1]))}, MEMORY),
    M("payloads are cut", "test_empty_and_large_payloads", {STORE: messages(lambda m: msgspec.structs.replace(m, payload=m.payload[: 1 << 20]))}, MEMORY),
    M("positions begin anew", "test_machine", {"OPENER.open": forget_position}, DISK, raises=ts.DataLossError),
    M("a clock that is behind isn't reported", "test_a_last_position_in_the_future_is_reported", {"WRITER._warn_of_clock": lie()}, DISK),
    # --- reading ---
    M("fetched batches lack their first message", "test_empty_and_large_payloads", LOSES, MEMORY),
    M("fetched batches lack their first message", "test_more_topics_than_memory_keeps", LOSES, MEMORY),
    M("topics have no upper case", "test_every_edge_topic_by_itself", {STORE: messages(lambda m: msgspec.structs.replace(m, topic=m.topic.lower().replace(" ", "")  or "x"))}, MEMORY),
    M("no order is kept", "test_order_over_layouts_and_shards", {REPLAY: argument(order="any"), "DATABASE.replay_arrow": argument(order="any")}, MEMORY),
    M("deletes do nothing", "test_machine", {"DATABASE.delete": lie(0)}, MEMORY),
    # --- cursors ---
    M("compacted batches lack their first message", "test_machine", COMPACTED, MEMORY),
    # --- generations ---
    M("generations aren't completed", "test_machine", {**UNFINISHED, "ENGINE.write": late}, DISK, raises=ts.EngineError),
    # --- visibility ---
    M("fetched batches lack their first message", "test_nothing_is_skipped_or_reordered", LOSES, EPOCHAL),
    # --- threads ---
    M("generations are listed twice", "test_generations_beside_writers", {"DATABASE.generations": result(lambda infos: [*infos, infos[-1]])}, MEMORY),
    M("closed is any error", "test_close_while_others_work", {STORE: disguise(ts.DatabaseClosedError, ts.EngineError)}, MEMORY),
    # --- compaction ---
    M("replays lack their first message", "test_readers_beside_writers_and_compactions", {"DATABASE.replay_arrow": result(lambda batches: itertools.islice(batches, 1, None))}, MEMORY),
    M("deletes are miscounted", "test_deletes_beside_compactions", {"DATABASE.delete": result(lambda count: count + 1)}, MEMORY),
    M("drops count twice", "test_generations_beside_writers", {DROP: result(lambda dropped: 2 * dropped)}, MEMORY),
    M("checkpoints are empty", "test_checkpoints_beside_compactions", {"DATABASE.checkpoint": also(empty_copy)}, DISK),
    M("closed is any error", "test_close_beside_a_compaction", {"DATABASE.compact": disguise(ts.DatabaseClosedError, ts.EngineError)}, MEMORY),
    # --- durability ---
    M("every second flush does nothing", "test_every_thread_waits_for_a_sync", {"WRITER._fsync": nth(2, lie())}, DISK),
    M("commit flushes", "test_commit_does_not_sync", {"WRITER.finish_commit": also(lambda me, given: me.engine.flush_log())}, DISK),
    M("batches are written in parts", "test_power_failure", {"ENGINE.write": in_parts}, DISK),
    M("nothing is flushed", "test_power_failure", {"ENGINE.flush_log": lie()}, DISK, raises=ts.DataLossError),
    M("what is on disk is noted nowhere", "test_synced_writes_do_not_vanish", {"RECOVERY_POINTS.record": lie(True)}, DISK),
    M("writes wait for the next", "test_kill", {"ENGINE.write": late}, DISK, raises=ts.EngineError),
    M("a database is there before its shards", "test_kill_while_creating", {"MAKING.write_manifest": argument(manifest=lambda manifest: attrs.evolve(manifest, complete=True))}, DISK, raises=ts.EngineError),
    M("failures are forgotten", "test_full_disk", {"WRITER.fail": lie()}, DISK),
    # --- damage ---
    M("verify finds no damage", "test_flipped_or_missing", NO_DAMAGE, DISK),
    M("files aren't listed", "test_files_of_a_closed_database", {"CLOSED_FILES.write": lie()}, DISK),
    M("a name has fewer messages", "test_what_is_salvaged_was_stored", {"DATABASE.replay_arrow": by_name_less}, DISK),
    M("forked children flush nothing", "test_a_forked_child", {"DATABASE.flush": when(lambda me, given: os.getpid() != OWNER, lie())}, DISK),
]
# fmt: on
globals().update(suites_of("database", DatabaseSuite, ROWS, subject_of, "pair"))
