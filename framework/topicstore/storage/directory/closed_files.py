"""A list of each shard's files after a clean close, which detects files that were lost or truncated since.

Engines treat some of their files as optional, and a truncated file as the end of their writes. They may therefore open
a cleanly closed shard whose files lost data without an error. To detect this, the files and their sizes are listed
after all shards were closed cleanly, and compared before a shard is opened again. Opening the database for writing
removes the list before an engine changes a file. Without a list there is no comparison.

A version of topicstore that doesn't know the list doesn't remove it. A list is therefore ignored as stale if a shard
has newer files that are not listed; RocksDB and LevelDB create some at every opening. It is also ignored if the
recorded fsynced writes (`topicstore.storage.directory.recovery_points`) are later than those in the list.

Stored form, the file ``closed`` of the database's directory, in lines::

    xxh64 of the rest, with 8 bytes of the database's id as seed, 16 hexadecimal digits
    32 random hexadecimal digits, which make each list unique
    {"000012.sst": 1204, …}        for each shard: the sizes of its files in bytes
    [[31, 1204], null, …]          for each shard: the number and position of its last recorded fsynced write

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
from .recovery_points import RecoveryPoints

__all__ = ["ClosedFiles"]

_FILE = "closed"
_TEMPORARY = f"{_FILE}.new"
_TOLD = 5
"""The maximum number of files that an error names."""
_HEAD = 1
"""The number of lines between the checksum and the lines of the shards."""


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
        """Write the list of all shards' files, and fsync it. The shards must be closed, and their files on disk."""
        sizes = [msgspec.json.encode(self._sizes(shard)) for shard in range(self.shards)]
        lines = [uuid.uuid4().hex.encode(), *sizes, msgspec.json.encode(self._recovery_points())]
        rest = b"\n".join(lines) + b"\n"
        replace_file(self.directory / _FILE, self._checksum(rest) + b"\n" + rest, temporary=self.directory / _TEMPORARY)

    def remove(self) -> None:
        """Remove the list if it exists, and fsync the removal."""
        (self.directory / _FILE).unlink(missing_ok=True)
        sync_directory(self.directory)  # even without a list: a process may have been killed after removing it

    def check(self, shard: int) -> None:
        """Raise `DataLossError` if a file that a shard had when it was closed is missing or has another size.

        If another process opens the database for writing at the same time, it removes the list before it changes a
        file. The list is therefore read again before the error is raised.
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
        """Return the lines of the list after the checksum; None if there is no list, or if it is damaged."""
        try:
            checksum, _, rest = read_own(self.directory / _FILE).partition(b"\n")
        except FileNotFoundError:
            return None
        lines = rest.splitlines()
        # After the line of each shard, the list may have one more line, of the shards' fsynced writes.
        known = len(lines) - _HEAD - self.shards in (0, 1)
        return lines if checksum == self._checksum(rest) and known else None

    def _written_since(self, listed: list[bytes]) -> bool:
        """Return whether the list is stale: the database was opened for writing after the list was written."""
        try:
            closed = (self.directory / _FILE).lstat().st_mtime_ns
        except FileNotFoundError:  # a process that opens the database for writing has just removed it
            return True
        for shard in range(self.shards):
            for name in self._sizes(shard).keys() - _listed_sizes(listed, shard).keys():
                if (self._directory_of(shard) / name).lstat().st_mtime_ns > closed:
                    return True
        if len(listed) == _HEAD + self.shards:
            return False
        before = msgspec.json.decode(listed[-1], type=list[tuple[int, int] | None])
        pairs = zip(before, self._recovery_points(), strict=True)
        return any(now is not None and (noted is None or now > noted) for noted, now in pairs)

    def _recovery_points(self) -> list[tuple[int, int] | None]:
        """Return, by shard, the number and position of the last recorded fsynced write; None if there is none."""
        points = RecoveryPoints(self.directory, self.database, self.shards)
        found = [points.read(shard) for shard in range(self.shards)]
        return [None if one is None else (one.writes, one.position) for one in found]

    def _lost(self, shard: int, listed: list[bytes]) -> Iterator[str]:
        """Yield a description of each listed file that is missing or has another size."""
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
    """Raise an error of `os.walk`, which would otherwise ignore it, unless the directory is missing."""
    if not isinstance(failed, FileNotFoundError | NotADirectoryError):
        raise failed
