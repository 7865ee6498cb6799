"""Storing a batch: each shard's part becomes a `PendingWrite`; all are prepared, then encoded, then committed."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TypeGuard

import numpy as np

from topicstore.contract.batch import MessageBatch
from topicstore.contract.engine import STATE
from topicstore.contract.errors import DatabaseClosedError, InvalidMessageError, PluginError, TopicstoreError
from topicstore.contract.requests import StoreRequest, StoreResult
from topicstore.contract.state import StateWrite
from topicstore.runtime.locks import holding
from topicstore.shard.shard import Shard
from topicstore.shard.writer import LogFullError, PendingWrite

from .keyed_message_records import encode_keyed
from .shard_map import ShardMap

__all__ = ["commit_state", "finish_commits", "store_batch", "submit_locked"]

_NO_ROWS = np.empty(0, dtype=np.intp)


def store_batch(
    request: StoreRequest, shards: Sequence[Shard], shard_map: ShardMap, clock: Callable[[], int]
) -> StoreResult:
    """Commit each shard's part of a batch; all parts are checked before the first is committed.

    Raises the errors of `topicstore.database.Database.store`; with `StoreRequest.failures`, errors of logs are added to
    it instead.
    """
    started = time.perf_counter()
    pending: list[PendingWrite] = []
    failures = request.failures

    def submit() -> None:
        _prepare_locked(pending)
        if request.destinations is not None and request.destinations.keyed:
            writes = {one.writer.number: one.write for one in pending}
            for shard, key, value in encode_keyed(request.batch, request.destinations, _rejoin(pending), clock()):
                writes[shard].put(STATE, key, value)
        submit_locked(pending, failures)

    try:
        while True:
            pending = _split_batch(request, shards, shard_map)
            try:
                holding([one.writer.lock for one in pending], submit)
                break
            except LogFullError:  # no write was proposed
                _wait_for_room(pending, failures)
    except BaseException:
        for one in pending:
            if not one.number:
                one.writer.counters.failed_batches += 1
        raise
    finally:  # even if one shard failed, because other shards have committed
        finish_commits(pending, failures)
    stored = pending if not failures else [one for one in pending if one.writer.number not in failures]
    seconds = time.perf_counter() - started
    for one in stored:
        one.writer.latencies.store.observe(seconds)
    count = sum([len(one.messages) for one in stored])
    return StoreResult(count=count, lifted=sum([one.lifted for one in stored]), rejoin=partial(_rejoin, stored))


def _split_batch(request: StoreRequest, shards: Sequence[Shard], shard_map: ShardMap) -> list[PendingWrite]:
    """Return a write for every shard that has messages or state to store, in ascending order of shards."""
    batch, destinations, state, chosen = request.batch, request.destinations, request.state, None
    if destinations is not None:
        if len(batch) != len(destinations.stored):
            raise PluginError("a plugin changed the number of messages, some of which are to be kept or only routed")
        if not destinations.stored.all():
            chosen = np.flatnonzero(destinations.stored)
            batch = batch.take(chosen)
    parts = shard_map.split(batch.client_ids) if len(batch) else ()
    if destinations is None and not state:
        return [
            PendingWrite(shards[number].writer, batch if rows is None else batch.take(rows), (), rows)
            for number, rows in parts
        ]
    pending = {}
    for number, rows in parts:
        part = batch if rows is None else batch.take(rows)
        within = rows if chosen is None else chosen if rows is None else chosen[rows]
        pending[number] = PendingWrite(shards[number].writer, part, state.get(number, ()), within)
    keyed = [] if destinations is None else [number for number, _ in destinations.keyed.values()]
    for number in (*state, *keyed):
        if number not in pending:
            pending[number] = PendingWrite(shards[number].writer, None, state.get(number, ()), _NO_ROWS)
    return [pending[number] for number in sorted(pending)] if len(pending) > 1 else list(pending.values())


def _prepare_locked(pending: Sequence[PendingWrite]) -> None:
    """Prepare every shard's write. If shards refuse messages, raise the error of the first of them in the batch."""
    refused = []
    for one in pending:
        try:
            one.writer.prepare_locked(one)
        except InvalidMessageError as bad:
            if bad.index is not None and one.rows is not None:
                bad = type(bad)(bad.reason, int(one.rows[bad.index])).with_traceback(bad.__traceback__)
            refused.append(bad)
    if refused:
        raise min(refused, key=lambda bad: -1 if bad.index is None else bad.index)


