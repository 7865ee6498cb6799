"""Tests that every error of an engine's library or of the system becomes a `TopicstoreError`, and leaks nothing."""

from __future__ import annotations

import errno
import importlib
import os
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any, Self

import attrs
import pyarrow as pa
import pytest
from topicstore.contract.engine import DATA, INDEX, KEYSPACES, META, STATE, Backend, Engine, Reader, WriteBatch
from topicstore.contract.errors import TopicstoreError
from topicstore.plugins import load_target, registry
from topicstore_conformance.backend.leaks import DESCRIPTORS, open_files
from topicstore_conformance.conditions.skipping import need
from topicstore_conformance.conditions.tries import tries

pytestmark = pytest.mark.slow

PACKAGES = str(Path(__file__).parents[1] / "topicstore_backends")
SYSTEM = frozenset(("fsync", "link", "listdir", "mkdir", "open", "rmdir", "scandir", "stat", "symlink", "unlink"))
"""Functions of `os` that fail, too."""
FREEING = frozenset(("__del__", "_remove"))
"""Functions that Python calls when an object is freed, at any time; Python itself reports their errors."""
ENDS = frozenset(("__exit__", "close"))
"""Methods of libraries that fail after they have done their work."""
MANY = 300
"""A number of keys for which an engine may use another way of reading than for a few keys."""


@attrs.frozen
class Library:
    """An engine's library: the calls that open a database, and the classes whose methods may fail."""

    module: str
    opens: tuple[str, ...]
    """The names of the module that a backend calls."""
    parts: frozenset[str]
    """The classes whose methods may fail."""
    raises: str = ""
    """The name of the error's class in the module; if empty, the class is `Exception`."""
    says: str | bytes = "IO error: it fails here"

    def error(self) -> Exception:
        """Return a new error of the library."""
        kind = getattr(importlib.import_module(self.module), self.raises) if self.raises else Exception
        raised: Exception = kind(self.says)
        return raised


LIBRARIES = {
    "duckdb": Library("duckdb", ("connect",), frozenset(("DuckDBPyConnection", "DuckDBPyRelation")), "IOException"),
    "leveldb": Library(
        "plyvel",
        ("DB",),
        frozenset(("DB", "Iterator", "PrefixedDB", "RawIterator", "Snapshot", "WriteBatch")),
        "IOError",
        b"IO error: it fails here",
    ),
    "rocksdb": Library("rocksdict", ("Checkpoint", "Rdict"), frozenset(("Checkpoint", "Rdict", "RdictIter"))),
}


@attrs.define
class Faults:
    """A context that counts the calls of a library and of the system, and makes one of them fail."""

    library: Library
    failing: tuple[str, int] | None = None
    """The call that fails: a description of caller and callee, and the number of the call from 0; None for no call."""
    calls: Counter[str] = attrs.field(factory=Counter)
    """The number of calls by description of caller and callee."""
    failed: bool = False
    _patch: pytest.MonkeyPatch = attrs.field(factory=pytest.MonkeyPatch)

    def __enter__(self) -> Self:
        module = importlib.import_module(self.library.module)
        for name in self.library.opens:
            self._patch.setattr(module, name, Wrapped(self, getattr(module, name), name))
        for name in SYSTEM:
            self._patch.setattr(os, name, self._system(getattr(os, name), name))
        return self

    def __exit__(self, *_: object) -> None:
        self._patch.undo()

    def _system(self, call: Callable[..., Any], name: str) -> Callable[..., Any]:
        def counted(*arguments: Any, **options: Any) -> Any:
            self.call(sys._getframe(1), name, OSError(errno.EIO, "Input/output error"))
            return call(*arguments, **options)

        return counted

    def call(self, caller: FrameType, name: str, error: Exception) -> None:
        """Count a call that a backend makes; raise ``error`` if this is the call that must fail."""
        frame: FrameType | None = caller
        while frame is not None and not frame.f_code.co_filename.startswith(PACKAGES):
            frame = frame.f_back
        if frame is None or frame.f_code.co_name in FREEING:
            return
        what = f"{frame.f_code.co_qualname}, line {frame.f_lineno}, calls {name}"
        self.calls[what] += 1
        if not self.failed and self.failing == (what, self.calls[what] - 1):
            self.failed = True
            raise error


class Wrapped:
    """A wrapper of a library's object or function.

    Its calls, and those of the objects that it returns, are counted and may fail.
    """

    def __init__(self, faults: Faults, inner: Any, name: str) -> None:
        self.faults, self.inner, self.name = faults, inner, name

    def __getattr__(self, name: str) -> Any:
        found = getattr(self.inner, name)
        return Wrapped(self.faults, found, f"{self.name}.{name}") if callable(found) else found

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        frame = sys._getframe(1)
        if self.name == "DuckDBPyConnection.execute":
            rows = frame.f_locals.get("rows")  # noqa: F841 - DuckDB looks for it among its caller's variables
        error, ends = self.faults.library.error(), self.name.rpartition(".")[2] in ENDS
        try:
            if not ends:
                self.faults.call(frame, self.name, error)
            made = self.inner(*map(bare, arguments), **options)
            if ends:
                self.faults.call(frame, self.name, error)
        except BaseException:
            if "." in self.name:
                # A library's method has no Python frame, so a traceback would not keep the object alive.
                self.inner = None
            raise
        kind = type(made).__name__
        return Wrapped(self.faults, made, kind) if kind in self.faults.library.parts else made

    def __enter__(self) -> Self:
        self.inner.__enter__()
        return self

    def __exit__(self, *error: object) -> Any:
        return self.__getattr__("__exit__")(*error)

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Any:
        return self.__getattr__("__next__")()


