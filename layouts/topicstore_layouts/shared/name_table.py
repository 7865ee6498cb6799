"""A dictionary of names, which represents texts by small numbers. A slab has one for each kind of name.

Numbers count from 0 and are never reused. A dictionary takes names as long as they fit into 64 MB of memory, which
about 350,000 names do. Further names, and those of more than 256 characters, are stored as texts where they are used.
Most of the memory is for names that are used repeatedly. Once an eighth of the memory is in use, a dictionary takes a
new name only if the number of successful look-ups is at least a sixteenth of the number of names; once half is in use,
only if it is at least that number. So names that are used only once, such as random client ids, take no more than an
eighth of the memory, and further ones cost little.

The names of a slab are loaded as a whole when the first one is needed.

Stored form (keyspace ``meta``; keys begin with the generation, u32; integers in keys are big-endian; the layout chooses
KIND). All new names of a write are one record, version 2; version 1 has two entries for each name, which are read but
no longer written. One dictionary may have both, in ascending order of numbers::

    generation KIND   last:u32   -> 2:u8 msgpack [streams, names]   version 2
    generation KIND   id:u32     -> stream:u32 name:utf-8           version 1: one name; integers big-endian
    generation KIND+1 name:utf-8 -> id:u32                          version 1: the number of a name
    generation KIND+1 00         -> 2:u8        a short name was stored as text, because the dictionary took no more

    streams   bytes: the stream of each name as u32, little-endian; empty if all are 0
    names     array of texts; the last one has the number ``last``, those before it the numbers before
    stream    0 where names have none

A record may repeat names of earlier records, if the process couldn't determine that these were committed. The first
byte of an entry of version 1 is 0, because there are fewer than 2 ** 24 streams. Dictionaries of version 1 ended at
65,536 names; a dictionary with that many is treated as one that has stored texts.

All values have a checksum (see `topicstore.contract.checksums`).
"""

from __future__ import annotations

import struct
import sys
import threading
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
from topicstore.contract.checksums import add_checksum, strip_checksum
from topicstore.contract.columns import Coded, CodedNumbers, Column, Constant, Texts, to_iterable, to_list
from topicstore.contract.engine import META, Reader, WriteBatch, encode_generation
from topicstore.contract.errors import CorruptionError

__all__ = ["MOST_BYTES", "NAME_BYTES", "Ids", "NameTable", "coded"]

Ids = npt.NDArray[np.uint32]
MOST_BYTES = 64 << 20
"""The approximate bytes of memory that the names of a dictionary may take."""
NAME_BYTES = 110
"""The approximate bytes of memory that a name takes besides its text: a number and its places in four tables."""
LONGEST = 256
"""The most characters of a name in a dictionary."""
_V1_CAPACITY = 65_536
"""The number of names after which a dictionary of version 1 took no more."""
_VERSION = 2
_U32 = struct.Struct(">I")
_STREAM = np.dtype("<u4")
_MARK = b"\0"
"""The key of the mark of stored texts, after the prefix: no name has this character."""


