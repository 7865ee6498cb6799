"""The objects of a log store as bytes: one codec for all kinds.

Stored form: the xxh3 digest (128 bits) of the object's name, of a zero byte and of the rest; then a msgpack array that
begins with the version of its kind. Fields are only ever appended. The name is part of the digest, so an object under
another's name is refused as a flipped bit is. The digest of a log's entry stands in the entry after it.
"""

from __future__ import annotations

from typing import Generic, TypeVar

import msgspec
import xxhash
import zstandard

from topicstore.contract.errors import CorruptionError, NewerFormatError

from . import names
from .heads import Head, Kind, Progress

__all__ = [
    "BASES",
    "BEATS",
    "CLUSTER_DOCUMENTS",
    "CUTS",
    "Base",
    "Beat",
    "ClusterDocument",
    "Cut",
    "Entry",
    "ObjectCodec",
    "Part",
    "ShardPlace",
    "Site",
    "decode_entry",
    "encode_entry",
]

_VERSION = 1
_SIZE = 16
_LARGEST = 1 << 30
"""The bytes that the changes of one entry may have when they are unpacked; more is damage."""

R = TypeVar("R", bound=msgspec.Struct)


class Site(msgspec.Struct, frozen=True, array_like=True):
    """A site that takes part."""

    address: str
    """The address at which other sites reach it; it is a hint, since nothing rests on their talking."""
    incarnation: bytes
    """Random, of the process that runs there; a process that finds another one has been replaced."""


class ShardPlace(msgspec.Struct, frozen=True, array_like=True):
    """Who has a shard."""

    owner: str
    epoch: int
    """The number of the document that named the owner."""
    incarnation: bytes
    """The process of the owner's site that was named; no other goes on with the epoch."""
    replicas: tuple[str, ...]
    """The sites that hold the shard, the owner among them."""
    joining: tuple[str, ...] = ()
    """Sites that are catching up, and don't count yet."""
    heir: str = ""
    """The replica to which the owner is to hand over; empty if it stays."""


class ClusterDocument(msgspec.Struct, frozen=True, array_like=True, kw_only=True):
    """Which sites there are and who has what. The document with the highest number counts."""

    version: int = _VERSION
    id: bytes
    """Random: by it a site knows a document that it created and got no answer for."""
    database: bytes
    """The id of the database, so that two don't share a prefix."""
    sites: dict[str, Site]
    shards: tuple[ShardPlace, ...]
    policies: dict[str, int | float | str | bool] = {}


class Beat(msgspec.Struct, frozen=True, array_like=True, kw_only=True):
    """A sign of life."""

    version: int = _VERSION
    site: str
    incarnation: bytes
    address: str
    program: str
    """The version of topicstore that runs there."""
    applied: dict[int, int]
    """How far each of its shards is: the index of the entry to be read next."""


class Part(msgspec.Struct, frozen=True, array_like=True):
    """An object that is part of a base."""

    name: str
    size: int
    checksum: bytes


class Base(msgspec.Struct, frozen=True, array_like=True, kw_only=True):
    """The head of a base."""

    version: int = _VERSION
    progress: Progress
    """What a replica that takes the base goes on from."""
    site: str
    parts: tuple[Part, ...]


class Cut(msgspec.Struct, frozen=True, array_like=True, kw_only=True):
    """That entries below the index in its name may be gone."""

    version: int = _VERSION
    site: str


class _StoredEntry(msgspec.Struct, frozen=True, array_like=True, kw_only=True):
    version: int = _VERSION
    kind: Kind
    epoch: int
    id: bytes
    site: str
    before: bytes
    first_position: int
    last_position: int
    size: int
    """The bytes of the changes when they are unpacked."""
    changes: bytes
    """A msgpack array of byte strings, packed with zstandard; empty if there are none."""


class Entry(msgspec.Struct, frozen=True):
    """An entry of a log."""

    head: Head
    changes: tuple[bytes, ...]
    """Each in the encoding of its kind."""


class _Versioned(msgspec.Struct, array_like=True):
    version: int


