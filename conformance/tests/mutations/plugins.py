"""The table of mutations of a transform, such as mistakes of its authors, each with the test that must find it."""

from __future__ import annotations

import itertools
import zlib
from collections.abc import Callable
from typing import Any

import attrs
import numpy as np
import topicstore as ts
from changes import argument, result, twice, when
from running import M, suites_of
from topicstore import MessageBatch
from topicstore.contract.columns import ArrowColumn, LazyColumn, to_iterable
from topicstore.contract.requests import StoreResult
from topicstore.plugins import registry
from topicstore.pubsub.hub import Hub
from topicstore_conformance.plugins.suite import PluginSuite
from topicstore_conformance.subjects.pairs import Pair, pair_of
from topicstore_conformance.subjects.transforms import SHIFTING, Shifting

Call = Callable[..., Any]
Given = dict[str, Any]

TRANSFORM, HUB = Shifting, Hub
"""The classes that the rows name. The transforms of this class that a test adds itself are changed, too."""


def prepare() -> None:
    """Register the transform in a process of the suites."""
    registry().plugins["shifting"] = SHIFTING


def subject_of(row: M) -> Pair:
    prepare()
    return pair_of(*row.on.split("-"), plugins=["shifting"])


# --- changes -----------------------------------------------------------------------------------


def rows(change: Callable[[MessageBatch], MessageBatch]) -> Any:
    """Replace the batch to store with a function of it, before the batch is encoded."""

    def changed(call: Call, me: Any, given: Given) -> Any:
        given["request"].batch = change(given["request"].batch)
        return call()

    return changed


def read(change: Callable[[Any], Any]) -> Any:
    """Replace the result of a read with a function of it."""
    return result(change)


def column(**changed: Callable[[Any], Any]) -> Callable[[MessageBatch], MessageBatch]:
    return lambda batch: batch.replace(
        **{name: [change(value) for value in to_iterable(getattr(batch, name))] for name, change in changed.items()}
    )


def batch_of(found: Any, change: Callable[[MessageBatch], MessageBatch]) -> Any:
    return attrs.evolve(found, batch=change(found.batch))


def by_topic(batch: MessageBatch) -> MessageBatch:
    topics = list(to_iterable(batch.topics))
    return batch.take(np.array(sorted(range(len(batch)), key=topics.__getitem__), np.intp))


def skips(holds: Callable[[Any, Given], object]) -> Any:
    """Pass a request on without a change if a condition holds."""
    return when(holds, lambda call, me, given: given.get("result"))


def each_way(change: Callable[[list[bytes], Call], list[bytes]]) -> Any:
    """Replace a function of payloads with ``change``, which gets the payloads and the original function."""
    return lambda call, me, given: change(list(given["payloads"]), lambda some: call(payloads=some))


def in_place(call: Call, me: Any, given: Given) -> Any:
    found = call()
    batch = given["result"].batch
    if isinstance(batch.payloads, list):
        batch.payloads[:] = list(found.batch.payloads)
    return found


def into_the_given(call: Call, me: Any, given: Given) -> None:
    """Write the encoded payloads into the caller's own list, too."""
    batch = given["request"].batch
    call()
    if isinstance(batch.payloads, list):
        batch.payloads[:] = list(given["request"].batch.payloads)


def marked(payloads: list[bytes], of: Call) -> list[bytes]:
    return [payload if payload[:1] == b"\3" else of([payload])[0] for payload in payloads]


def counted(call: Call, me: Any, given: Given) -> Any:
    """Append the number of the call to each encoded payload, except in the first calls of this process."""
    number = next(COUNT)
    return [payload + bytes((number % 256,)) * (number > 2) for payload in call()]


def salted(call: Call, me: Any, given: Given) -> Any:
    salt = hash("a salt") % 256
    return [bytes(byte ^ salt for byte in payload) for payload in call()]


def unsalted(call: Call, me: Any, given: Given) -> Any:
    salt = hash("a salt") % 256
    return call(payloads=[bytes(byte ^ salt for byte in payload) for payload in given["payloads"]])


