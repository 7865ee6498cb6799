"""A layout with a stream for every topic.

A reader of one topic reads only that topic's messages; a reader of many topics reads as many streams. All topics are
held in memory, so the layout is for thousands of topics, not for millions.

Stored form (integers in keys are unsigned, bytes big-endian)::

    keyspace ``meta``:  generation:4 number:4 -> the topic with that number, in UTF-8, with a checksum
    keyspace ``data``:  (generation, number, position) -> a row, with a checksum

A row is the msgpack array [payload, client id, qos, retain, timestamp, properties]. Checksums are those of
`topicstore.contract.checksums`. They cover the key, for a row as three numbers of 4, 8 and 8 bytes.
"""

import struct
import time

import msgspec
import numpy as np
from topicstore import MessageBatch, Properties
from topicstore.contract.checksums import add_checksum, strip_checksum
from topicstore.contract.columns import Constant, to_iterable
from topicstore.contract.engine import DATA, META, WriteBatch, encode_generation
from topicstore.contract.errors import CorruptionError
from topicstore.contract.layout import Damage, DeleteStep, Layout, ReadCounters, Slab, SlabInfo, SlabStep, StreamInfo
from topicstore.contract.topics import matches_any

_LOOKED_AT = 1_000
"""The maximum number of messages that one step of a delete reads and removes."""
_NUMBER = struct.Struct(">I")
_KEY = struct.Struct(">IQQ")


class Row(msgspec.Struct, frozen=True, gc=False, array_like=True, forbid_unknown_fields=True):
    """A message without its topic and position, which are in the key."""

    payload: bytes
    client_id: str
    qos: int
    retain: bool
    timestamp: int
    properties: Properties | None


_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(Row).decode


class PerTopicLayout(Layout):
    """A layout with a stream for every topic. It has no options."""

    def create(self, engine, shard, generation, parent, write):
        """Do nothing, because an empty slab has no stored form."""

    def open(self, engine, shard, generation):
        """Open a slab and read its topics."""
        return PerTopicSlab(engine, shard, generation)


