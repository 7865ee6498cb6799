"""The progress of an import, kept in the database and committed with its messages.

Stored form (state keyspace of every shard)::

    "import/" source id  -> Marker, a msgpack array that begins with a version

Every batch writes the marker to all shards, each in one engine write with that shard's messages. A batch is atomic only
within a shard, so after a crash the shards' markers may differ. Reading then continues at the lowest marker, and each
shard skips the rows below its own marker.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import msgspec

from topicstore import CorruptionError, Database, ImportSourceError, NewerFormatError, StateWrite

from .rows import NO_PREFIX, Prefix, Rows
from .source import Source

if TYPE_CHECKING:
    from topicstore.client.remote_database import RemoteDatabase

__all__ = ["Marker", "Progress"]

_PREFIX = b"import/"
_VERSION = 1
_VERSION_WITH_OPTIONS = 2


class Marker(msgspec.Struct, frozen=True, gc=False, array_like=True):
    """The record of an import in one shard. Fields are only ever appended."""

    version: int = _VERSION
    run: int = 1
    """The number of the run: 1, and higher by one each time the whole source is imported again."""
    rows: int = 0
    """The number of rows of the source that are finished in this shard."""
    done: bool = False
    """Whether all rows of the source are finished."""
    prefix: Prefix = NO_PREFIX
    """The prefix of the text from which these rows came."""
    name: str = ""
    """The name of the source, for people."""
    how: str = ""
    """The options that affect the conversion of rows. With options, the version is 2, so that older programs, which
    ignore them, refuse to continue."""


_ABSENT = Marker(version=0)
"""The placeholder for a shard without a marker."""


def _decode(data: bytes | None) -> Marker:
    if data is None:
        return _ABSENT
    try:
        marker = msgspec.msgpack.decode(data, type=Marker)
    except msgspec.DecodeError as bad:
        raise CorruptionError(str(bad), place="state: import marker") from bad
    if marker.version > _VERSION_WITH_OPTIONS:
        reads = _VERSION_WITH_OPTIONS
        raise NewerFormatError(f"an import marker has version {marker.version}; this topicstore reads {reads}")
    return marker


class Progress:
    """The progress of one source's import, stored as a marker in each shard; not stored for a source without an id."""

    def __init__(
        self, db: Database | RemoteDatabase, source: Source, *, again: bool = False, skip: int = 0, retain: bool = False
    ) -> None:
        """Load the progress of earlier imports of the source.

        again:  start at the first row, even if rows were imported before.
        skip:   the number of rows to skip at least.
        retain: rows also become retained messages, in the shards of their topics.

        Raises `ImportSourceError` if rows of the source were imported with other options, unless ``again``.
        """
        self._db = db
        self._name = source.name
        self._retain = retain
        self._how = " ".join(filter(None, (source.options, source.mapping.told, "--retain" if retain else "")))
        self._key = _key_of(source.id)
        self._shards = range(db.manifest.shards)
        markers = self._load(self._key)
        self._run = max(marker.run for marker in markers)
        self.finished = all(marker.done and marker.run == self._run for marker in markers)
        """Whether all rows of the source were imported."""
        self._rows = [0] * len(markers)
        self._prefix = NO_PREFIX
        continued = False
        self.other = source.named and not again and not self._is_same(source, markers)
        """Whether the source's content differs from that imported under its name before."""
        again = again or self.other
        if again:
            self._run += any(marker != _ABSENT for marker in markers)
        else:
            if _ABSENT in markers and self._key is not None and not source.named:
                continued = self._continue(source)
            for shard, marker in enumerate(markers):
                if marker != _ABSENT:
                    self._check_options(marker)
                    self._rows[shard] = marker.rows if marker.run == self._run else 0
                    self._prefix = _furthest(markers)
            if source.named and skip <= self.start:
                source.passed = min(zip(self._rows, [marker.prefix for marker in markers], strict=True))[1]
        if skip > self.start:
            self._rows = [max(rows, skip) for rows in self._rows]
            self._prefix = NO_PREFIX
        if again or skip or continued:
            # All shards get the new marker before the first row, so that a crash can't mix two imports.
            self._commit_all(done=False)

    def _is_same(self, source: Source, markers: list[Marker]) -> bool:
        prefix = _furthest([marker for marker in markers if marker.run == self._run])
        return prefix == NO_PREFIX or source.begins_with(prefix)

    def _load(self, key: bytes | None) -> list[Marker]:
        return [_ABSENT if key is None else _decode(self._db.state(shard).get(key)) for shard in self._shards]

    def _continue(self, source: Source) -> bool:
        """Continue after an earlier import whose rows this source begins with; return whether there is one.

        Of several, the import with the longest prefix is chosen.
        """
        imports: dict[bytes, list[Marker]] = {}
        for shard in self._shards:
            for key, data in self._db.state(shard).scan(_PREFIX):
                imports.setdefault(key, [_ABSENT for _ in self._shards])[shard] = _decode(data)
        imports.pop(self._key or b"", None)
        candidates: dict[Prefix, list[Marker]] = {}
        for markers in imports.values():
            run = max(marker.run for marker in markers)
            current = [marker if marker.run == run else _ABSENT for marker in markers]
            known = candidates.setdefault(_furthest(current), current)
            known[:] = map(_further, current, known)
        candidates.pop(NO_PREFIX, None)
        found = source.has_prefixes(list(candidates)) if candidates else []
        if found:
            self._prefix = found[-1]
            for shard, marker in enumerate(candidates[self._prefix]):
                self._check_options(marker)
                self._rows[shard] = marker.rows
        return bool(found)

    def _check_options(self, marker: Marker) -> None:
        """Raise `ImportSourceError` if a marker's rows were imported with other options."""
        if marker.rows and marker.how != self._how:
            raise ImportSourceError(
                f"{self._name}: its first rows were imported with {marker.how or 'no mapping'}, and not with "
                f"{self._how or 'none'}: go on with the same, or import all of it into another database"
            )

    @property
    def start(self) -> int:
        """The row at which reading continues."""
        return min(self._rows)

    def missing(self, rows: Rows) -> Rows:
        """Return the rows with only those messages that their shards don't have yet."""
        if rows.first >= max(self._rows):
            return rows
        lacking = self.lacking(rows, rows.client_ids())
        if self._retain:
            lacking = [one or other for one, other in zip(lacking, self.lacking(rows, rows.topics()), strict=True)]
        return rows.only(lacking)

    def lacking(self, rows: Rows, names: Sequence[str]) -> list[bool]:
        """Return, for each message, whether its shard has not stored it yet.

        ``names`` are the messages' client ids or topics, which decide the shards.
        """
        return [rows.number(n) >= self._rows[shard] for n, shard in enumerate(map(self._db.shard_of, names))]

    def state(self, rows: Rows) -> dict[int, Sequence[StateWrite]]:
        """Return the markers to commit together with rows, by shard."""
        if self._key is None:
            return {}
        marker = self._marker(rows.end, rows.prefix())
        write = StateWrite(self._key, msgspec.msgpack.encode(marker))
        return {shard: [write] for shard in self._shards if self._rows[shard] <= rows.end}

    def _marker(self, rows: int, prefix: Prefix, *, done: bool = False) -> Marker:
        version = _VERSION_WITH_OPTIONS if self._how else _VERSION
        return Marker(version, self._run, rows, done, prefix, self._name, self._how)

    def stored(self, rows: Rows) -> None:
        """Record that rows and their state are committed."""
        if rows.end >= max(self._rows):
            self._prefix = rows.prefix()
        self._rows = [max(rows.end, have) for have in self._rows]

    def finish(self) -> None:
        """Record in all shards that the import is complete."""
        self.finished = True
        self._commit_all(done=True)

    def _commit_all(self, *, done: bool) -> None:
        if self._key is not None:
            markers = [self._marker(rows, self._prefix, done=done) for rows in self._rows]
            writes = [StateWrite(self._key, msgspec.msgpack.encode(marker)) for marker in markers]
            self._db.store([], state={shard: [write] for shard, write in enumerate(writes)})


def _key_of(source_id: str | None) -> bytes | None:
    return None if source_id is None else _PREFIX + source_id.encode()


def _further(one: Marker, other: Marker) -> Marker:
    """Return the marker with more rows; of two with equally many, one that is not `_ABSENT`."""
    return max(one, other, key=lambda marker: (marker.rows, marker != _ABSENT))


def _furthest(markers: Iterable[Marker]) -> Prefix:
    """Return the prefix of the marker with the most rows."""
    return functools.reduce(_further, markers).prefix