def bare(argument: Any) -> Any:
    return argument.inner if isinstance(argument, Wrapped) else argument


def filled() -> WriteBatch:
    """Return a batch with every kind of change except rows."""
    batch = WriteBatch()
    batch.put_many(DATA, [(1, 0, number) for number in range(MANY)], [b"%d" % number for number in range(MANY)])
    batch.put_many(META, [b"%03d" % number for number in range(MANY)], [bytes(5_000)] * MANY)
    batch.put(STATE, b"k", b"v")
    batch.delete(STATE, b"gone")
    batch.delete_range(INDEX, (1, 0, 0), (2, 0, 0))
    return batch


def reads(reader: Reader) -> Iterator[Callable[[], object]]:
    """Yield a function for each way to read."""
    yield lambda: reader.get(STATE, b"k")
    yield lambda: reader.get_many(DATA, [(1, 0, 7), (1, 0, 3)])
    yield lambda: reader.get_many(DATA, [(1, 0, number) for number in range(MANY)])
    for keyspace in (DATA, META):
        yield lambda keyspace=keyspace: list(reader.scan(keyspace))  # type: ignore[misc]
        yield lambda keyspace=keyspace: list(reader.scan(keyspace, reverse=True))  # type: ignore[misc]


def use(engine: Engine, path: Path, *, sql: bool) -> Iterator[Callable[[], object]]:
    """Yield a function for each use of an open engine, and close the engine at the end."""
    batch = filled()
    if sql:
        batch.put_rows(DATA, "typed", pa.table({"a": pa.array([1], pa.uint32()), "b": [0], "c": [7]}), 20)
    yield lambda: engine.write(batch, sync=True)
    yield from reads(engine)
    snapshots = []
    yield lambda: snapshots.append(engine.snapshot())
    for snapshot in snapshots:
        yield from reads(snapshot)
        yield snapshot.close
    if sql:
        yield lambda: engine.sql("SELECT count(*) FROM typed")
    yield engine.info
    yield lambda: list(engine.verify())
    dropped = WriteBatch()
    dropped.delete_range(DATA, (1, 0, 0), (1, 0, 100))
    yield lambda: engine.write(dropped)
    yield lambda: engine.reclaim(DATA, (1, 0, 0), (1, 0, 100))
    yield engine.flush_log
    yield lambda: engine.checkpoint(path)
    yield engine.close


def live(path: Path, made: Callable[[], Backend], *, sql: bool, errors: list[Exception]) -> None:
    """Create a shard, use it, reopen and use it again, and read it; append the errors to ``errors``."""

    def attempt(step: Callable[[], Any]) -> Any:
        try:
            return step()
        except Exception as error:  # noqa: BLE001 - of which kind it is the test looks at
            errors.append(error)

    backend, shard = attempt(made), path / "shard"
    for opening in (
        lambda: backend.open_shard(shard, KEYSPACES, create=True),
        lambda: backend.open_shard(shard, KEYSPACES, create=False),
        lambda: backend.open_reader(shard, KEYSPACES, alone=True),
        lambda: backend.open_reader(shard, KEYSPACES, alone=False),
    ):
        engine = attempt(opening) if backend is not None else None
        for step in use(engine, path / f"copy{len(errors)}", sql=sql) if engine is not None else ():
            attempt(step)


@pytest.mark.skipif(not DESCRIPTORS.is_dir(), reason="open files of a process are not listed here")
@pytest.mark.parametrize("name", LIBRARIES)
def test_whatever_fails_is_reported_and_nothing_is_left(tmp_path: Path, name: str) -> None:
    """Whichever call fails, only `TopicstoreError` is raised, all files are closed, and the shard opens again."""
    need(name)
    spec = registry().backend(name)
    target: type[Backend] = load_target(spec)
    sql = "sql" in spec.capabilities

    def made() -> Backend:
        return target(target.Options())

    with Faults(LIBRARIES[name]) as counting:
        live(tmp_path / "counted", made, sql=sql, errors=[])
    kinds = {kind: min(count, tries(1, 10)) for kind, count in counting.calls.items()}
    assert len(kinds) > 30
    wrong: list[str] = []
    for place, failing in enumerate((kind, number) for kind, count in kinds.items() for number in range(count)):
        errors: list[Exception] = []
        with Faults(LIBRARIES[name], failing) as faults:
            live(tmp_path / f"{place}", made, sql=sql, errors=errors)
        left = open_files(tmp_path / f"{place}")
        assert faults.failed, failing
        foreign = [error for error in errors if not isinstance(error, TopicstoreError)]
        if left or foreign:
            wrong.append(f"{failing}: {foreign} {left[:1]}")
            continue
        engine = made().open_shard(tmp_path / f"{place}" / "shard", KEYSPACES, create=True)
        engine.write(filled())
        engine.close()
    assert "\n".join(wrong) == ""
