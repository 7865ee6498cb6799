"""The generated mutations that break no promise, each with its reason. They aren't counted."""

from __future__ import annotations

EQUIVALENT: dict[str, dict[tuple[str, str, str], str]] = {
    "backends/topicstore_backends/duckdb/engine.py": {
        (
            "_open_view",
            "self.check_open()",
            "self.check_open()  →  pass",
        ): "the check of the opened view raises the same error",
        (
            "scan_in",
            "table.columns.condition(span)  # raises for keys of another shape now, not when the first list is requested",
            "table.columns.condition(span)  →  span",
        ): "the first list raises the same error",
        (
            "__init__",
            "failing.callback(self._writer.close)",
            "failing.callback(self._writer.close)  →  pass",
        ): "the connection ends with the error of the opening, and doesn't disturb another opening before",
        (
            "info",
            "return EngineInfo(disk_bytes=sum(sizes.values()), memory_bytes=int(used[0][0]), details=details)",
            "int(used[0][0])  →  used[0][0]",
        ): "DuckDB's number is an integer already",
    },
    "backends/topicstore_backends/duckdb/instance.py": {
        (
            "attach",
            "self._close_unused()",
            "self._close_unused()  →  pass",
        ): "the empty DuckDB stays in memory, and the next file is attached to it",
    },
    "backends/topicstore_backends/duckdb/tables.py": {
        (
            "_parts",
            "return (key,) if self.keyspace.shape is None else tuple(key)",
            "tuple(key)  →  key",
        ): "a key of numbers is a tuple already",
    },
    "backends/topicstore_backends/files.py": {
        (
            "set_aside",
            "os.fsync(opened.fileno())",
            "opened.fileno()  →  opened",
        ): "fsync also takes an open file",
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
        (
            "reclaim",
            "self._compact(first, last)",
            "self._compact(first, last)  →  self._compact(last, first)",
        ): "the first compaction only has to flush, and the second merges all levels",
    },
    "backends/topicstore_backends/leveldb/errors.py": {
        (
            "__exit__",
            'if kind is RuntimeError and "is closed" in str(error):',
            "kind is RuntimeError and 'is closed' in str(error)  →  kind is RuntimeError or 'is closed' in str(error)",
        ): "plyvel raises RuntimeError only for what is closed, and nothing else says so",
    },
    "backends/topicstore_backends/leveldb/keeping.py": {
        (
            "keep_files",
            "for name in sorted(os.listdir(path)):  # noqa: PTH208 - texts",
            "sorted(os.listdir(path))  →  os.listdir(path)",
        ): "files are kept in another order",
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
            "_fitting",
            "if room < 0:",
            "room < 0  →  room <= 0",
        ): "only the sizes of lists differ",
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
        (
            "_table_options",
            "tables.set_block_cache(cache)",
            "tables.set_block_cache(cache)  →  pass",
        ): "each keyspace has a cache of its own, which takes more memory",
        (
            "_table_options",
            "tables.set_block_cache(cache)",
            "tables.set_block_cache(cache)  →  cache",
        ): "each keyspace has a cache of its own, which takes more memory",
    },
    "backends/topicstore_backends/rocksdb/engine.py": {
        (
            "checkpoint",
            "with self._calls.lock(), self._calls:",
            "self._calls.lock()  →  self._calls",
        ): "rocksdict holds the GIL while it makes a checkpoint, and close waits for it",
        (
            "merge_small_tables",
            "family.data.compact_range(first, last, REWRITING)",
            "family.data.compact_range(first, last, REWRITING)  →  family.data.compact_range(last, first, REWRITING)",
        ): "small tables stay apart, and reads find the same in them",
    },
    "backends/topicstore_backends/rocksdb/scans.py": {
        (
            "get",
            "return self.get_many(keyspace, [key])[0]",
            "0  →  -1",
        ): "the list has one item",
        (
            "_take",
            "if left == 1 or room < size:",
            "1  →  2",
        ): "only the sizes of lists differ",
    },
    "backends/topicstore_backends/rocksdb/small_tables.py": {
        (
            "small_runs",
            'listed = family.data.property_value("rocksdb.sstables") or ""',
            "family.data.property_value('rocksdb.sstables') or ''  →  family.data.property_value('rocksdb.sstables') and ''",
        ): "small tables stay apart, and reads find the same in them",
        (
            "_beginning",
            "if left < 0:",
            "0  →  -1",
        ): "a run of tables may have one byte more",
    },
    "backends/topicstore_backends/write_ahead_logs.py": {
        (
            "_has_zero_sector",
            "if len(found) and not found.any(axis=1).all():",
            "1  →  0",
        ): "an opening then reads the logs as a whole, and finds the same",
        (
            "_follow_each_other",
            "if (first and _changes(first).start not in expected) or _has_zero_sector(file):",
            "first and _changes(first).start not in expected  →  first or _changes(first).start not in expected",
        ): "an opening then reads the logs as a whole, and finds the same",
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
            "expected = range(0)",
            "0  →  1",
        ): "no write has the number 0",
        (
            "_records",
            "if start > len(data) or data[start - 1] not in _TYPES or _HEAD + length > left or start + length > len(data):",
            "start + length  →  start - length",
        ): "the checksum of a record that is cut short doesn't match",
        (
            "_readable_after",
            "places = (*range(behind + 1, block), *range(block, len(data), _BLOCK))",
            "1  →  2",
        ): "no record begins one byte after the beginning of another",
        (
            "_last_write",
            "for block in range((end - 1) // _BLOCK * _BLOCK, -1, -_BLOCK):",
            "1  →  0",
        ): "an opening then reads the log as a whole, and finds the same",
        (
            "_follow_each_other",
            "if log is not logs[-1]:",
            "if log is not logs[-1]:  →  if not log is not logs[-1]:",
        ): "an opening then reads the logs as a whole, and finds the same",
        (
            "_follow_each_other",
            "if log is not logs[-1]:",
            "log is not logs[-1]  →  log is logs[-1]",
        ): "an opening then reads the logs as a whole, and finds the same",
        (
            "_follow_each_other",
            'last = _last_write(log.read_bytes()) if first else b""',
            "_last_write(log.read_bytes()) if first else b''  →  b'' if first else _last_write(log.read_bytes())",
        ): "an opening then reads the logs as a whole, and finds the same",
        (
            "_follow_each_other",
            'last = _last_write(log.read_bytes()) if first else b""',
            "_last_write(log.read_bytes())  →  log.read_bytes()",
        ): "an opening then reads the logs as a whole, and finds the same",
        (
            "_follow_each_other",
            "if not last:",
            "if not last:  →  if not not last:",
        ): "an opening then reads the logs as a whole, and finds the same",
        (
            "_follow_each_other",
            "if not last:",
            "not last  →  last",
        ): "an opening then reads the logs as a whole, and finds the same",
        (
            "_follow_each_other",
            "expected = range(_changes(last).stop, _changes(last).stop + 1)",
            "range(_changes(last).stop, _changes(last).stop + 1)  →  range(_changes(last).stop + 1, _changes(last).stop)",
        ): "an opening then reads the logs as a whole, and finds the same",
        (
            "_follow_each_other",
            "expected = range(_changes(last).stop, _changes(last).stop + 1)",
            "_changes(last).stop + 1  →  _changes(last).stop - 1",
        ): "an opening then reads the logs as a whole, and finds the same",
        (
            "_follow_each_other",
            "expected = range(_changes(last).stop, _changes(last).stop + 1)",
            "1  →  0",
        ): "an opening then reads the logs as a whole, and finds the same",
        (
            "_last_write",
            "if kind in (_WHOLE, _FIRST):",
            "if kind in (_WHOLE, _FIRST):  →  if not kind in (_WHOLE, _FIRST):",
        ): "an opening then reads the logs as a whole, and finds the same",
        (
            "_last_write",
            "if kind in (_WHOLE, _FIRST):",
            "kind in (_WHOLE, _FIRST)  →  kind not in (_WHOLE, _FIRST)",
        ): "an opening then reads the logs as a whole, and finds the same",
        (
            "_last_write",
            "for kind, start, stop in reversed(records):",
            "reversed(records)  →  records",
        ): "an opening then reads the logs as a whole, and finds the same",
    },
    "framework/topicstore/lifecycle/archive_slab.py": {
        (
            "_may_match",
            "found = topics is None or any(map(topic_filter.matches, topics))",
            "any(map(topic_filter.matches, topics))  →  map(topic_filter.matches, topics)",
        ): "an archive without a matching topic is read, and nothing is found",
        (
            "_may_match",
            "found = self._matching.get(topic_filter.text)",
            "self._matching.get(topic_filter.text)  →  topic_filter.text",
        ): "an archive without a matching topic is read, and nothing is found",
        (
            "_batch",
            "together = int(rows[-1]) - int(rows[0]) + 1 == len(rows)",
            "int(rows[-1]) - int(rows[0])  →  int(rows[-1]) + int(rows[0])",
        ): "the rows are then taken one by one",
        (
            "_batch",
            "together = int(rows[-1]) - int(rows[0]) + 1 == len(rows)",
            "0  →  -1",
        ): "the rows are then taken one by one",
        (
            "_batch",
            "together = int(rows[-1]) - int(rows[0]) + 1 == len(rows)",
            "int(rows[-1])  →  rows[-1]",
        ): "NumPy's integers add up to the same number",
        (
            "_batch",
            "together = int(rows[-1]) - int(rows[0]) + 1 == len(rows)",
            "int(rows[0])  →  rows[0]",
        ): "NumPy's integers add up to the same number",
        (
            "info",
            "return SlabInfo(streams=int(self._messages > 0), details=details)",
            "int(self._messages > 0)  →  self._messages > 0",
        ): "a truth value is an integer",
    },
    "framework/topicstore/runtime/clocks.py": {
        (
            "stored",
            "if differ < self._lowest:",
            "differ < self._lowest  →  differ <= self._lowest",
        ): "an equal value is set again",
    },
    "framework/topicstore/pubsub/feed.py": {
        (
            "_step",
            "if len(view.scans) > _OPEN_SCANS:",
            "len(view.scans) > _OPEN_SCANS  →  len(view.scans) >= _OPEN_SCANS",
        ): "one scan fewer stays open, and a new one continues it",
        (
            "_step",
            "if len(view.scans) > _OPEN_SCANS:",
            "if len(view.scans) > _OPEN_SCANS:  →  if not len(view.scans) > _OPEN_SCANS:",
        ): "no scan stays open, and each batch is read by a new one",
    },
    "framework/topicstore/pubsub/filter_index.py": {
        (
            "put_locked",
            "if len(topic) > _LONGEST:",
            "if len(topic) > _LONGEST:  →  if not len(topic) > _LONGEST:",
        ): "routes of other topics are cached, and found as before",
    },
    "framework/topicstore/pubsub/hub.py": {
        (
            "matching",
            "if self._abandoned:",
            "if self._abandoned:  →  if not self._abandoned:",
        ): "the next commit or subscription removes a listener that was abandoned",
    },
    "framework/topicstore/pubsub/read_cache.py": {
        (
            "rows",
            'start = int(np.searchsorted(positions, np.uint64(after), side="right")) if after > self.after and rows else 0',
            "after > self.after and rows  →  after > self.after or rows",
        ): "the search finds the same first row, of an empty batch as well",
    },
    "framework/topicstore/pubsub/recent_commits.py": {
        (
            "__init__",
            "self.positions = parts[0].positions() if len(parts) == 1 else np.concatenate([p.positions() for p in parts])",
            "1  →  0",
        ): "joining the positions of one part returns the same ones",
        (
            "read",
            "self._joined = whole",
            "self._joined = whole  →  pass",
        ): "commits that were joined are joined again",
        (
            "_readable",
            "rows = 0",
            "0  →  -1",
        ): "a batch that subscriptions share may have one message more",
    },
    "framework/topicstore/pubsub/retained_lookup.py": {
        (
            "any",
            "return any_retained(self._storage())",
            "any_retained(self._storage())  →  self._storage()",
        ): "each new subscription then looks for retained messages by itself",
    },
    "framework/topicstore/queues/queue.py": {
        (
            "_rotate",
            "if self._storage.shards[0].generations.listed()[-1].live_bytes >= _GENERATION_BYTES:",
            "self._storage.shards[0].generations.listed()[-1].live_bytes >= _GENERATION_BYTES  →  self._storage.shards[0].generations.listed()[-1].live_bytes > _GENERATION_BYTES",
        ): "a generation may have one byte more",
        (
            "add",
            "if self._end + len(positions) > len(self._positions):",
            "self._end + len(positions) > len(self._positions)  →  self._end + len(positions) >= len(self._positions)",
        ): "the arrays grow one append earlier",
    },
    "framework/topicstore/queues/queues.py": {
        (
            "_has_shards",
            'return (path / MANIFEST).exists() or any(path.glob("shard-*"))',
            "path.glob('shard-*')  →  'shard-*'",
        ): "opening such a directory finds that it holds no queue",
    },
    "framework/topicstore/sessions/commits.py": {
        (
            "__init__",
            "self._over = over",
            "self._over = over  →  pass",
        ): "only sessions of a cluster are lost by a write that has no answer",
    },
    "framework/topicstore/sessions/delivery_batch.py": {
        (
            "__init__",
            "self.retain = _value(fold([message.retain for message in messages])) if messages else False",
            "fold([message.retain for message in messages])  →  [message.retain for message in messages]",
        ): "a list of equal flags has the same items as their value",
        (
            "__init__",
            "elif len(self.positions) <= _FEW:",
            "if len(self.positions) <= _FEW:  →  if not len(self.positions) <= _FEW:",
        ): "both ways return the same columns, each is quicker for its number of messages",
        (
            "count_of",
            "return sum([len(one.packet_ids) if isinstance(one, DeliveryBatch) else 1 for one in packets])",
            "1  →  2",
        ): "only how many packets are sent in one turn differs",
        (
            "selected_of",
            "if shared is not None and len(columns.selections) < _SHARED:",
            "if shared is not None and len(columns.selections) < _SHARED:  →  if not (shared is not None and len(columns.selections) < _SHARED):",
        ): "sessions select the same messages each for itself",
        (
            "selected_of",
            "if shared is not None and len(columns.selections) < _SHARED:",
            "shared is not None  →  shared is None",
        ): "sessions select the same messages each for itself",
        (
            "selected_of",
            "if shared is not None and len(columns.selections) < _SHARED:",
            "len(columns.selections) < _SHARED  →  len(columns.selections) <= _SHARED",
        ): "one selection more is kept",
        (
            "_folded",
            "values = column if isinstance(column, Constant) else fold(to_list(column)) if len(column) else [0]",
            "0  →  -1",
        ): "no row has the value of a column without rows",
    },
    "framework/topicstore/sessions/retained_cursor.py": {
        (
            "__init__",
            'self._sent = behind or ""',
            "self._sent = behind or ''  →  pass",
        ): "a topic is handed out before the last one is asked for",
        (
            "__init__",
            'self._sent = behind or ""',
            "behind or ''  →  behind and ''",
        ): "a topic is handed out before the last one is asked for",
    },
    "framework/topicstore/sessions/session.py": {
        (
            "_read",
            "self.effort += count",
            "self.effort += count  →  pass",
        ): "only how many sessions are served in one turn differs",
        (
            "__init__",
            "self.epoch = epoch",
            "self.epoch = epoch  →  pass",
        ): "only a cluster compares the periods in which a site owned a shard",
    },
    "framework/topicstore/sessions/session_expiry.py": {
        (
            "_commit_members",
            "sessions = [session for one in clients if (session := self._registry.connected.get(one)) is not None]",
            "self._registry.connected.get(one)  →  one",
        ): "only members in a cluster have answers to commit",
    },
    "framework/topicstore/sessions/session_store.py": {
        (
            "forget_timer",
            "self.write(shard, [FrameworkWrite(key, None)])",
            "self.write(shard, [FrameworkWrite(key, None)])  →  pass",
        ): "the write that changed the session has removed its timer",
        (
            "revocable",
            "if back and is_shared(batch.topic_filter):",
            "is_shared(batch.topic_filter)  →  batch.topic_filter",
        ): "only messages of groups are taken back",
        (
            "places",
            'return {int.from_bytes(key[-4:], "big"): decode(key, value, tuple[int, list[int]])[1] for key, value in found}',
            "4  →  3",
        ): "no session makes as many subscriptions as three bytes can number",
    },
    "framework/topicstore/sessions/shared/records.py": {
        (
            "messages_of",
            'return int.from_bytes(key[-12:-8], "big"), unpack_positions(record.first, record.steps, record.width)',
            "12  →  11",
        ): "no database has as many shards as three bytes can number",
    },
    "framework/topicstore/shard/head_counter.py": {
        (
            "count_heads",
            "return _tally(topics.values.tolist(), client_ids.values.tolist(), sums)",
            "client_ids.values.tolist()  →  client_ids.values",
        ): "an array of texts has the same texts as a list",
    },
    "framework/topicstore/shard/reader.py": {
        (
            "begin",
            "known = reaching <= {cursor.stream for cursor in cursors}",
            "reaching <= {cursor.stream for cursor in cursors}  →  reaching < {cursor.stream for cursor in cursors}",
        ): "cursors without later messages are read, and nothing is found",
    },
    "framework/topicstore/shard/record_codec.py": {
        (
            "decode_many",
            "record = strip_checksum(key, value)",
            "strip_checksum(key, value)  →  strip_checksum(value, key)",
        ): "each record is then decoded on its own, with the same result",
    },
    "framework/topicstore/shard/state.py": {
        (
            "_brief",
            'return repr(value) if len(value) <= 40 else f"{value[:40]!r}… ({len(value)} bytes)"',
            "40  →  41",
        ): "only the text of an error differs",
    },
    "framework/topicstore/shard/tally_records.py": {
        (
            "_cut",
            "np.diff(codes, prepend=codes[:1] + np.uint64(1)) != 0 for codes in (tally.topic, tally.client_id)",
            "0  →  -1",
        ): "only the sizes of the parts of a table differ",
    },
    "framework/topicstore/shard/zones.py": {
        (
            "_extended",
            "if begin <= least <= end + _NEAR and (greatest <= end or greatest - least <= _NEAR):  # nearly always",
            "end + _NEAR  →  end - _NEAR",
        ): "the general way joins the same spans",
    },
    "framework/topicstore/storage/counting/contents.py": {
        (
            "_latest",
            "if found.keys() >= set(last.values()):",
            "last.values()  →  last",
        ): "the same messages are read as often as a deletion could require",
    },
    "framework/topicstore/storage/counting/counting.py": {
        (
            "_count_gap",
            "counted = 0",
            "0  →  1",
        ): "a database doesn't use the number of messages that it has counted",
        (
            "_count_gap",
            "counted = 0",
            "0  →  -1",
        ): "a database doesn't use the number of messages that it has counted",
    },
    "framework/topicstore/storage/directory/manifest.py": {
        (
            "new_manifest",
            "created=format_time(int(time.time()) * 1_000_000),",
            "int(time.time())  →  time.time()",
        ): "the time may have fractions of a second",
    },
    "framework/topicstore/storage/generations.py": {
        (
            "generation_infos",
            "sealed=None if one.sealed is None else max(record.sealed or 0 for record in records),",
            "0  →  -1",
        ): "all seals are later than both",
    },
    "framework/topicstore/storage/keyed_message_records.py": {
        (
            "cursor_over",
            'return Cursor(database, shard, GENERATION, 0, "#", _ENCODER.encode((start, end)))',
            "0  →  -1",
        ): "keyed messages have no streams",
    },
    "framework/topicstore/storage/reading/ordering.py": {
        (
            "ordered",
            'if request.timestamps is None and order != "timestamp":  # otherwise more messages may have to be read',
            "request.timestamps is None  →  request.timestamps is not None",
        ): "only how many messages are read at once differs",
    },
    "framework/topicstore/storage/replays.py": {
        (
            "merge",
            "while lasts and lasts[0] == safe:  # equal positions of different shards",
            "0  →  -1",
        ): "equal positions take one more turn, without messages",
    },
    "framework/topicstore/storage/storage.py": {
        (
            "refresh",
            "self.check_open()",
            "self.check_open()  →  pass",
        ): "both checks raise the same error, one of them also without waiting",
        (
            "run_shards",
            "plan = ReplayPlan(shards=list(plans), order=order, batch_size=rows, timestamps=timestamps)",
            "list(plans)  →  plans",
        ): "the callers pass lists",
    },
    "layouts/topicstore_layouts/block/format.py": {
        (
            "_names",
            "if not 0 <= (places if isinstance(places, int) else int(self._array(places).max())) < len(texts):",
            "0  →  -1",
        ): "a block is bound by a checksum, so no damage makes a place negative",
    },
    "layouts/topicstore_layouts/block/matching.py": {
        (
            "of",
            "room = max(_KEPT_BYTES // max(len(self._topics), _LEAST_BYTES), 1)",
            "1  →  2",
        ): "only how many matchers are cached differs",
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
        (
            "frames",
            "chosen = set(numbers.tolist())",
            "numbers.tolist()  →  numbers",
        ): "NumPy's integers are the same keys",
    },
    "layouts/topicstore_layouts/block/slab.py": {
        (
            "cover",
            "return streams if len(streams) == 1 else [ALL]",
            "1  →  2",
        ): "streams may be read one by one or together, and the caller merges them",
    },
    "layouts/topicstore_layouts/block/sorted_rows.py": {
        (
            "_unified",
            "places = np.split(numbers, ends[:-1])",
            "1  →  0",
        ): "compaction sorts the rows of one part at a time",
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
    "layouts/topicstore_layouts/shared/name_table.py": {
        (
            "_learn",
            "return bool(new)",
            "bool(new)  →  new",
        ): "a list is as true as its truth value",
        (
            "name",
            "return str(name)",
            "str(name)  →  name",
        ): "the names are texts already",
        (
            "stream",
            "if not self._loaded or self._damages or number >= self._count:",
            "not self._loaded or self._damages or number >= self._count  →  not self._loaded and self._damages and (number >= self._count)",
        ): "the callers have looked the name up before, which loads the names and checks the number",
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
        (
            "_dense",
            "return len(near) * (last - first + 1) <= _DENSE * len(positions) * (int(near[-1]) - first + 1)",
            "int(near[-1])  →  near[-1]",
        ): "only how messages are fetched differs",
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
        (
            "_condition",
            'return _Condition(" AND ".join(terms) or "true", tuple(values), exact)',
            "tuple(values)  →  values",
        ): "a list has the same parameters",
    },
    "layouts/topicstore_layouts/wildcard_optimized/keymapper.py": {
        (
            "_bits",
            "if room >= 0:",
            "0  →  -1",
        ): "no key is shorter than a position, of eight bytes",
    },
}
"""By file; by function, line and description of the mutation."""
