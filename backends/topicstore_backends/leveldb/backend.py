"""Options, and opening: making the database, and seeing that it is the right one."""

from __future__ import annotations

import os
import shutil
import tempfile
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

import attrs
import plyvel
from topicstore.contract.engine import Backend, Keyspace
from topicstore.contract.errors import EngineError, LogDamagedError, UnsupportedError
from topicstore.contract.forking import LibraryThreads

from topicstore_backends.files import make_directory
from topicstore_backends.options import whole_number
from topicstore_backends.write_ahead_logs import Cut, apply_cuts, cuts, link_uncut

from .engine import LeveldbEngine
from .errors import Translated
from .instance import Instance
from .keys import FORMAT, FORMAT_NAME, LAST

__all__ = ["LeveldbBackend", "LeveldbOptions"]

_THREADS = LibraryThreads("LevelDB")
"""There is one, which compacts; LevelDB begins it when it first has something to do."""
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


class LeveldbBackend(Backend):
    """Opens LevelDB databases."""

    Options: ClassVar[type] = LeveldbOptions

    def __init__(self, options: LeveldbOptions) -> None:
        super().__init__(options)
        _THREADS.check()

    @property
    def room(self) -> int:
        """Two logs: they are written out before they are removed. And what is written beside them."""
        return 2 * int(self.options.write_buffer_bytes) + (4 << 20)

    def open_shard(self, path: Path, keyspaces: Sequence[Keyspace], *, create: bool) -> LeveldbEngine:
        """Open the database in ``path``; with ``create`` make it unless it is there already.

        Raises `EngineError` when there is none, when another engine has it open or when it holds
        something else, and `CorruptionError` when it is damaged, `LogDamagedError` if only the end of its logs is.
        """
        if create:
            with Translated(path):
                make_directory(path)
        elif not (path / "CURRENT").exists():
            raise EngineError(f"{path}: there is no LevelDB database")
        with Translated(path):
            found = _cuts(path)
        if found:
            named = ", ".join(cut.file.name for cut in found)
            raise LogDamagedError(f"its end can't be read, or isn't there: {named}", str(path))
        _THREADS.begin()
        with Translated(path, opening=True):
            instance = Instance(path)
            try:
                instance.database = _open_database(path, self.options)
                _check_format(path, instance.database, keyspaces)
                return LeveldbEngine(path, instance, keyspaces)
            except BaseException:
                instance.close()
                raise

    def repair_log(self, path: Path, *, salvage: bool) -> None:
        """Cut the logs, or write what can be read of them into a table. See `Backend.repair_log`.

        With ``salvage`` writes go that share the damaged one's 32 KB of the log.
        """
        if salvage:
            _THREADS.begin()
            with Translated(path, opening=True):
                _open_database(path, self.options, paranoid=False).close()
        else:
            apply_cuts(_cuts(path, within=True))

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
            links = Path(tempfile.mkdtemp(prefix="topicstore-reader-"))
        try:
            with Translated(path):
                link_uncut(path, str(links), _cuts(path), without=("LOCK", "LOG", "LOG.old"))
            engine = self.open_shard(links, keyspaces, create=False)
        except BaseException:
            shutil.rmtree(links)
            raise
        weakref.finalize(engine, _remove, links, os.getpid())
        return engine


def _cuts(path: Path, *, within: bool = False) -> list[Cut]:
    there = (path / "CURRENT").exists()
    return cuts(path, manifest_counts=True, within=within) if there else []


def _remove(links: Path, owner: int) -> None:
    """Remove a directory, unless this is a fork of its owner, who goes on reading there."""
    if os.getpid() == owner:
        shutil.rmtree(links)


def _open_database(path: Path, options: LeveldbOptions, *, paranoid: bool = True) -> Any:
    return plyvel.DB(
        os.fsencode(path),
        create_if_missing=True,
        paranoid_checks=paranoid,
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
