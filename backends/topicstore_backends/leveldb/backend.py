"""Options, and opening: making the database, and seeing that it is the right one."""

from __future__ import annotations

import os
import tempfile
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

import attrs
import plyvel
from topicstore.contract.engine import Backend, Keyspace
from topicstore.contract.errors import EngineError, UnsupportedError

from topicstore_backends.files import link_files, make_directory
from topicstore_backends.options import whole_number

from .engine import LeveldbEngine
from .errors import Translated
from .instance import Instance
from .keys import FORMAT, FORMAT_NAME, LAST

__all__ = ["LeveldbBackend", "LeveldbOptions"]

_COMPRESSION = {"none": None, "snappy": "snappy"}


@attrs.frozen(kw_only=True)
class LeveldbOptions:
    """How LevelDB is tuned. All of it may differ from one opening to the next."""

    write_buffer_bytes: int = whole_number(64 << 20, least=64 << 10)
    """Bytes a shard keeps in memory before it writes them out as a table file.

    While they are written out as many again may come in. Logs grow to about this size, and are read
    when the shard is opened.
    """
    cache_bytes: int = whole_number(8 << 20, least=0)
    """Bytes of table blocks kept in memory, for each shard. Indexes of open tables come on top."""
    block_bytes: int = whole_number(16 << 10, least=1 << 10)
    """Bytes of a table block before compression. A value that is larger gets a block of its own."""
    file_bytes: int = whole_number(16 << 20, least=1 << 20)
    """Bytes of a table file that compaction writes; LevelDB takes 1 GB at most."""
    compression: str = attrs.field(default="none", validator=attrs.validators.in_(tuple(_COMPRESSION)))
    """Of table blocks: ``none`` or ``snappy``; the log is never compressed.

    ``none`` suits layouts that compress their values themselves, as ``block`` does.
    """
    max_open_files: int = whole_number(256, least=74)
    """Table files a shard keeps open. Each takes a descriptor and the memory of its index."""
    recovery: str = attrs.field(default="strict", validator=attrs.validators.in_(("strict", "salvage")))
    """What opening does with a damaged log.

    ``strict`` takes a log that ends in the middle of a batch, as a power failure leaves it, for the
    end of the data, and raises `CorruptionError` for any other damage. ``salvage`` drops only the
    batches that can't be read: the damaged one and those that share its 32 KB of the log. What it
    dropped is gone once the shard was opened.
    """


class LeveldbBackend(Backend):
    """Opens LevelDB databases."""

    Options: ClassVar[type] = LeveldbOptions

    def open_shard(self, path: Path, keyspaces: Sequence[Keyspace], *, create: bool) -> LeveldbEngine:
        """Open the database in ``path``; with ``create`` make it unless it is there already.

        Raises `EngineError` when there is none, when another engine has it open or when it holds
        something else, and `CorruptionError` when it is damaged; see `LeveldbOptions.recovery`.
        """
        if create:
            with Translated(path):
                make_directory(path)
        elif not (path / "CURRENT").exists():
            raise EngineError(f"{path}: there is no LevelDB database")
        with Translated(path, opening=True):
            instance = Instance(path)
            try:
                instance.database = _open_database(path, self.options)
                _check_format(path, instance.database, keyspaces)
                return LeveldbEngine(path, instance, keyspaces)
            except BaseException:
                instance.close()
                raise

    def open_reader(self, path: Path, keyspaces: Sequence[Keyspace], *, alone: bool) -> LeveldbEngine:
        """Open the database in ``path`` and leave its files as they are.

        LevelDB writes a new manifest and log whenever it opens a database, and tidies up: here it does so in a
        directory of links, which goes with the engine. Raises `UnsupportedError` unless ``alone``.
        """
        if not alone:
            raise UnsupportedError("LevelDB opens no database that another process may write")
        if not (path / "CURRENT").exists():
            raise EngineError(f"{path}: there is no LevelDB database")
        with Translated(path):
            links = tempfile.TemporaryDirectory(prefix="topicstore-reader-")
        try:
            with Translated(path):
                link_files(path, links.name, without=("LOCK", "LOG", "LOG.old"))
            engine = self.open_shard(Path(links.name), keyspaces, create=False)
        except BaseException:
            links.cleanup()
            raise
        weakref.finalize(engine, links.cleanup)
        return engine


def _open_database(path: Path, options: LeveldbOptions) -> Any:
    return plyvel.DB(
        os.fsencode(path),
        create_if_missing=True,
        paranoid_checks=options.recovery == "strict",
        write_buffer_size=options.write_buffer_bytes,
        lru_cache_size=options.cache_bytes,
        block_size=options.block_bytes,
        max_file_size=options.file_bytes,
        compression=_COMPRESSION[options.compression],
        max_open_files=options.max_open_files,
    )


def _check_format(path: Path, database: Any, keyspaces: Sequence[Keyspace]) -> None:
    """Refuse a database of another format or with other keyspaces; write the format into a new one."""
    lines = [" ".join([keyspace.name, *map(str, keyspace.shape or ())]) for keyspace in keyspaces]
    expected = "\n".join([FORMAT_NAME, *lines]).encode()
    found = database.get(FORMAT, verify_checksums=True)
    if found is None and next(database.iterator(include_value=False), None) is None:
        with database.write_batch(transaction=True, sync=True) as changes:
            changes.put(FORMAT, expected)
            changes.put(LAST, b"")
    elif found is None:
        raise EngineError(f"{path}: the LevelDB database is not one of topicstore's")
    elif found != expected:
        there = ", ".join(found.decode(errors="replace").split("\n"))
        raise EngineError(f"{path}: the LevelDB database holds {there}; expected {', '.join([FORMAT_NAME, *lines])}")