def _wait_for_room(pending: Sequence[PendingWrite], failures: dict[int, TopicstoreError] | None) -> None:
    """Wait until the full logs may have room for their writes. Clears ``failures``, because no write was proposed."""
    refused = set(failures or ())
    if failures:
        failures.clear()
    for one in pending:
        if one.writer.log is not None and one.proposal is not None and one.writer.number not in refused:
            one.writer.log.wait_for_room(one)


def submit_locked(pending: Sequence[PendingWrite], failures: dict[int, TopicstoreError] | None = None) -> None:
    """Encode prepared writes of several shards, then commit them. The caller holds the locks of all their writers.

    A writer with a log proposes its write to the log instead. If a commit fails, the earlier ones remain: the caller
    must complete these with `finish_commits`. With ``failures``, a log that refuses its write, unless its queue is
    full, does not keep the others from being proposed; its error is added there, by shard.
    """
    for one in pending:
        if one.writer.log is None:
            one.writer.encode_locked(one)
        else:
            _unless_refused(one, one.writer.log.encode_locked, failures)
    for one in pending:
        if one.writer.log is None:
            one.writer.commit_locked(one)
        elif not failures or one.writer.number not in failures:
            _unless_refused(one, one.writer.propose_locked, failures)


def _unless_refused(
    one: PendingWrite, step: Callable[[PendingWrite], object], failures: dict[int, TopicstoreError] | None
) -> None:
    """Take a step of a write; add a refusal by the log to ``failures``, or raise it without them."""
    try:
        step(one)
    except LogFullError:
        raise
    except TopicstoreError as refused:
        if failures is None or not _concerns_shard(refused):
            raise
        one.writer.counters.failed_batches += 1
        failures[one.writer.number] = refused


def _concerns_shard(error: BaseException) -> TypeGuard[TopicstoreError]:
    """Return whether an error is of a shard, which may fail alone, and not of the whole database or the program."""
    return isinstance(error, TopicstoreError) and not isinstance(error, DatabaseClosedError)


def finish_commits(pending: Sequence[PendingWrite], failures: dict[int, TopicstoreError] | None = None) -> None:
    """Complete the committed writes, even if one of them fails, because committed messages must become visible.

    The caller must hold no lock of a writer. Raises the first error; errors of the library are added to ``failures``
    instead, by shard, if it is given.
    """
    raised: list[BaseException] = []
    for one in pending:
        if one.number:
            try:
                one.writer.finish_commit(one)
            except BaseException as failed:  # noqa: BLE001 - the first one is raised after all are completed
                one.writer.counters.failed_batches += 1
                if failures is None or not _concerns_shard(failed):
                    raised.append(failed)
                else:
                    failures[one.writer.number] = failed
    if raised:
        raise raised[0]


def commit_state(shards: Sequence[Shard], by_shard: Mapping[int, Sequence[StateWrite]]) -> dict[int, TopicstoreError]:
    """Commit state of several shards, and return the errors by shard: the write of each shard is atomic by itself.

    All writes precede the first wait for an fsync or for a log, so shards don't wait for each other.
    """
    pending: list[PendingWrite] = []
    failures: dict[int, TopicstoreError] = {}
    for number, writes in by_shard.items():
        try:
            pending.append((writer := shards[number].writer).submit(PendingWrite(writer, state=writes)))
        except TopicstoreError as failed:
            failures[number] = failed
    for one in pending:
        try:
            one.writer.finish_commit(one)
        except TopicstoreError as failed:
            failures[one.writer.number] = failed
    return failures


def _rejoin(pending: Sequence[PendingWrite]) -> MessageBatch:
    """Return all messages stored in streams, with their shards, positions and times, in the order of the batch."""
    stored = [one for one in pending if len(one.batch)]
    if len(stored) < 2:
        return stored[0].batch if stored else MessageBatch.empty()
    rows = np.concatenate([one.rows for one in stored if one.rows is not None])
    return MessageBatch.concat([one.batch for one in stored]).take(np.argsort(rows))