_ENCODER = msgspec.msgpack.Encoder()
_VERSIONS = msgspec.msgpack.Decoder(_Versioned)
_CHANGES = msgspec.msgpack.Decoder(tuple[bytes, ...])


def _digest(name: str, body: bytes) -> bytes:
    return xxhash.xxh3_128_digest(b"%b\0%b" % (name.encode(), body))


class ObjectCodec(Generic[R]):
    """An encoder and decoder of one kind of object. ``what`` names the kind in errors."""

    def __init__(self, kind: type[R], what: str, newest: int = _VERSION) -> None:
        self._decoder = msgspec.msgpack.Decoder(kind)
        self._what = what
        self._newest = newest

    def encode(self, name: str, record: R) -> bytes:
        """Return the bytes to create under a name; they begin with the checksum."""
        body = _ENCODER.encode(record)
        return _digest(name, body) + body

    def decode(self, name: str, stored: bytes, store: str) -> R:
        """Return the object that lies under a name in ``store``, which errors name too.

        Raises `CorruptionError`, and `NewerFormatError` for a version above the newest.
        """
        place = f"{store}: {self._what} {name}"
        body = stored[_SIZE:]
        if len(stored) < _SIZE or stored[:_SIZE] != _digest(name, body):
            raise CorruptionError(f"the checksum of its {len(stored)} bytes is wrong", place)
        try:
            version = _VERSIONS.decode(body).version
            if version > self._newest:
                raise NewerFormatError(f"it has version {version}; this topicstore reads up to {self._newest}", place)
            return self._decoder.decode(body)
        except msgspec.DecodeError as bad:
            raise CorruptionError(str(bad), place) from bad


CLUSTER_DOCUMENTS = ObjectCodec(ClusterDocument, "cluster document")
BEATS = ObjectCodec(Beat, "beat")
BASES = ObjectCodec(Base, "base")
CUTS = ObjectCodec(Cut, "cut")
_ENTRIES = ObjectCodec(_StoredEntry, "log entry")


def encode_entry(shard: int, head: Head, changes: tuple[bytes, ...]) -> tuple[Entry, bytes]:
    """Return an entry, whose head gets its checksum, and the bytes to create under its name."""
    plain = _ENCODER.encode(changes) if changes else b""
    stored = _StoredEntry(
        kind=head.kind,
        epoch=head.epoch,
        id=head.id,
        site=head.site,
        before=head.before,
        first_position=head.first_position,
        last_position=head.last_position,
        size=len(plain),
        changes=zstandard.compress(plain, 3) if plain else b"",
    )
    data = _ENTRIES.encode(names.entry(shard, head.index), stored)
    return Entry(msgspec.structs.replace(head, checksum=data[:_SIZE]), changes), data


def decode_entry(shard: int, index: int, data: bytes, store: str) -> Entry:
    """Return the entry at an index of a shard's log. Raises the errors of `ObjectCodec.decode`."""
    name = names.entry(shard, index)
    stored = _ENTRIES.decode(name, data, store)
    head = Head(
        index=index,
        kind=stored.kind,
        epoch=stored.epoch,
        id=stored.id,
        site=stored.site,
        before=stored.before,
        checksum=data[:_SIZE],
        first_position=stored.first_position,
        last_position=stored.last_position,
    )
    return Entry(head, _unpacked(stored, f"{store}: log entry {name}"))


def _unpacked(stored: _StoredEntry, place: str) -> tuple[bytes, ...]:
    if not stored.size and not stored.changes:
        return ()
    if not 0 < stored.size <= _LARGEST:
        raise CorruptionError(f"its changes are said to have {stored.size} bytes", place)
    try:
        plain = zstandard.ZstdDecompressor().decompress(stored.changes, max_output_size=stored.size)
        if len(plain) != stored.size:
            raise CorruptionError(f"its changes have {len(plain)} bytes, not {stored.size}", place)
        return _CHANGES.decode(plain)
    except (zstandard.ZstdError, msgspec.DecodeError) as bad:
        raise CorruptionError(str(bad), place) from bad
