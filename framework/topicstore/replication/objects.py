"""The objects of a log store as bytes: one codec for all kinds.

Stored form: a 128-bit xxh3 digest, then the body. The body is a msgpack array that begins with the format version of
its kind; fields are only ever appended. The digest covers the object's name, a zero byte and the body, so that an
object stored under a wrong name is detected like a flipped bit. Each log entry holds the digest of the entry before.
"""

from __future__ import annotations

import threading
from typing import Any, Generic, TypeVar

import msgspec
import xxhash
import zstandard

from topicstore.contract.errors import CorruptionError, InvalidArgumentError, NewerFormatError

from . import names
from .heads import Head, Kind, Progress

__all__ = [
    "BASES",
    "BEATS",
    "CHANGE_OVERHEAD",
    "CLAIMS",
    "CLUSTER_DOCUMENTS",
    "CUTS",
    "LARGEST_CHANGE",
    "LARGEST_ENTRY",
    "SHARED_PARTS",
    "Base",
    "Beat",
    "Claim",
    "ClusterDocument",
    "Cut",
    "Entry",
    "EntryTooLargeError",
    "GenerationPlan",
    "ObjectCodec",
    "Part",
    "ShardPlace",
    "SharedParts",
    "Site",
    "decode_entry",
    "encode_entry",
]

_VERSION = 1
_SIZE = 16
LARGEST_ENTRY = 64 << 20
"""The most bytes that an entry is written with: of its object, and of its uncompressed changes."""
LARGEST_CHANGE = LARGEST_ENTRY - (1 << 20)
"""The most bytes of one change. The rest of an entry has room for the head, and for what compression may add."""
CHANGE_OVERHEAD = 5
"""The most bytes that the encoding of an entry adds to each of its changes."""
_LEVEL, _QUICK_LEVEL = 1, -3
"""The zstandard levels for changes whose samples shrink, and for changes whose samples hardly do."""
_SAMPLED = 64 << 10
"""The minimum size, in bytes, of changes from which samples are taken."""
_SAMPLE = 2_048
"""The size of a sample, in bytes."""
_PLACES = tuple(number * 0.618034 % 1 for number in range(1, 9))
"""The offsets of the samples, as fractions of the whole. They are irregular, because changes may have equal sizes, and
each change begins with columns that compress well."""
_WORTH = 0.9
"""The compression ratio that samples must reach for the changes to be compressed at `_LEVEL`."""
_LARGEST_READ = 1 << 30
"""The most uncompressed bytes of an entry that is read; a larger size counts as corruption.

It is above `LARGEST_ENTRY`, because earlier versions wrote larger entries.
"""

R = TypeVar("R", bound=msgspec.Struct)


class EntryTooLargeError(InvalidArgumentError):
    """The changes don't fit in one log entry; nothing was sent. Split the batch into several changes."""


class Site(msgspec.Struct, frozen=True, array_like=True):
    """A site of the cluster."""

    address: str
    """The address at which other sites reach the site; only a hint, because replication needs no such connections."""
    incarnation: bytes
    """Random bytes that identify the site's process; a process that finds another value has been replaced."""
    leaving: bool = False
    """Whether the site is to keep no shards."""
    http_address: str = ""
    """The URL of the site's HTTP interface; empty if it has none."""
    closed: bool = False
    """Whether the site's process has ended in order; it gets no shards until another process of the site enters."""


class ShardPlace(msgspec.Struct, frozen=True, array_like=True):
    """The owner and the replicas of a shard."""

    owner: str
    epoch: int
    """The number of the document that named the owner."""
    incarnation: bytes
    """The incarnation of the process that was named owner; no other process may use the epoch."""
    replicas: tuple[str, ...]
    """The sites that hold the shard, including the owner."""
    joining: tuple[str, ...] = ()
    """Sites that are still catching up, and don't count as replicas yet."""
    heir: str = ""
    """The replica to which the owner is to hand over the shard; empty if the owner stays."""
    assigned: tuple[str, ...] = ()
    """The sites that are to keep the shard, as an administrator has said; empty if placement chooses them."""


