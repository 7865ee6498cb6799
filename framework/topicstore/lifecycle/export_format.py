"""The files of an export: partitioned Parquet, which any tool can read, and JSON files that mark it as complete.

::

    <target>/_topicstore_export.json                            Head
    <target>/shard=0000/generation=0001/part-00000.parquet      rows in order of their positions
    <target>/shard=0000/generation=0001/_topicstore_slab.json   Contents
    <target>/.unfinished-<32 hexadecimal digits>/               temporary (`topicstore.storage.directory.files`)

``shard`` and ``generation`` are partition columns, named by the directories. A file has the columns of
`topicstore.contract.arrow.SCHEMA_WITH_IDS` except ``shard``. Readers of partitioned data (Spark, DuckDB, pyarrow) take
this column from the path; if a file has the column too, some readers refuse it or silently prefer one of the two.
Readers that discover partitions skip names that begin with ``_`` or ``.``.

Both JSON files are ``{"format": 1, "checksum": "<xxh64 of the rest>", …}``. The directory of a slab (one shard's part
of a generation) is written under a temporary name, fsynced, and renamed. So under its final name it is complete, and
never changed again. A directory without `Contents` was not written by an export, and is ignored.

Digests are XXH3, big-endian. The digests of a file's footer and of its column chunks cover every byte of the file
except the first four, so any partial read can be verified.
"""

from __future__ import annotations

import uuid
from pathlib import Path
from typing import Annotated, Any, TypeVar

import msgspec
import pyarrow as pa
import xxhash

from topicstore.contract.arrow import SCHEMA_WITH_IDS
from topicstore.contract.errors import CorruptionError, ManifestMismatchError, NewerFormatError
from topicstore.contract.positions import MAX_TIME, first_position
from topicstore.storage.directory.files import OWNER_ONLY, convert_os_errors, replace_file, sync_directory
from topicstore.storage.directory.manifest import MAX_SHARDS, Manifest

__all__ = [
    "COLUMNS",
    "FORMAT",
    "Contents",
    "Group",
    "Head",
    "Part",
    "begin_export",
    "is_complete",
    "read_contents",
    "read_head",
    "slab_directory",
    "write_contents",
]

FORMAT = 1

COLUMNS = pa.schema([field for field in SCHEMA_WITH_IDS if field.name != "shard"])
"""The columns of every file."""

_HEAD = "_topicstore_export.json"
_CONTENTS = "_topicstore_slab.json"

_END = first_position(MAX_TIME + 1)
"""The exclusive upper bound of positions."""

T = TypeVar("T")


class Head(msgspec.Struct, frozen=True, kw_only=True):
    """The identity of the exported database, and its settings, for restoring its rows into another database."""

    database: str
    """The database's id: 32 hexadecimal digits."""
    shards: Annotated[int, msgspec.Meta(ge=1, le=MAX_SHARDS)]
    timestamps: str
    late: str
    plugins: tuple[str, ...]
    """The plugins that wrap the data path; the exported rows are in stored form, without these plugins."""


class Group(msgspec.Struct, frozen=True):
    """One row group of a Parquet file."""

    rows: int
    first: int
    """The position of the first row."""
    last: int
    properties: bool
    """Whether any row has properties. If not, readers skip the column, which takes as long as all others together."""
    chunks: bytes
    """The digests of all column chunks, 8 bytes each, in file order; in JSON as base64."""


class Part(msgspec.Struct, frozen=True):
    """One Parquet file of a slab."""

    name: Annotated[str, msgspec.Meta(pattern=r"\Apart-[0-9]{5,9}\.parquet\Z")]
    """The name of a file in the same directory; the pattern excludes paths to other directories."""
    size: int
    """The size of the file in bytes."""
    digest: str
    """The digest of the whole file, 128 bits, hexadecimal."""
    footer: str
    """The digest of the footer (metadata, its length, and the magic number), 64 bits, hexadecimal."""
    groups: list[Group]


