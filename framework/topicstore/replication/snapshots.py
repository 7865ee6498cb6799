"""The contents of a shard as the parts of a base, and back.

A part is a byte with the version of the form, 1, and a zstandard frame of a msgpack array of runs: the name of a
keyspace, its keys, and their values. Keys of keyspaces with a shape are arrays of numbers. A base has all keys and
values of the shard's engine except its identity, so that streams, and with them cursors, are the same on all sites; it
doesn't depend on the engine. The shard's progress is not among the parts, because the manifest of the base has it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import msgspec
import zstandard

from topicstore.contract.engine import (
    DATA,
    GENERATION_END,
    INDEX,
    KEYS,
    KEYSPACES,
    META,
    STATE,
    Engine,
    Key,
    Keyspace,
    Reader,
    WriteBatch,
)
from topicstore.contract.errors import CorruptionError, NewerFormatError
from topicstore.shard.records import LOCAL_KEYS, PROGRESS, ranges_of

__all__ = ["clear", "has_contents", "pieces_of_generation", "pieces_of_state", "put_piece"]

_VERSION = 1
_PIECE = 8 << 20
"""The bytes of keys and values after which a part is full."""
_LARGEST = 1 << 31
_NAMED: dict[str, Keyspace[Any]] = {keyspace.name: keyspace for keyspace in KEYSPACES}
_END = b"\xff\xff\xff\xff"
"""The end of the keys of keyspaces that begin with a generation."""

_ALL = ((0, 0, 0), (GENERATION_END, 0, 0))
"""The range of the keys of keyspaces with a shape."""

_Run = tuple[str, list[Any], list[bytes]]
_ENCODER = msgspec.msgpack.Encoder()
_DECODER = msgspec.msgpack.Decoder(list[_Run])


def pieces_of_state(reader: Reader) -> Iterator[bytes]:
    """Yield the parts with a shard's state, which includes its tail and the records of its generations."""
    yield from _pieces(reader, [(STATE, None, None)])


def pieces_of_generation(reader: Reader, number: int) -> Iterator[bytes]:
    """Yield the parts with the messages of a generation."""
    yield from _pieces(reader, ranges_of(number))


def _pieces(reader: Reader, ranges: Iterable[tuple[Keyspace[Any], Key | None, Key | None]]) -> Iterator[bytes]:
    runs: list[_Run] = []
    size = 0
    for keyspace, start, end in ranges:
        for chunk in reader.scan(keyspace, start, end):
            pairs = [pair for pair in chunk if pair[0] not in LOCAL_KEYS] if keyspace is STATE else chunk
            if pairs:
                keys, values = map(list, zip(*pairs, strict=True))
                runs.append((keyspace.name, keys, values))
                size += sum(map(len, values)) + 24 * len(keys)
            if size >= _PIECE:
                yield _encoded(runs)
                runs, size = [], 0
    if runs:
        yield _encoded(runs)


def _encoded(runs: list[_Run]) -> bytes:
    return bytes((_VERSION,)) + zstandard.compress(_ENCODER.encode(runs), 3)


def put_piece(data: bytes, write: WriteBatch, place: str) -> None:
    """Add the keys and values of a part to a write. Raises `CorruptionError` and `NewerFormatError`."""
    if data[:1] != bytes((_VERSION,)):
        raise NewerFormatError(f"it has version {data[:1].hex()}; this topicstore reads up to {_VERSION}", place)
    try:
        plain = zstandard.ZstdDecompressor().decompress(data[1:], max_output_size=_LARGEST)
        for name, keys, values in _DECODER.decode(plain):
            keyspace = _NAMED[name]
            write.put_many(keyspace, keys if keyspace.shape is None else [tuple(key) for key in keys], values)
    except (zstandard.ZstdError, msgspec.DecodeError, KeyError) as bad:
        raise CorruptionError(str(bad), place) from bad


def has_contents(engine: Engine) -> bool:
    """Return whether a shard has anything besides its identity."""
    state = (key for chunk in engine.scan(STATE, limit=len(LOCAL_KEYS) + 1) for key, _ in chunk)
    return any(key not in LOCAL_KEYS for key in state) or any(
        True for keyspace in KEYSPACES if keyspace is not STATE for _ in engine.scan(keyspace, limit=1)
    )


def clear(engine: Engine, meanwhile: Callable[[], object] = lambda: None) -> None:
    """Remove everything from a shard except its identity: first its progress, without which it counts as empty.

    ``meanwhile`` is called after each step.
    """
    forgotten = WriteBatch()
    forgotten.delete(STATE, PROGRESS)
    engine.write(forgotten)
    for chunk in engine.scan(STATE):
        write = WriteBatch()
        write.change_many(STATE, found := [key for key, _ in chunk if key not in LOCAL_KEYS], [None] * len(found))
        engine.write(write)
    ranges: list[tuple[Keyspace[Any], Key, Key]] = [(META, b"", _END), (KEYS, b"", _END), (DATA, *_ALL), (INDEX, *_ALL)]
    for keyspace, start, end in ranges:
        write = WriteBatch()
        write.delete_range(keyspace, start, end)
        engine.write(write)
        engine.reclaim(keyspace, start, end)
        meanwhile()
