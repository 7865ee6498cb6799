"""The generated mutations that break no promise, each with its reason. They aren't counted."""

from __future__ import annotations

EQUIVALENT: dict[str, dict[tuple[str, str, str], str]] = {
    "backends/topicstore_backends/duckdb/engine.py": {
        (
            "_open_view",
            "self.check_open()",
            "self.check_open()  →  pass",
        ): "the check of the opened view raises the same error",
    },
    "backends/topicstore_backends/files.py": {
        (
            "set_aside",
            "if any(behind):",
            "any(behind)  →  behind",
        ): "a copy of zeros that stood after a log's last write only takes space",
    },
    "backends/topicstore_backends/leveldb/engine.py": {
        (
            "_delete_around",
            "self._check_writable()",
            "self._check_writable()  →  self",
        ): "the caller doesn't write after a failed write, and the compaction before has checked it",
        (
            "_delete_around",
            'below = (int.from_bytes(last, "big") - 1).to_bytes(len(last), "big") + b"\\xff" * 8',
            "8  →  9",
        ): "the key is absent with nine more bytes as with eight",
    },
    "backends/topicstore_backends/leveldb/scans.py": {
        (
            "_take",
            "self._typical = size // len(part) + 1",
            "self._typical = size // len(part) + 1  →  pass",
        ): "the lists are the same, read in smaller parts",
        (
            "__init__",
            "self._done = (limit is not None and limit <= 0) or span[0] >= span[1]",
            "span[0] >= span[1]  →  span[0] > span[1]",
        ): "LevelDB finds no key in an empty range either",
        (
            "_read",
            "self._failure = error",
            "self._failure = error  →  pass",
        ): "LevelDB's iterator keeps its error, and raises it again",
    },
    "backends/topicstore_backends/rocksdb/backend.py": {
        (
            "_database_options",
            "options.set_manifest_preallocation_size(64 << 10)",
            "options.set_manifest_preallocation_size(64 << 10)  →  pass",
        ): "only the space that is reserved for a manifest differs",
        (
            "_database_options",
            "options.set_max_write_buffer_number(4)",
            "4  →  3",
        ): "only how soon a write waits for a flush differs",
    },
    "backends/topicstore_backends/rocksdb/engine.py": {
        (
            "checkpoint",
            "with self._calls.lock(), self._calls:",
            "self._calls.lock()  →  self._calls",
        ): "rocksdict holds the GIL while it makes a checkpoint, and close waits for it",
    },
    "backends/topicstore_backends/write_ahead_logs.py": {
        (
            "_numbers",
            "at += value",
            "at += value  →  pass",
        ): "a text stands in an edit whose numbers are zero, or in one without numbers",
        (
            "_grouped",
            "for number in range(len(edits), 0, -1):",
            "0  →  1",
        ): "RocksDB begins a manifest with several edits",
        (
            "cuts",
            "if not refused and not found and _follow_each_other(counting, sequence):",
            "not refused  →  refused",
        ): "an opening then reads all logs, not a part, and finds the same",
        (
            "_cuts_of",
            "expected = range(0)  # a new log is begun only after a write to this one: see `LeveldbEngine.reclaim`",
            "0  →  1",
        ): "no write has the number 0",
    },
    "framework/topicstore/lifecycle/clock_guard.py": {
        (
            "stored",
            "if differ < self._lowest:",
            "differ < self._lowest  →  differ <= self._lowest",
        ): "an equal value is set again",
    },
    "framework/topicstore/pubsub/filter_index.py": {
        (
            "put_locked",
            "if len(topic) > _LONGEST:",
            "if len(topic) > _LONGEST:  →  if not len(topic) > _LONGEST:",
        ): "routes of other topics are cached, and found as before",
    },
    "framework/topicstore/storage/generations.py": {
        (
            "generation_infos",
            "sealed=None if one.sealed is None else max(record.sealed or 0 for record in records),",
            "0  →  -1",
        ): "all seals are later than both",
    },
    "layouts/topicstore_layouts/block/payloads.py": {
        (
            "toarrow",
            "if prefix == _prefix(int(self._sizes.min())) and most < len(self._raw) < 1 << 31:",
            "1  →  2",
        ): "a block has payloads of at most 1 MB, or one message, of at most 256 MB",
    },
    "layouts/topicstore_layouts/block/segments.py": {
        (
            "holding",
            "np.add.at(edges, self.places[topics, 1] + 1, -1)",
            "1  →  0",
        ): "more frames are read than hold the topics, and their rows are selected",
    },
    "layouts/topicstore_layouts/block/slab.py": {
        (
            "cover",
            "return streams if len(streams) == 1 else [ALL]",
            "1  →  2",
        ): "streams may be read one by one or together, and the caller merges them",
    },
    "layouts/topicstore_layouts/block/verification.py": {
        (
            "_all_segments",
            "before = key[1]",
            "1  →  2",
        ): "a value is bound to its key, so no damage makes segments overlap",
    },
    "layouts/topicstore_layouts/shared/learned_topics.py": {
        (
            "describe",
            "with self._lock:",
            "with self._lock:  →  nodes = self._nodes[_FIRST_NODE:]",
        ): "a list is copied in one step of the interpreter",
    },
    "layouts/topicstore_layouts/skipstream/postings.py": {
        (
            "read",
            "return self.last >= last",
            "self.last >= last  →  self.last > last",
        ): "candidates that the list would rule out are read and checked",
    },
    "layouts/topicstore_layouts/skipstream/slab.py": {
        (
            "next",
            "after = max(at, limits.bound + 1) if exhausted else at",
            "limits.bound + 1  →  limits.bound - 1",
        ): "it counts only where no chunk was read, so nothing is read twice",
    },
    "layouts/topicstore_layouts/skipstream/verification.py": {
        (
            "_summed",
            "mixed ^= mixed >> np.uint64(31)",
            "mixed ^= mixed >> np.uint64(31)  →  pass",
        ): "the last step of the mixing only spreads bits that are spread already",
    },
    "layouts/topicstore_layouts/table.py": {
        (
            "_inline",
            "values: list[bytes | None] = list(to_iterable(payloads))",
            "to_iterable(payloads)  →  payloads",
        ): "a column of payloads has the same items, more slowly",
    },
    "layouts/topicstore_layouts/wildcard_optimized/keymapper.py": {
        ("_bits", "if room >= 0:", "0  →  -1"): "no key is shorter than a position, of eight bytes",
    },
}
"""By file; by function, line and description of the mutation."""