class Contents(msgspec.Struct, frozen=True, kw_only=True):
    """The contents of a slab's directory. Times are microseconds since the epoch."""

    database: str
    shard: int
    generation: int
    layout: str
    """The layout in which the generation was written."""
    options: dict[str, Any]
    created: int
    sealed: int
    first_position: int
    last_position: int
    messages: int
    filters: tuple[str, ...]
    """Topic filters that together match every row; each row matches exactly one of them."""
    topics: list[str] | None
    """All topics, sorted; None if there are so many that comparing them with a filter would not save time."""
    parts: list[Part]

    def __post_init__(self) -> None:
        ends = [(group.first, group.last) for part in self.parts for group in part.groups]
        for first, last in [(self.first_position, self.last_position), *ends]:
            if not (0 <= first < _END and 0 <= last < _END):
                raise ValueError(f"there are no positions from {first} to {last}")

    @property
    def size(self) -> int:
        """The size of all files in bytes."""
        return sum(part.size for part in self.parts)


def slab_directory(target: Path, shard: int, generation: int) -> Path:
    """Return the directory of a slab's export."""
    return target / f"shard={shard:04}" / f"generation={generation:04}"


# --- the head ---------------------------------------------------------------------------


def begin_export(target: Path, manifest: Manifest) -> None:
    """Create the directory of a database's export, if it doesn't exist, and its head file.

    Raises `ManifestMismatchError` if the directory is the export of another database, or holds other files.
    """
    head = Head(
        database=manifest.id,
        shards=manifest.shards,
        timestamps=manifest.timestamps,
        late=manifest.late,
        plugins=manifest.plugins,
    )
    new = [path for path in (target, *target.parents) if not path.exists()]
    target.mkdir(OWNER_ONLY, parents=True, exist_ok=True)
    for path in new:
        sync_directory(path.parent)
    if read_head(target) is None:
        others = any(not entry.name.startswith(_HEAD) for entry in target.iterdir())
        if others and read_head(target) is None:  # a second check, as another process may just have begun an export
            raise ManifestMismatchError(f"{target} holds files but is no export; it was left as it is")
        _write(target / _HEAD, head)
    there = read_head(target)
    if there is not None and there.database != head.database:
        raise ManifestMismatchError(f"{target} holds an export of database {there.database}; this is {head.database}")


def read_head(target: Path) -> Head | None:
    """Return the content of an export's head file; None if the directory is no export."""
    return _read(target / _HEAD, Head)


# --- a slab -----------------------------------------------------------------------------


def write_contents(directory: Path, contents: Contents) -> None:
    """Write the contents file of a directory; the file and all directory entries are fsynced on return."""
    _write(directory / _CONTENTS, contents)


def is_complete(directory: Path) -> bool:
    """Return whether a directory holds the complete export of a slab, without reading the contents file."""
    return (directory / _CONTENTS).exists()


def read_contents(directory: Path) -> Contents | None:
    """Return the contents of a slab's directory; None if there is no complete export of the slab."""
    return _read(directory / _CONTENTS, Contents)


# --- JSON -------------------------------------------------------------------------------


def _checksum(fields: dict[str, Any]) -> str:
    return xxhash.xxh64_hexdigest(msgspec.json.encode(fields, order="deterministic"))


def _write(path: Path, value: msgspec.Struct) -> None:
    fields = msgspec.json.decode(msgspec.json.encode(value), type=dict[str, Any])
    data = {"format": FORMAT, "checksum": _checksum(fields), **fields}
    draft = path.with_name(f"{path.name}.{uuid.uuid4().hex}")  # a unique name, as several processes may write the file
    replace_file(path, msgspec.json.encode(data) + b"\n", temporary=draft)


@convert_os_errors()
def _read(path: Path, kind: type[T]) -> T | None:
    try:
        data = msgspec.json.decode(path.read_bytes(), type=dict[str, Any])
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (msgspec.DecodeError, UnicodeDecodeError) as bad:
        raise CorruptionError(f"not JSON: {bad}", place=str(path)) from bad
    version = data.pop("format", None)
    if isinstance(version, int) and version > FORMAT:
        raise NewerFormatError(f"{path} has format {version}; this topicstore reads up to {FORMAT}")
    if data.pop("checksum", None) != _checksum(data):
        raise CorruptionError("the checksum is wrong", place=str(path))
    try:
        return msgspec.convert(data, kind, str_keys=True, builtin_types=())
    except msgspec.ValidationError as bad:
        raise CorruptionError(str(bad), place=str(path)) from bad
