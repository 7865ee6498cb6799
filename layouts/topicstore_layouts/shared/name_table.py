"""A dictionary of names, which represents texts by small numbers. A slab has one for each kind of name.

Numbers count from 0 and are never reused. A dictionary takes the first 65,536 names and is full from
then on; later names, and those of more than 256 characters, are stored as texts where they are used.
This bounds its memory to some megabytes for any topics. Names are read from the engine on
demand, and all of them once the dictionary is full.

Stored form, version 1 (keyspace ``meta``; keys begin with the generation, u32; integers are
big-endian; KIND is chosen by the dictionary's owner)::

    generation KIND   id:u32     -> stream:u32 name:utf-8     stream is 0 where names have none
    generation KIND+1 name:utf-8 -> id:u32

All values have a checksum (see `topicstore.contract.checksums`).
"""

from __future__ import annotations

import struct
import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
from topicstore.contract.checksums import add_checksum, strip_checksum
from topicstore.contract.columns import Coded, Column, Constant, Texts, to_list
from topicstore.contract.engine import META, Reader, WriteBatch, encode_generation
from topicstore.contract.errors import CorruptionError

__all__ = ["CAPACITY", "Ids", "NameTable", "coded"]

Ids = npt.NDArray[np.uint32]
_U32 = struct.Struct(">I")
CAPACITY = 65_536
"""The number of names that a dictionary takes."""
LONGEST = 256
"""The most characters of a name in a dictionary: with longer names it could grow to gigabytes."""