class GenerationPlan(msgspec.Struct, frozen=True, array_like=True):
    """A generation that every shard is to have. The owner of each shard adds and drops it there."""

    number: int
    layout: str
    options: dict[str, Any]
    dropped: bool = False


class ClusterDocument(msgspec.Struct, frozen=True, array_like=True, kw_only=True):
    """The cluster's sites, and the owner and replicas of each shard. The document with the highest number counts."""

    version: int = _VERSION
    id: bytes
    """Random bytes by which a site recognizes its own document after a creation that got no answer."""
    database: bytes
    """The id of the database, so that two databases can't share a prefix of a store."""
    sites: dict[str, Site]
    shards: tuple[ShardPlace, ...]
    policies: dict[str, int | float | str | bool] = {}
    """Always empty. The field stays, because fields are stored by their order."""
    settings: dict[str, Any] = {}
    """The settings of the database that are the same on all sites."""
    generations: tuple[GenerationPlan, ...] = ()
    """All generations, by number from 1."""
    most_sites: int = 0
    """The highest number of sites that the cluster had."""
    token: bytes = b""
    """Random bytes that only the cluster's sites know, by which they recognize each other; empty in early documents."""


class Beat(msgspec.Struct, frozen=True, array_like=True, kw_only=True):
    """A heartbeat of a site."""

    version: int = _VERSION
    site: str
    incarnation: bytes
    address: str
    program: str
    """The version of topicstore that the site runs."""
    applied: dict[int, int]
    """The replication progress of the site, by shard: the index of the entry to be read next."""
    failed: tuple[int, ...] = ()
    """The shards whose copy at the site takes no writes since one failed."""
    back_off: float = 0.0
    """Remaining back-off in seconds, from this heartbeat on: sites that aren't in back-off take shards over first."""


class Part(msgspec.Struct, frozen=True, array_like=True):
    """An object that is part of a base."""

    name: str
    size: int
    checksum: bytes


class SharedParts(msgspec.Struct, frozen=True, array_like=True, kw_only=True):
    """The parts of a sealed generation.

    All bases (snapshots of the shard) share these objects until an entry of the log changes the generation.
    """

    version: int = _VERSION
    generation: int
    changed: int
    """The index of the last entry that changed the generation."""
    parts: tuple[Part, ...]


class Base(msgspec.Struct, frozen=True, array_like=True, kw_only=True):
    """The manifest of a base, a snapshot of a shard: its parts, and the progress in the log that they represent."""

    version: int = _VERSION
    progress: Progress
    """The progress from which a replica that takes the base continues."""
    site: str
    parts: tuple[Part, ...]
    """The parts that this base alone has."""
    fences: tuple[int, ...] | None = None
    """The indexes of all fences below the base, ascending; None if an earlier version wrote the base or a fence."""
    shared: tuple[SharedParts, ...] = ()
    """The sealed generations."""


class Claim(msgspec.Struct, frozen=True, array_like=True, kw_only=True):
    """The reservation of a log store for a database whose first cluster document is about to be created."""

    version: int = _VERSION
    database: bytes
    """The id of the database."""
    begun: bool
    """Whether the database exists already, and its contents are copied to the store before the document is created."""


class Cut(msgspec.Struct, frozen=True, array_like=True, kw_only=True):
    """The content of a cut, an object that marks a truncation of the log.

    Entries below the index in the object's name may have been deleted.
    """

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
    """The uncompressed bytes of the changes."""
    changes: bytes
    """A msgpack array of byte strings, compressed with zstandard; empty if there are no changes."""
    fence: int | None = None


class Entry(msgspec.Struct, frozen=True):
    """An entry of a log: the header, and the changes as byte strings in order."""

    head: Head
    changes: tuple[bytes, ...]
    """The changes, each in the encoding of its own kind."""


class _Versioned(msgspec.Struct, array_like=True):
    version: int


