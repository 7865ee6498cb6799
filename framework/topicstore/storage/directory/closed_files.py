"""The list of each shard's files when the database was closed, by which files that are lost or cut short are detected.

Engines treat some of their files as optional, and the end of a file as the place where they stopped. So the files that
a clean close has left may lose their ends, and the engine opens them without an error. Therefore the files are listed
when all shards were closed in order, and compared before a shard is opened again. Opening the database for writing
removes the list before an engine changes anything. Without a list there is no comparison.

A version that doesn't know the list leaves it behind when it writes. So a list is not of the last closing, and isn't
believed, if a shard has younger files that are not in it: every opening makes some on RocksDB and LevelDB. Nor if the
notes of writes on disk (`topicstore.storage.directory.recovery_points`) are ahead of those that it has.

Stored form, the file ``closed`` of the database's directory, in lines::

    xxh64 of the rest, with 8 bytes of the database's id as seed, 16 hexadecimal digits
    32 random hexadecimal digits: no two lists are the same
    {"000012.sst": 1204, …}        for each shard: the sizes of its files
    [[31, 1204], null, …]          for each shard: the number of its last write that was noted, and its position

Lists of earlier versions have no last line.
Files that are empty, or that the engine doesn't need (`topicstore.contract.engine.Backend.unneeded`), aren't listed.
"""

from __future__ import annotations

import os
import uuid
from collections.abc import Iterator, Sequence
from fnmatch import fnmatchcase
from pathlib import Path

import attrs
import msgspec
import xxhash

from topicstore.contract.errors import DataLossError

from .files import is_foreign, read_own, replace_file, sync_directory
from .recovery_points import SyncedWrites

__all__ = ["ClosedFiles"]

_FILE = "closed"
_DRAFT = f"{_FILE}.new"
_TOLD = 5
"""The most files that an error names."""
_HEAD = 1
"""The number of lines between that of the checksum and those of the shards."""


@attrs.frozen
class ClosedFiles:
    """The list of one database's files. It is written and removed under the lock of the directory."""

    directory: Path
    database: bytes
    """The database's id."""
    shards: int
    unneeded: Sequence[str]
    """The patterns of the names of files and directories that are not listed."""

    def write(self) -> None:
        """List the files of all shards, which are closed and on disk. Returns when the list is on disk too."""
        sizes = [msgspec.json.encode(self._sizes(shard)) for shard in range(self.shards)]
        lines = [uuid.uuid4().hex.encode(), *sizes, msgspec.json.encode(self._noted())]
        rest = b"\n".join(lines) + b"\n"
        replace_file(self.directory / _FILE, self._checksum(rest) + b"\n" + rest, draft=self.directory / _DRAFT)

    def remove(self) -> None:
        """Remove the list, if there is one, so that it doesn't come back after a power failure."""
        (self.directory / _FILE).unlink(missing_ok=True)
        sync_directory(self.directory)  # even if there is none: a process may have been killed after it removed it

    def check(self, shard: int) -> None:
        """Raise `DataLossError` if a file that a shard had when it was closed is gone or has another size.

        If another process opens the database for writing meanwhile, it removes the list before a file changes.
        """
        listed = self._read()
        while listed is not None and (lost := list(self._lost(shard, listed))):
            written = self._written_since(listed)
            before, listed = listed, self._read()
            if listed == before:
                if written:
                    return
                more = f"; and {len(lost) - _TOLD:,} more files" if len(lost) > _TOLD else ""
                raise DataLossError(
                    f"shard {shard} of {self.directory} is not as it was closed: {'; '.join(lost[:_TOLD])}{more}. "
                    'Restore it from a copy, or open the database with recovery="point_in_time" to go on with what is '
                    "left"
                )

    def _read(self) -> list[bytes] | None:
        """Return the lines of the list after that of the checksum; None if there is no list, or if it is damaged."""
        try:
            checksum, _, rest = read_own(self.directory / _FILE).partition(b"\n")
        except FileNotFoundError:
            return None
        lines = rest.splitlines()
        known = len(lines) - _HEAD - self.shards in (0, 1)  # without and with what was noted of the writes
        return lines if checksum == self._checksum(rest) and known else None

    def _written_since(self, listed: list[bytes]) -> bool:
        """Return whether the database was opened for writing after the closing of which the list is."""
        try:
            closed = (self.directory / _FILE).lstat().st_mtime_ns
        except FileNotFoundError:  # just now, by a writer that opens the database
            return True
        for shard in range(self.shards):
            for name in self._sizes(shard).keys() - _listed_sizes(listed, shard).keys():
                if (self._directory_of(shard) / name).lstat().st_mtime_ns > closed:
                    return True
        if len(listed) == _HEAD + self.shards:
            return False
        before = msgspec.json.decode(listed[-1], type=list[tuple[int, int] | None])
        pairs = zip(before, self._noted(), strict=True)
        return any(now is not None and (noted is None or now > noted) for noted, now in pairs)

    def _noted(self) -> list[tuple[int, int] | None]:
        """Return, by shard, the number and position of the last write that was noted as being on disk."""
        notes = SyncedWrites(self.directory, self.database, self.shards)
        found = [notes.read(shard) for shard in range(self.shards)]
        return [None if one is None else (one.writes, one.position) for one in found]

    def _lost(self, shard: int, listed: list[bytes]) -> Iterator[str]:
        """Yield a description of each file that is not as it was listed."""
        directory = self._directory_of(shard)
        for name, size in _listed_sizes(listed, shard).items():
            try:
                found = (directory / name).lstat().st_size
            except (FileNotFoundError, NotADirectoryError):
                yield f"{directory.name}/{name}, of {size:,} bytes, is gone"
            else:
                if found != size:
                    yield f"{directory.name}/{name} has {found:,} bytes, and had {size:,}"

    def _sizes(self, shard: int) -> dict[str, int]:
        sizes = {}
        directory = self._directory_of(shard)
        for parent, directories, names in os.walk(directory, onerror=_raise):
            directories[:] = filter(self._is_needed, directories)
            for name in filter(self._is_needed, names):
                file = Path(parent, name)
                if size := file.lstat().st_size:
                    sizes[str(file.relative_to(directory))] = size
        return sizes

    def _is_needed(self, name: str) -> bool:
        return not is_foreign(name) and not any(fnmatchcase(name, pattern) for pattern in self.unneeded)

    def _directory_of(self, shard: int) -> Path:
        return self.directory / f"shard-{shard:04}"

    def _checksum(self, rest: bytes) -> bytes:
        return xxhash.xxh64_hexdigest(rest, int.from_bytes(self.database[:8], "little")).encode()


def _listed_sizes(listed: list[bytes], shard: int) -> dict[str, int]:
    return msgspec.json.decode(listed[_HEAD + shard], type=dict[str, int])


def _raise(failed: OSError) -> None:
    """Raise the error of a listing, which would otherwise pass for an empty directory. One that is gone is empty."""
    if not isinstance(failed, FileNotFoundError | NotADirectoryError):
        raise failed