def remembered(call: Call, me: Any, given: Given) -> Any:
    """Decode each payload as the first payload of the same length in a batch of the same size."""
    known = vars(me).setdefault("_by_length", {})
    return [known.setdefault((len(given["payloads"]), len(payload)), payload) for payload in call()]


def by_crc(call: Call, me: Any, given: Given) -> Any:
    """Encode each payload like the first payload with the same CRC-32."""
    known, payloads = vars(me).setdefault("_by_crc", {}), list(map(bytes, given["payloads"]))
    found = call(payloads=payloads)
    return [known.setdefault(zlib.crc32(payload), stored) for payload, stored in zip(payloads, found, strict=True)]


def dated(call: Call, me: Any, given: Given) -> Any:
    """Begin each payload with the number of the current day."""
    request = given["request"]
    day = request.db.clock() // 86_400_000_000 % 251
    call()
    request.batch = request.batch.replace(payloads=[bytes((day,)) + bytes(p) for p in request.batch.payloads])


def undated(call: Call, me: Any, given: Given) -> Any:
    found, day = given["result"], given["request"].db.clock() // 86_400_000_000 % 251
    if len(found.batch):
        stripped = [bytes(p)[1:] if bytes(p)[0] == day else bytes(p) for p in to_iterable(found.batch.payloads)]
        found = attrs.evolve(found, batch=found.batch.replace(payloads=stripped))
    return call(result=found)


def dropping_last(call: Call, me: Any, given: Given) -> Any:
    found = call()
    return attrs.evolve(found, batch=found.batch[:-1]) if len(found.batch) > 1 else found


def keeps_database(call: Call, me: Any, given: Given) -> None:
    """Encode correctly only with the database that was opened first; otherwise omit the last byte of each payload."""
    known = vars(me).setdefault("_first", given["request"].db.path)
    call()
    if given["request"].db.path != known:
        given["request"].batch = column(payloads=lambda p: bytes(p)[:-1])(given["request"].batch)


def shared_buffer(call: Call, me: Any, given: Given) -> Any:
    """Keep the payloads of a call in the plugin while other threads run."""
    me.buffer = call()
    for _ in range(200):
        len(me.buffer)
    import time

    time.sleep(0)
    return me.buffer


def over_again(call: Call, me: Any, given: Given) -> Any:
    """Reverse the payloads of every batch that was decoded before."""
    seen, key = vars(me).setdefault("_seen", set()), tuple(map(bytes, given["payloads"]))
    found = call(payloads=key)
    if key in seen:
        return [payload[::-1] for payload in found]
    seen.add(key)
    return found


def swallowing(call: Call, me: Any, given: Given) -> Any:
    """Return an empty result if the store fails."""
    hook = call()
    next(hook)
    try:
        found = yield
    except ts.TopicstoreError:
        return StoreResult(count=0, rejoin=MessageBatch.empty)
    try:
        hook.send(found)
    except StopIteration as ended:
        return ended.value


def numbered(call: Call, me: Any, given: Given) -> Any:
    """Append to each payload its index in the stored batch, one byte."""
    return [payload + bytes((number % 256,)) for number, payload in enumerate(call())]


def unnumbered(call: Call, me: Any, given: Given) -> Any:
    """Remove the last byte of each payload that equals its index in the batch read, which may not be the batch stored."""
    forms = list(map(bytes, given["payloads"]))
    decoded = call(payloads=forms)
    return [p[: -(f[-1] == n % 256)] or p for n, (p, f) in enumerate(zip(decoded, forms, strict=True))]


def is_arrow(me: Any, given: Given) -> bool:
    return isinstance(given["request"].batch.payloads, (ArrowColumn, LazyColumn))


def kept(me: Any, given: Given) -> bool:
    return given["request"].destinations is not None