class _Record(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    streams: bytes
    names: list[str]


_ENCODER = msgspec.msgpack.Encoder()
_RECORDS = msgspec.msgpack.Decoder(_Record)


class NameTable:
    """Names of one kind. One writer at a time; readers in any thread, without the lock once the names are loaded.

    ``streams_of`` returns the streams of new names, in the writer's thread; ``place`` describes the dictionary in
    errors. A name that can't be read, because its record is damaged, raises `CorruptionError` when it is used. A
    dictionary with damage takes no new names.
    """

    def __init__(
        self,
        reader: Reader,
        generation: int,
        kind: int,
        streams_of: Callable[[list[str]], Sequence[int]],
        place: str = "names",
    ) -> None:
        self.place = place
        self._reader = reader
        self._forward = encode_generation(generation) + bytes((kind,))
        self._back = encode_generation(generation) + bytes((kind + 1,))
        self._streams_of = streams_of
        self._count = 0
        """The number of names, including uncommitted ones and those that aren't loaded yet."""
        for chunk in reader.scan(META, self._forward, self._back, reverse=True, limit=1):
            self._count = _U32.unpack(chunk[0][0][5:])[0] + 1
        self._committed = self._saving = self._count
        """The number of names that are committed, and of those in the last `save`."""
        self._loaded = False
        self._ids: dict[str, int] = {}
        self._texts = Texts(np.full(16, None, dtype=object))
        self._streams = np.zeros(16, dtype=np.uint32)
        self._damages: list[tuple[int, int, str]] = []
        """The ranges of numbers whose names can't be read: the first, the number after the last, and the reason."""
        self._has_texts = self._marking = self._marked = False
        """Whether a short name was stored as text, whether the last `save` has that, and whether it is committed."""
        self._bytes = 0
        """The approximate bytes of memory of the loaded names."""
        self._found = 0
        """The number of look-ups that found a name in memory, plus the number of names that were loaded."""
        self._full = False
        self._by_code = CodedNumbers()
        self._lock = threading.Lock()
        """Guards the loading and adding of names."""

    def __len__(self) -> int:
        return self._count

    @property
    def memory(self) -> int:
        """The approximate bytes of memory that the loaded names take."""
        return self._bytes

    @property
    def damaged(self) -> bool:
        """Whether some names can't be read."""
        if not self._loaded:
            self._load()
        return bool(self._damages)

    def lacks(self, name: str) -> bool:
        """Return True only if a name was never stored, neither with a number nor as text."""
        return len(name) <= LONGEST and self.find(name) is None and not self._has_texts and not self._damages

    # --- loading ---

    def _load(self) -> None:
        """Load the names of the engine, unless another thread does it meanwhile."""
        with self._lock:
            if self._loaded:
                return
            reached = 0
            for chunk in self._reader.scan(META, self._forward, self._back):
                for key, stored in chunk:
                    stop = _U32.unpack(key[5:])[0] + 1
                    try:
                        names, streams = self._decode(key, stored)
                        first = stop - len(names)
                        if first > reached:
                            self._damages.append((reached, first, "is missing"))
                        again = max(reached - first, 0)  # names that earlier records have, too
                        self._add_locked(first + again, names[again:], streams[again:])
                    except CorruptionError as bad:
                        self._damages.append((reached, stop, f"is damaged: {bad.reason}"))
                    reached = stop
            self._count = self._committed = self._saving = self._found = reached
            key = self._forward + _U32.pack(_V1_CAPACITY - 1)
            marks = self._reader.get_many(META, [self._back + _MARK, key])
            self._marked = self._marking = marks[0] is not None
            self._has_texts = self._marked or (marks[1] or b"")[4:5] == b"\0"
            self._loaded = True

    def _decode(self, key: bytes, stored: bytes) -> tuple[list[str], Ids]:
        """Return the names and streams of a record of version 2, or of an entry of version 1."""
        number = _U32.unpack(key[5:])[0]
        value = strip_checksum(key, stored)
        try:
            if value[:1] == b"\0":
                return [value[4:].decode()], np.array(_U32.unpack(value[:4]), np.uint32)
            if value[:1] != bytes((_VERSION,)):
                raise CorruptionError(f"it is not of version {_VERSION}, the last that this topicstore reads")
            record = _RECORDS.decode(value[1:])
        except (msgspec.DecodeError, UnicodeDecodeError, struct.error) as bad:
            raise CorruptionError(str(bad)) from bad
        rows, streams = len(record.names), np.frombuffer(record.streams, np.uint8)
        if not 0 < rows <= number + 1 or len(streams) not in (0, rows * _STREAM.itemsize):
            raise CorruptionError(f"{rows} names up to number {number} with {len(streams)} bytes of streams")
        return record.names, streams.view(_STREAM) if len(streams) else np.zeros(rows, np.uint32)

    def _add_locked(self, first: int, names: list[str], streams: Sequence[int] | Ids) -> None:
        """Add names with consecutive numbers. A reader that finds a name's number also finds its text and stream."""
        stop = first + len(names)
        if stop > len(self._streams):
            grown = np.zeros(max(2 * len(self._streams), stop), dtype=np.uint32)
            grown[: len(self._streams)] = self._streams
            self._streams = grown
        self._streams[first:stop] = streams
        self._texts.extend(first, names)
        self._count = max(self._count, stop)  # assigned first, so that Ctrl-C can't cause a number to be assigned twice
        self._ids.update(zip(names, range(first, stop), strict=True))
        self._bytes += _size_of(names)

    # --- writing ---

    def encode(self, names: Column) -> Ids | Constant[int] | Coded | Constant[str]:
        """Return the names of a batch as numbers; new names get numbers as long as the dictionary takes them.

        If the dictionary doesn't take one of them, all names of the batch stay texts: `Coded` with their own list, or
        `Constant`.
        """
        if isinstance(names, Constant):
            number = self.encode_one(names.value, names.length)
            return names if number is None else Constant(number, names.length)
        if not self._loaded:
            self._load()
        count = self._count
        encoded: Ids | Coded
        if isinstance(names, Coded):
            ids = self._by_code.of(names, self._numbers)
            encoded = names.compact() if -1 in ids else ids.astype(np.uint32)
        else:
            texts = to_list(names)
            numbers = self._numbers(texts)
            encoded = coded(texts) if None in numbers else np.array(numbers, dtype=np.uint32)
        if not isinstance(encoded, Coded):
            self._found += len(encoded) - (self._count - count)
        elif not self._full:
            self._found += sum(map(self._ids.__contains__, to_iterable(names)))
        return encoded

    def encode_one(self, name: str, rows: int = 1) -> int | None:
        """Return the number of the name that all ``rows`` messages of a batch have; None if it can't be numbered."""
        if not self._loaded:
            self._load()
        number = self._ids.get(name)
        if number is not None:
            self._found += rows
        else:
            (number,) = self._numbers([name])
            if number is not None:
                self._found += rows - 1
        return number

    def _numbers(self, names: list[str]) -> list[int | None]:
        """Return the number of each name, or None; new names get numbers as long as the dictionary takes them."""
        numbers: list[int | None] = list(map(self._ids.get, names))
        if None in numbers:
            unknown = [name for name, number in zip(names, numbers, strict=True) if number is None]
            if self._learn(unknown):
                numbers = list(map(self._ids.get, names))
        return numbers

    def _learn(self, names: list[str]) -> bool:
        """Give numbers to names without one, as long as the dictionary takes them; return whether any has one now."""
        if self._full or self._damages or self._unproven:
            self._has_texts = True
            return False
        new = list(dict.fromkeys(names))
        if max(map(len, new)) > LONGEST:
            new = [name for name in new if len(name) <= LONGEST]
        if self._bytes + _size_of(new) > MOST_BYTES:
            ends = list(accumulate((_size_of([name]) for name in new), initial=self._bytes))
            new = new[: bisect_right(ends, MOST_BYTES) - 1]
            self._full = self._has_texts = True
        if new:
            streams = self._streams_of(new)
            with self._lock:
                self._add_locked(self._count, new, streams)
        return bool(new)

    @property
    def _unproven(self) -> bool:
        """Whether the names fill much of the memory, and were used too seldom to take more."""
        if self._bytes <= MOST_BYTES // 8:
            return False
        return self._found < (self._count if self._bytes > MOST_BYTES // 2 else self._count // 16)

    def encoded_streams(self, ids: Ids) -> Ids:
        """Return the streams of numbers that `encode` returned."""
        streams: Ids = self._streams[ids]
        return streams

    def save(self, write: WriteBatch) -> None:
        """Add all uncommitted names to ``write``, as one record. The caller calls `saved` after the commit."""
        first, stop = self._committed, self._count
        if first < stop:
            key = self._forward + _U32.pack(stop - 1)
            streams = self._streams[first:stop]
            packed = streams.astype(_STREAM).tobytes() if streams.any() else b""
            record = _Record(packed, self._texts.values[first:stop].tolist())
            write.put(META, key, add_checksum(key, bytes((_VERSION,)) + _ENCODER.encode(record)))
        if self._has_texts and not self._marked:
            key = self._back + _MARK
            write.put(META, key, add_checksum(key, bytes((_VERSION,))))
        self._saving, self._marking = stop, self._has_texts

    def saved(self) -> None:
        """Mark the names of the last `save` as committed."""
        self._committed, self._marked = self._saving, self._marking

    # --- reading ---

    def find(self, name: str) -> int | None:
        """Return the number of a name, or None if it has none."""
        if not self._loaded:
            self._load()
        return self._ids.get(name)

    def name(self, number: int) -> str:
        """Return the name of a number. Raises `CorruptionError` for a number without a name."""
        texts = self._texts.values
        name = texts[number] if number < len(texts) else None
        if name is None:
            name = self.names(np.array([number]))[0]
        return str(name)

    def names(self, ids: npt.NDArray[Any]) -> Coded:
        """Return the name of each number. Raises `CorruptionError` for a number without a name."""
        self.check(ids)
        return Coded(ids, self._texts)

    def all(self, first: int) -> list[str | None]:
        """Return all names from a number on, with None for each that can't be read."""
        if not self._loaded:
            self._load()
        names: list[str | None] = self._texts.values[first : self._count].tolist()
        return names

    def stream(self, number: int) -> int:
        """Return the stream of the name with this number."""
        if not self._loaded or self._damages or number >= self._count:
            self.check(np.array([number]))
        return int(self._streams[number])

    def streams(self, ids: npt.NDArray[Any]) -> Ids:
        """Return, for each number, the stream of the name that has it."""
        self.check(ids)
        streams: Ids = self._streams[ids]
        return streams

    def check(self, ids: npt.NDArray[Any]) -> None:
        """Raise `CorruptionError` if one of the numbers has no name."""
        if not self._loaded:
            self._load()
        if len(ids) and int(ids.max()) >= self._count:
            raise CorruptionError(f"number {int(ids.max())} was never given to a name", self.place)
        for first, stop, reason in self._damages:
            bad = ids[(ids >= first) & (ids < stop)]
            if len(bad):
                raise CorruptionError(f"the name of number {int(bad[0])} {reason}", self.place)

    def verify(self, stream_of: Callable[[str], int | None]) -> Iterator[str]:
        """Read the whole dictionary, compare streams with ``stream_of``, and yield a sentence for each damaged name."""
        numbers: dict[str, int] = {}
        reached = 0
        for chunk in self._reader.scan(META, self._forward, self._back):
            for key, stored in chunk:
                number = _U32.unpack(key[5:])[0]
                try:
                    names, streams = self._decode(key, stored)
                except CorruptionError as bad:
                    yield f"the name of number {number} is damaged: {bad.reason}"
                else:
                    first = number + 1 - len(names)
                    if first > reached:
                        yield f"number {first} is where {reached} was expected"
                    for each, (name, stream) in enumerate(zip(names, streams.tolist(), strict=True), first):
                        yield from _verify_one(name, each, numbers.setdefault(name, each), (stream, stream_of(name)))
                    if stored[4:5] == b"\0":
                        yield from self._verify_back(number, names[0])
                reached = number + 1
        mark = self._reader.get(META, self._back + _MARK)
        if mark is not None and mark != add_checksum(self._back + _MARK, bytes((_VERSION,))):
            yield "the mark of stored texts is damaged"

    def _verify_back(self, number: int, name: str) -> Iterator[str]:
        """Check the entry of version 1 that leads from a name to its number."""
        key = self._back + name.encode()
        stored = self._reader.get(META, key)
        if stored != add_checksum(key, _U32.pack(number)):
            yield f"name {name[:80]!r} does not lead back to its number {number}"


def _verify_one(name: str, number: int, other: int, streams: tuple[int, int | None]) -> Iterator[str]:
    """Compare a name's number with one found before, and its stream with that of its levels."""
    if number != other:
        yield f"name {name[:80]!r} has the numbers {other} and {number}"
    elif streams[0] != streams[1]:
        yield f"name {name[:80]!r} has stream {streams[0]}, not the one that its levels lead to"


def _size_of(names: list[str]) -> int:
    """Return the approximate bytes of memory of names in a dictionary."""
    return NAME_BYTES * len(names) + sum(map(sys.getsizeof, names))


def coded(names: list[str]) -> Coded:
    """Return a `Coded` column: the distinct texts in order of first occurrence, and an index for each row."""
    distinct = dict.fromkeys(names)
    if len(distinct) == len(names):
        return Coded(np.arange(len(names), dtype=np.uint32), Texts.of(names))
    numbers = {name: number for number, name in enumerate(distinct)}
    codes = np.fromiter(map(numbers.__getitem__, names), np.uint32, len(names))
    return Coded(codes, Texts.of(list(numbers)))
