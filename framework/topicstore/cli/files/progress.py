"""How far an import has come, kept in the database and committed with its messages.

Stored form (state keyspace of every shard)::

    "import/" source id  -> Marker, a msgpack array that begins with a version

Every batch writes the marker to all shards, each in one engine write with that shard's messages.
A batch is all or nothing per shard only, so after a crash the shards' markers may differ: reading
goes on at the lowest, and each shard is given no row below its own.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from topicstore import CorruptionError, Database, NewerFormatError, StateWrite

from .rows import NO_PREFIX, Prefix, Rows
from .source import Source

__all__ = ["Marker", "Progress"]

_PREFIX = b"import/"
_VERSION = 1


class Marker(msgspec.Struct, frozen=True, gc=False, array_like=True):
    """What one shard knows of an import. Fields are only ever appended."""

    version: int = _VERSION
    run: int = 1
    """1, and one more each time that the whole source is imported again."""
    rows: int = 0
    """Rows of the source that are done with."""
    done: bool = False
    """That was all of them."""
    prefix: Prefix = NO_PREFIX
    """The text that those rows came from."""
    name: str = ""
    """Of the source, for people."""


def _decode(data: bytes) -> Marker:
    try:
        marker = msgspec.msgpack.decode(data, type=Marker)
    except msgspec.DecodeError as bad:
        raise CorruptionError(str(bad), place="state: import marker") from bad
    if marker.version > _VERSION:
        raise NewerFormatError(f"an import marker has version {marker.version}; this topicstore reads {_VERSION}")
    return marker


class Progress:
    """The markers of one source in all shards of a database; without an id nothing is kept."""

    def __init__(self, db: Database, source: Source, *, again: bool = False, skip: int = 0) -> None:
        self._db = db
        self._name = source.name
        self._key = _key_of(source.id)
        self._shards = range(db.manifest.shards)
        markers = self._load(self._key)
        former = None
        if None in markers:
            former = _key_of(source.former_id())
            # In some shards at most it was noted anew, when a crash came.
            markers = [marker or before for marker, before in zip(markers, self._load(former), strict=True)]
        self._run = max((marker.run for marker in markers if marker is not None), default=1)
        self.finished = all(marker is not None and marker.done and marker.run == self._run for marker in markers)
        """All rows were imported."""
        self._rows = [0] * len(markers)
        self._prefix = NO_PREFIX
        adopted = former is not None and not self.finished and any(marker is not None for marker in markers)
        if again:
            self._run += any(marker is not None for marker in markers)
        else:
            if None in markers and self._key is not None and not source.named:
                adopted = self._adopt(source) or adopted
            for shard, marker in enumerate(markers):
                if marker is not None:
                    self._rows[shard] = marker.rows if marker.run == self._run else 0
            self._prefix = _furthest(markers, self._prefix)
        if skip > self.start:
            self._rows = [max(rows, skip) for rows in self._rows]
            self._prefix = NO_PREFIX
        if again or skip or adopted:
            # In all shards before the first row, so that a crash can't mix this with what was before.
            self._commit_all(done=False)

    def _load(self, key: bytes | None) -> list[Marker | None]:
        if key is None:
            return [None for _ in self._shards]
        found = [self._db.state(shard).get(key) for shard in self._shards]
        return [None if data is None else _decode(data) for data in found]

    def _adopt(self, source: Source) -> bool:
        """Go on behind the earlier import with the most rows with which this source begins, too."""
        imports: dict[bytes, list[Marker | None]] = {}
        for shard in self._shards:
            for key, data in self._db.state(shard).scan(_PREFIX):
                imports.setdefault(key, [None for _ in self._shards])[shard] = _decode(data)
        imports.pop(self._key or b"", None)
        candidates: dict[Prefix, list[int]] = {}
        for markers in imports.values():
            run = max(marker.run for marker in markers if marker is not None)
            current = [marker if marker is not None and marker.run == run else None for marker in markers]
            prefix = _furthest(current, NO_PREFIX)
            rows = [0 if marker is None else marker.rows for marker in current]
            known = candidates.get(prefix, rows)
            candidates[prefix] = list(map(max, rows, known))
        candidates.pop(NO_PREFIX, None)
        found = source.has_prefixes(list(candidates)) if candidates else []
        if found:
            self._prefix = found[-1]
            self._rows = candidates[found[-1]]
        return bool(found)

    @property
    def start(self) -> int:
        """The row to read on from."""
        return min(self._rows)

    def missing(self, rows: Rows) -> Rows:
        """Return the rows that their shards don't have yet."""
        if rows.first >= max(self._rows):
            return rows
        shards = map(self._db.shard_of, rows.client_ids())
        return rows.only([rows.number(n) >= self._rows[shard] for n, shard in enumerate(shards)])

    def state(self, rows: Rows) -> dict[int, Sequence[StateWrite]]:
        """Return the state to commit with rows."""
        if self._key is None:
            return {}
        marker = Marker(run=self._run, rows=rows.end, prefix=rows.prefix(), name=self._name)
        write = StateWrite(self._key, msgspec.msgpack.encode(marker))
        return {shard: [write] for shard in self._shards if self._rows[shard] <= rows.end}

    def stored(self, rows: Rows) -> None:
        """Take note that rows and their state are committed."""
        if rows.end >= max(self._rows):
            self._prefix = rows.prefix()
        self._rows = [max(rows.end, have) for have in self._rows]

    def finish(self) -> None:
        """Take note that there are no more rows."""
        self.finished = True
        self._commit_all(done=True)

    def _commit_all(self, *, done: bool) -> None:
        if self._key is not None:
            markers = [
                Marker(run=self._run, rows=rows, done=done, prefix=self._prefix, name=self._name) for rows in self._rows
            ]
            writes = [StateWrite(self._key, msgspec.msgpack.encode(marker)) for marker in markers]
            self._db.store([], state={shard: [write] for shard, write in enumerate(writes)})


def _key_of(source_id: str | None) -> bytes | None:
    return None if source_id is None else _PREFIX + source_id.encode()


def _furthest(markers: Sequence[Marker | None], otherwise: Prefix) -> Prefix:
    """Return the prefix of the marker with the most rows."""
    present = [marker for marker in markers if marker is not None]
    return max(present, key=lambda marker: marker.rows).prefix if present else otherwise