COUNT = itertools.count()
ENCODE, DECODE = "TRANSFORM.encode", "TRANSFORM.decode"
STORE, READ = "TRANSFORM.before_store", "TRANSFORM.after_read"
MEMORY, PLAIN, DISK = "memory-block", "memory-reference", "rocksdb-block"
ANY = (ts.TopicstoreError, ValueError, IndexError, TypeError)
TWICE = {READ: lambda call, me, given: call(result=call())}
# fmt: off
ROWS = [
    *(M("nothing", "", {}, on) for on in (MEMORY, PLAIN, DISK)),
    # --- content ---
    M("properties are lost", "test_every_field", {STORE: rows(column(properties=lambda _: None))}, MEMORY),
    M("timestamps are lost", "test_every_field", {STORE: rows(column(timestamps=lambda _: None))}, MEMORY),
    M("RETAIN flags are lost", "test_every_field", {READ: read(lambda found: batch_of(found, column(retain=lambda _: False)))}, MEMORY),
    M("payloads that were empty stay encoded", "test_empty_payloads", {DECODE: each_way(lambda payloads, of: [of([p])[0] if len(p) > 1 else p for p in payloads])}, MEMORY),
    M("empty payloads become a space", "test_empty_payloads", {ENCODE: argument(payloads=lambda given: [p or b" " for p in given])}, MEMORY),
    M("equal payloads are encoded once", "test_equal_payloads", {DECODE: lambda call, me, given: (found := call())[:1] + [b""] * (len(found) - 1) if len(set(map(bytes, given["payloads"]))) == 1 else found}, MEMORY),
    M("payloads are known by crc32", "test_payloads_with_equal_hashes", {ENCODE: by_crc}, MEMORY),
    M("payloads are cut", "test_payloads_of_any_length", {ENCODE: argument(payloads=lambda given: [bytes(p)[:65_535] for p in given])}, MEMORY),
    M("trailing zeros are lost", "test_payloads_of_any_length", {ENCODE: argument(payloads=lambda given: [bytes(p).rstrip(b"\0") for p in given])}, MEMORY),
    M("payloads that look encoded aren't encoded", "test_payloads_that_are_stored_forms", {ENCODE: each_way(marked), DECODE: each_way(lambda payloads, of: [of([p])[0] if p[:1] == b"\3" else p for p in payloads])}, MEMORY),
    M("payloads are stripped", "test_any_payloads", {ENCODE: argument(payloads=lambda given: [bytes(p).strip(b"\0") for p in given])}, MEMORY),
    M("Arrow isn't encoded", "test_arrow", {STORE: skips(is_arrow)}, MEMORY, raises=ANY),
    M("the whole of sliced Arrow is stored", "test_parts_of_arrow", {STORE: when(is_arrow, rows(lambda batch: MessageBatch.concat([batch, batch[:1]])))}, MEMORY, raises=ANY),
    # --- rows and fields ---
    M("rows are stored in order of topics", "test_rows_are_stored_in_order", {STORE: rows(by_topic)}, MEMORY),
    M("client ids are hidden", "test_rows_are_stored_in_order", {STORE: rows(column(client_ids=lambda text: text[::-1]))}, MEMORY),
    M("QoS becomes 0", "test_rows_are_stored_in_order", {STORE: rows(column(qos=lambda _: 0))}, MEMORY),
    M("rows are read in reverse", "test_rows_are_read_in_order", {READ: read(lambda found: batch_of(found, lambda batch: batch.take(np.arange(len(batch))[::-1])))}, MEMORY),
    M("every read is the last", "test_rows_are_read_in_order", {READ: read(lambda found: attrs.evolve(found, caught_up=True))}, MEMORY),
    M("rows are stored in order of topics", "test_ids_are_in_the_given_order", {STORE: rows(by_topic)}, MEMORY),
    M("reads lack the last message", "test_rows_are_read_in_order", {READ: dropping_last}, MEMORY),
    M("limits are doubled", "test_reads_ask_for_the_same", {"TRANSFORM.before_read": lambda call, me, given: setattr(given["request"], "limit", 2 * given["request"].limit)}, MEMORY),
    M("state is forgotten", "test_state_is_stored_with_messages", {STORE: lambda call, me, given: (call(), setattr(given["request"], "state", {}))[0]}, MEMORY),
    M("payloads are encoded in the given batch", "test_the_caller_keeps_its_batch", {STORE: into_the_given}, MEMORY),
    M("payloads are decoded in the fetched batch", "test_reads_leave_the_fetched_batch", {READ: in_place}, PLAIN),
    M("errors of a store are swallowed", "test_errors_reach_the_caller", {"TRANSFORM.topicstore_store": swallowing}, MEMORY),
    M("threads share a buffer", "test_threads", {ENCODE: shared_buffer}, MEMORY, raises=ANY),
    M("only what was never read is decoded", "test_copies_of_messages", {DECODE: remembered}, MEMORY, raises=ANY),
    # --- reading ---
    M("payloads are decoded twice", "test_each_way_of_reading", TWICE, MEMORY),
    M("one row is read as it is stored", "test_each_way_of_reading", {READ: when(lambda me, given: len(given["result"].batch) == 1, lambda call, me, given: given["result"])}, MEMORY),
    M("a second read decodes twice", "test_reading_again", {DECODE: over_again}, MEMORY),
    M("payloads are decoded twice", "test_subscriptions", TWICE, MEMORY),
    M("payloads are encoded by their number in the batch", "test_other_pieces", {ENCODE: numbered, DECODE: unnumbered}, MEMORY, raises=ANY),
    M("empty batches raise", "test_empty_reads", {DECODE: lambda call, me, given: call(payloads=[min(payloads := list(given["payloads"])), *payloads][1:])}, MEMORY, raises=ANY),
    M("an empty batch is the end", "test_empty_reads_are_not_the_end", {READ: read(lambda found: found if len(found.batch) else attrs.evolve(found, caught_up=True))}, MEMORY),
    M("topics are hidden", "test_filters_deletes_and_counts", {STORE: rows(column(topics=lambda text: text[::-1])), READ: read(lambda found: batch_of(found, column(topics=lambda text: text[::-1])))}, MEMORY),
    # --- kept messages ---
    M("kept messages aren't encoded", "test_retained_messages", {STORE: skips(kept)}, MEMORY, raises=ANY),
    M("kept messages aren't decoded", "test_retained_messages", {READ: skips(lambda me, given: given["request"].cursor.generation == 0)}, MEMORY),
    M("kept messages are neither encoded nor decoded", "test_kept_messages_are_transformed", {STORE: skips(kept), READ: skips(lambda me, given: given["request"].cursor.generation == 0)}, MEMORY),
    M("rows are stored in order of topics", "test_destinations_are_kept", {STORE: rows(by_topic)}, MEMORY),
    M("kept messages aren't decoded", "test_wills", {READ: skips(lambda me, given: given["request"].cursor.generation == 0)}, MEMORY),
    M("payloads are decoded twice", "test_sessions", TWICE, MEMORY),
    M("payloads are decoded twice", "test_shared_subscriptions", TWICE, MEMORY),
    M("payloads are decoded twice", "test_queues", TWICE, MEMORY, raises=ANY),
    M("messages that are stored nowhere are encoded", "test_messages_that_are_stored_nowhere", {"HUB.route": argument(messages=lambda given: [ts.Message(m.topic, SHIFTING.encode([m.payload])[0]) for m in given])}, MEMORY),
    M("payloads are decoded twice", "test_archives", TWICE, MEMORY),
    # --- time and other transforms ---
    M("messages with properties are encoded twice", "test_machine", {STORE: lambda call, me, given: (call(), given["request"].batch)[0] if all(p is None for p in to_iterable(given["request"].batch.properties)) else twice(call, me, given)}, MEMORY),
    M("long batches aren't decoded", "test_compaction", {READ: skips(lambda me, given: len(given["result"].batch) > 30)}, MEMORY),
    M("payloads are encoded by the day", "test_later", {STORE: dated, READ: undated}, MEMORY),
    M("the second database is another", "test_two_databases", {STORE: keeps_database}, MEMORY),
    M("payloads are salted by the object", "test_reopening", {ENCODE: counted}, DISK, raises=ANY),
    M("payloads are encoded with hashes", "test_another_process", {ENCODE: salted, DECODE: unsalted}, DISK, raises=ANY),
    M("the first batch isn't encoded", "test_kill", {ENCODE: counted}, DISK, raises=ANY),
    M("payloads are decoded twice", "test_nested", TWICE, MEMORY),
    M("kept messages aren't decoded", "test_nested_and_kept", {READ: skips(lambda me, given: given["request"].cursor.generation == 0)}, MEMORY),
]
# fmt: on
globals().update(suites_of("plugins", PluginSuite, ROWS, subject_of, "pair"))