class PerTopicSlab(Slab):
    """One generation of one shard. A place is the next position to read, as 8 bytes."""

    def __init__(self, engine, shard, generation):
        self.counters = ReadCounters()
        self._engine = engine
        self._shard = shard
        self._generation = generation
        self._topics = []
        """The topics by number."""
        self._numbers = {}
        """The numbers by topic. Readers use this table, so a topic is added here after `_topics`."""
        self._saved = 0
        """The number of topics that are stored in the engine."""
        self._load()

    def _load(self):
        head = encode_generation(self._generation)
        for chunk in self._engine.scan(META, head, encode_generation(self._generation + 1)):
            for key, value in chunk:
                try:
                    topic = strip_checksum(key, value).decode()
                except (CorruptionError, UnicodeDecodeError) as bad:
                    raise CorruptionError("the checksum is wrong", f"learned topics, key {key.hex()}") from bad
                if key != head + _NUMBER.pack(len(self._topics)):
                    raise CorruptionError("one before it is missing", f"learned topics, key {key.hex()}")
                self._add(topic)
        self._saved = len(self._topics)

    def _add(self, topic):
        self._topics.append(topic)
        self._numbers[topic] = number = len(self._topics) - 1
        return number

    # --- writing ---

    def store(self, batch, write):
        """Put every message, and the topics that are not stored yet."""
        numbers = [self._numbers.get(topic) for topic in to_iterable(batch.topics)]
        for row, topic in enumerate(to_iterable(batch.topics)):
            if numbers[row] is None:
                known = self._numbers.get(topic)
                numbers[row] = self._add(topic) if known is None else known
        for number in range(self._saved, len(self._topics)):  # includes topics of a previous write that failed
            key = encode_generation(self._generation) + _NUMBER.pack(number)
            write.put(META, key, add_checksum(key, self._topics[number].encode()))
        columns = (batch.payloads, batch.client_ids, batch.qos, batch.retain, batch.timestamps, batch.properties)
        rows = map(Row, *map(to_iterable, columns))
        for number, position, row in zip(numbers, to_iterable(batch.positions), rows, strict=True):
            key = self._generation, number, position
            write.put(DATA, key, add_checksum(_KEY.pack(*key), _encode(row)))

    def committed(self):
        """Record that all topics are stored in the engine."""
        self._saved = len(self._topics)

    # --- reading ---

    def streams(self, topic_filter):
        """Return the matching topics that are stored; unstored ones may still get other numbers."""
        if topic_filter.literal:
            matching = [topic_filter.text] if topic_filter.text in self._numbers else []
        else:
            matching = filter(topic_filter.matches, self._topics[: self._saved])
        found = [StreamInfo(stream=self._numbers[topic], pattern=topic) for topic in matching]
        return [info for info in found if info.stream < self._saved]

    def begin(self, stream, topic_filter, position):
        """Return the place of a position. Raises KeyError for an unknown stream."""
        if not 0 <= stream < self._saved:
            raise KeyError(stream)
        return position.to_bytes(8, "big")

    def next(self, stream, topic_filter, place, limits):
        """Read from the place on, within the limits."""
        if not 0 <= stream < self._saved:
            raise KeyError(stream)
        if len(place) != 8:
            raise ValueError(f"{len(place)} bytes")
        at = start = int.from_bytes(place, "big")
        rows, size, exhausted = {}, 0, True
        if topic_filter.matches(self._topics[stream]):
            self.counters.seeks += 1
            for position, row in self._rows(stream, at, limits.bound):
                late = limits.deadline is not None and at > start and time.monotonic() >= limits.deadline
                if len(rows) >= limits.rows or size >= limits.bytes or late:
                    exhausted = False
                    break
                rows[position] = row
                size += len(row.payload)
                at = position + 1
        self.counters.rows += len(rows)
        after = max(at, limits.bound + 1) if exhausted else at
        batch = self._batch(stream, rows)
        return SlabStep(batch=batch, place=after.to_bytes(8, "big"), exhausted=exhausted)

    def _rows(self, stream, first, last):
        if first <= last:
            start, end = (self._generation, stream, first), (self._generation, stream, last + 1)
            for chunk in self._engine.scan(DATA, start, end):
                for key, value in chunk:
                    self.counters.visited += 1
                    yield key[2], self._row(key, value)

    def _row(self, key, value):
        try:
            return _decode(strip_checksum(_KEY.pack(*key), value))
        except (CorruptionError, msgspec.DecodeError) as bad:
            raise CorruptionError(str(bad), self._place(key)) from bad

    def _place(self, key):
        return f"shard {self._shard}, generation {self._generation}, message at position {key[2]}"

    def _batch(self, stream, rows):
        if not rows:
            return MessageBatch.empty()
        columns = zip(*map(msgspec.structs.astuple, rows.values()), strict=True)
        payloads, client_ids, qos, retain, timestamps, properties = map(list, columns)
        return MessageBatch(
            topics=Constant(self._topics[stream], len(rows)),
            payloads=payloads,
            client_ids=client_ids,
            qos=qos,
            retain=retain,
            timestamps=timestamps,
            properties=properties,
            positions=np.array(list(rows), dtype=np.uint64),
            shards=Constant(self._shard, len(rows)),
        )

    # --- deleting ---

    def delete(self, topic_filter, first, last, spare=()):
        """Delete the messages of the matching streams that no filter in ``spare`` matches, a thousand in each step."""
        for info in self.streams(topic_filter):
            if matches_any(spare, self._topics[info.stream]):
                continue
            at, more = first, True
            while more:
                write, freed, more = WriteBatch(), 0, False
                start, end = (self._generation, info.stream, at), (self._generation, info.stream, last + 1)
                if at <= last:
                    for chunk in self._engine.scan(DATA, start, end, limit=_LOOKED_AT):
                        for key, value in chunk:
                            write.delete(DATA, key)
                            freed += len(value)
                            at = key[2] + 1
                messages = len(write.operations)
                more = messages == _LOOKED_AT
                yield DeleteStep(write=write, messages=messages, freed=freed)

    # --- maintenance ---

    def info(self):
        """Return the number of streams, one for each topic."""
        return SlabInfo(streams=len(self._topics))

    def verify(self, bound):
        """Check the checksum of every message up to ``bound``, and that its topic is known."""
        start, end = (self._generation, 0, 0), (self._generation + 1, 0, 0)
        for chunk in self._engine.scan(DATA, start, end):
            for key, value in chunk:
                if key[2] > bound:
                    continue
                try:
                    self._row(key, value)
                    if key[1] >= len(self._topics):
                        raise CorruptionError(f"there is no topic number {key[1]}", self._place(key))
                except CorruptionError as bad:
                    yield Damage(place=self._place(key), reason=bad.reason)
                else:
                    yield 1