_ENCODER = msgspec.msgpack.Encoder()
_VERSIONS = msgspec.msgpack.Decoder(_Versioned)
_CHANGES = msgspec.msgpack.Decoder(tuple[bytes, ...])


class _Compressors(threading.local):
    """The compressors of a thread. They are reused, because creating one takes longer than compressing most entries."""

    def __init__(self) -> None:
        self.normal = zstandard.ZstdCompressor(level=_LEVEL).compress
        self.quick = zstandard.ZstdCompressor(level=_QUICK_LEVEL).compress


_COMPRESSORS = _Compressors()


def _shrinks(plain: bytes) -> bool:
    """Return whether samples of the bytes compress well; True without samples if there are fewer than `_SAMPLED`."""
    if len(plain) < _SAMPLED:
        return True
    room = len(plain) - _SAMPLE
    sample = b"".join([plain[at : at + _SAMPLE] for at in (int(place * room) for place in _PLACES)])
    return len(_COMPRESSORS.normal(sample)) <= _WORTH * len(sample)


def _digest(name: str, body: bytes) -> bytes:
    digest = xxhash.xxh3_128(b"%b\0" % name.encode())
    digest.update(body)
    return digest.digest()


class ObjectCodec(Generic[R]):
    """An encoder and decoder of one kind of object. ``what`` names the kind in errors."""

    def __init__(self, kind: type[R], what: str, newest: int = _VERSION) -> None:
        self._decoder = msgspec.msgpack.Decoder(kind)
        self._what = what
        self._newest = newest

    def encode(self, name: str, record: R) -> bytes:
        """Return the bytes to store under a name; they begin with the checksum."""
        body = _ENCODER.encode(record)
        return _digest(name, body) + body

    def decode(self, name: str, stored: bytes, store: str) -> R:
        """Return the object decoded from the bytes stored under ``name``; ``store`` is named in errors.

        Raises `CorruptionError`, and `NewerFormatError` for a version that is newer than this program's.
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
CLAIMS = ObjectCodec(Claim, "claim")
CUTS = ObjectCodec(Cut, "cut")
SHARED_PARTS = ObjectCodec(SharedParts, "sealed generation")
_ENTRIES = ObjectCodec(_StoredEntry, "log entry")


def encode_entry(shard: int, head: Head, changes: tuple[bytes, ...]) -> tuple[Entry, bytes]:
    """Return the entry, with the checksum filled in, and the bytes to store under its name.

    Raises `EntryTooLargeError` if the changes or the object are larger than `LARGEST_ENTRY`. Changes with at most
    `LARGEST_CHANGE` bytes in all, `CHANGE_OVERHEAD` counted for each, always fit.
    """
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
        changes=(_COMPRESSORS.normal if _shrinks(plain) else _COMPRESSORS.quick)(plain) if plain else b"",
        fence=head.fence,
    )
    data = _ENTRIES.encode(names.entry(shard, head.index), stored)
    if max(len(plain), len(data)) > LARGEST_ENTRY:
        raise EntryTooLargeError(
            f"the changes of one log entry have {len(plain)} bytes, {len(data)} as an object; each may be at most "
            f"{LARGEST_ENTRY}"
        )
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
        fence=stored.fence,
    )
    return Entry(head, _unpacked(stored, f"{store}: log entry {name}"))


def _unpacked(stored: _StoredEntry, place: str) -> tuple[bytes, ...]:
    if not stored.size and not stored.changes:
        return ()
    if not 0 < stored.size <= _LARGEST_READ:
        raise CorruptionError(f"its changes are said to have {stored.size} bytes", place)
    try:
        plain = zstandard.ZstdDecompressor().decompress(stored.changes, max_output_size=stored.size)
        if len(plain) != stored.size:
            raise CorruptionError(f"its changes have {len(plain)} bytes, not {stored.size}", place)
        return _CHANGES.decode(plain)
    except (zstandard.ZstdError, msgspec.DecodeError) as bad:
        raise CorruptionError(str(bad), place) from bad
