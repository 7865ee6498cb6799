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
    "layouts/topicstore_layouts/block/payloads.py": {
        (
            "toarrow",
            "if prefix == _prefix(int(self._sizes.min())) and most < len(self._raw) < 1 << 31:",
            "1  →  2",
        ): "a block has payloads of at most 1 MB, or one message, of at most 256 MB",
    },
    "layouts/topicstore_layouts/skipstream/verification.py": {
        (
            "_summed",
            "mixed ^= mixed >> np.uint64(31)",
            "mixed ^= mixed >> np.uint64(31)  →  pass",
        ): "the last step of the mixing only spreads bits that are spread already",
    },
}
"""By file; by function, line and description of the mutation."""