class NameTable:
    """Names of one kind. One writer at a time; readers in any thread.

    ``stream_of`` returns a new name's stream, in the writer's thread; ``place`` describes the dictionary in errors.
    """

    def __init__(
        self, reader: Reader, generation: int, kind: int, stream_of: Callable[[str], int], place: str = "names"
    ) -> None:
        self.place = place
        self._reader = reader
        self._forward = encode_generation(generation) + bytes((kind,))
        self._back = encode_generation(generation) + bytes((kind + 1,))
        self._stream_of = stream_of
        self._ids: dict[str, int] = {}
        self._unsaved: dict[str, int] = {}
        self._next = self._count()
        self._loaded_whole = False
        """Whether the dictionary is full and completely in memory: then a name that isn't in memory has no number."""
        self._texts = Texts(np.full(self._next + 16, None, dtype=object))
        self._streams = np.zeros(self._next + 16, dtype=np.uint32)
        self._loaded = np.zeros(self._next + 16, dtype=bool)
        self._lock = threading.Lock()

    def _count(self) -> int:
        for chunk in self._reader.scan(META, self._forward, self._back, reverse=True, limit=1):
            return int(_U32.unpack(chunk[0][0][5:])[0]) + 1
        return 0

    def __len__(self) -> int:
        return self._next

    def lacks(self, name: str) -> bool:
        """Return True only if a name was never stored, neither with a number nor as text."""
        return self._next < CAPACITY and len(name) <= LONGEST and self.find(name) is None

    # --- writing ---

    def encode(self, names: Column) -> Ids | Constant[int] | Coded | Constant[str]:
        """Return the names of a batch as numbers; new names get numbers as long as there is room.

        If there is no room for one of them, all stay texts: `Coded` with their own list, or `Constant`.
        """
        if isinstance(names, Constant):
            known = self._ids.get(names.value)
            if known is None and self._learn([names.value]):
                known = self._ids[names.value]
            return names if known is None else Constant(known, len(names))
        rows = names if isinstance(names, Coded) else to_list(names)
        try:
            return self._known(rows)
        except KeyError:
            texts = to_list(rows)
            return self._known(rows) if self._learn(texts) else coded(texts)

    def _known(self, names: Coded | list[str]) -> Ids:
        """Return the numbers of names. Raises `KeyError` if one is not in memory."""
        if isinstance(names, Coded):
            return names.mapped(self._known)
        return np.fromiter(map(self._ids.__getitem__, names), np.uint32, len(names))

    def _learn(self, names: list[str]) -> bool:
        """Load these names into memory, with new numbers if the engine has none; return False if there is no room."""
        with self._lock:
            unknown = [name for name in dict.fromkeys(names) if name not in self._ids]
            if self._loaded_whole:
                return not unknown
            missing = [name for name in unknown if len(name) <= LONGEST]
            stored = self._reader.get_many(META, [self._back + name.encode() for name in missing])
            new = []
            for name, value in zip(missing, stored, strict=True):
                if value is None:
                    new.append(name)
                else:
                    self._remember(self._number(name, value), name, self._stream_of(name))
            room = CAPACITY - self._next
            for name in new[:room]:
                self._unsaved[name] = self._next
                self._next += 1
                self._remember(self._unsaved[name], name, self._stream_of(name))
            if len(new) > room:
                self._load(np.arange(self._next - len(self._unsaved)))
                self._loaded_whole = True
            return len(new) <= room and len(missing) == len(unknown)

    def _number(self, name: str, stored: bytes) -> int:
        """Return the number of a name, decoded from its stored value."""
        try:
            value = strip_checksum(self._back + name.encode(), stored)
        except CorruptionError as bad:
            raise CorruptionError(f"the number of name {name[:80]!r} is damaged: {bad}", self.place) from bad
        number = int.from_bytes(value, "big")
        if len(value) != _U32.size or number >= self._next:
            raise CorruptionError(f"{value[:8].hex()} is not the number of a name", self.place)
        return number

    def save(self, write: WriteBatch) -> None:
        """Add all uncommitted names to ``write``. The caller calls `saved` after the commit."""
        for name, number in self._unsaved.items():
            text, id_ = name.encode(), _U32.pack(number)
            forward, back = self._forward + id_, self._back + text
            write.put(META, forward, add_checksum(forward, _U32.pack(int(self._streams[number])) + text))
            write.put(META, back, add_checksum(back, id_))

    def saved(self) -> None:
        """Mark the names of the last `save` as committed."""
        if self._unsaved:
            self._unsaved = {}

    # --- reading ---

    def find(self, name: str) -> int | None:
        """Return the number of a name, or None if it has none."""
        whole = self._loaded_whole  # read first, because another thread may be loading
        number = self._ids.get(name)
        if number is None and not whole:
            value = self._reader.get(META, self._back + name.encode())
            number = self._unsaved.get(name) if value is None else self._number(name, value)
        return number

    def name(self, number: int) -> str:
        """Return the name of a number. Raises `CorruptionError` for a number without a name."""
        texts = self._texts
        name = texts.values[number] if number < len(texts.values) else None
        if name is None:
            name = self.names(np.array([number]))[0]
        return str(name)

    def names(self, ids: npt.NDArray[Any]) -> Coded:
        """Return the name of each number. Raises `CorruptionError` for a number without a name."""
        with self._lock:
            self._load(ids)
            return Coded(ids, self._texts)

    def stream(self, number: int) -> int:
        """Return the stream of a number."""
        with self._lock:
            if number >= len(self._loaded) or not self._loaded[number]:
                self._load(np.array([number]))
            return int(self._streams[number])

    def streams(self, ids: npt.NDArray[Any]) -> Ids:
        """Return the stream of each number."""
        with self._lock:
            self._load(ids)
            streams: Ids = self._streams[ids]
            return streams

    def _load(self, ids: npt.NDArray[Any]) -> None:
        if len(ids) and int(ids.max()) >= self._next:
            raise CorruptionError(f"number {int(ids.max())} was never given to a name", self.place)
        loaded = self._loaded[ids]
        if loaded.all():
            return
        missing = np.unique(ids[~loaded]).tolist()
        values = self._reader.get_many(META, [self._forward + _U32.pack(number) for number in missing])
        for number, stored in zip(missing, values, strict=True):
            if stored is None:
                raise CorruptionError(f"the name of number {number} is missing", self.place)
            name, stream = self._decode(number, stored)
            self._remember(number, name, stream)

    def _decode(self, number: int, stored: bytes) -> tuple[str, int]:
        """Return the name and the stream of a number, decoded from its stored value."""
        try:
            value = strip_checksum(self._forward + _U32.pack(number), stored)
            return value[4:].decode(), int(_U32.unpack(value[:4])[0])
        except (CorruptionError, UnicodeDecodeError, struct.error) as bad:
            raise CorruptionError(f"the name of number {number} is damaged: {bad}", self.place) from bad

    def _remember(self, number: int, name: str, stream: int) -> None:
        if number >= len(self._loaded):
            room = max(self._next, number + 1)
            self._streams = np.concatenate([self._streams, np.zeros(room, dtype=np.uint32)])
            self._loaded = np.concatenate([self._loaded, np.zeros(room, dtype=bool)])
        self._ids[name] = number
        self._texts.set(number, name)
        self._streams[number] = stream
        self._loaded[number] = True

    def verify(self, stream_of: Callable[[str], int | None]) -> Iterator[str]:
        """Read the whole dictionary and yield a sentence for each damage; compare streams with ``stream_of``."""
        expected = 0
        for chunk in self._reader.scan(META, self._forward, self._back):
            for key, stored in chunk:
                number = int.from_bytes(key[5:], "big")
                if number != expected:
                    yield f"number {number} is where {expected} was expected"
                expected = number + 1
                yield from self._verify_one(number, stored, stream_of)

    def _verify_one(self, number: int, stored: bytes, stream_of: Callable[[str], int | None]) -> Iterator[str]:
        try:
            name, stream = self._decode(number, stored)
            back = self._reader.get(META, self._back + name.encode())
            if back is None or self._number(name, back) != number:
                yield f"name {name[:80]!r} does not lead back to its number {number}"
            elif stream != stream_of(name):
                yield f"name {name[:80]!r} has stream {stream}, not the one that its levels lead to"
        except CorruptionError as bad:
            yield bad.reason


def coded(names: list[str]) -> Coded:
    """Return a `Coded` column: the distinct texts in order of first occurrence, and an index for each row."""
    numbers = {name: number for number, name in enumerate(dict.fromkeys(names))}
    codes = np.fromiter(map(numbers.__getitem__, names), np.uint32, len(names))
    return Coded(codes, Texts.of(list(numbers)))
