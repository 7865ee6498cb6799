"""Limits: the speed of bare engines' puts and scans, and of Parquet files.

Engines are called through their own Python modules, without topicstore, with the same fast options that topicstore
uses. A batch is one write.

In RocksDB and LevelDB a message is one value, encoded before the clock starts, under a key of 24 bytes, as in the
layout ``reference``. Messages are not compressed, indexed or grouped by topic. In DuckDB a batch is inserted in one
transaction into a table like that of the layout ``table``, which is scanned as Arrow.

A Parquet file is written in large row groups and read back into Arrow. Unlike a message store, the file can't be read
before it is closed, a crash loses all of it, and it has no order by topic and no index.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from importlib.metadata import version
from typing import Any, ClassVar

import msgspec
import pyarrow as pa
import pyarrow.parquet as pq
import topicstore
from topicstore import Message
from topicstore.contract.batch import MessageBatch

from topicstore_benchmarks.timing import consume

from .contender import Limit

__all__ = ["DuckdbLimit", "LeveldbLimit", "ParquetLimit", "RocksdbLimit"]

_BUFFER = 64 << 20
_ROW_GROUP = 100_000
_DUCKDB: dict[str, str | bool | int | float | list[str]] = {"threads": 1, "wal_autocheckpoint": "64MiB"}
_DUCKDB_FILE = "STORAGE_VERSION 'v2.0.0', ROW_GROUP_SIZE 8192"
_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(Message).decode


class _LibraryLimit(Limit):
    """The limit of a library, whose version is that of the distribution ``library``."""

    library: ClassVar[str]
    _db: Any

    def close(self) -> None:
        """Close the engine."""
        self._db.close()

    def versions(self) -> Mapping[str, str]:
        """Return the version of the Python module."""
        return {self.library: version(self.library)}


class _KeyValueLimit(_LibraryLimit):
    """Puts and scans of a key-value engine with a write buffer of 64 MiB, without compression."""

    _stored = 0

    def encode(self, batch: list[Message]) -> tuple[list[bytes], list[bytes]]:
        """Return the keys and the values of a batch; keys are numbered from 0 over all batches."""
        first, self._stored = self._stored, self._stored + len(batch)
        keys = [bytes(16) + number.to_bytes(8, "big") for number in range(first, self._stored)]
        return keys, list(map(_encode, batch))

    @abstractmethod
    def _pairs(self) -> Iterable[Any]:
        """Return all keys with their values."""

    def scan(self) -> int:
        """Read every key and value."""
        return consume(self._pairs())

    def replay(self, topic_filter: str, start: int = 0) -> Iterator[Message]:
        """Return all messages."""
        return (_decode(bytes(value)) for _, value in self._pairs())

    def settings(self) -> Mapping[str, object]:
        """Return the engine's options."""
        return {"compression": "none", "write buffer": _BUFFER}


class RocksdbLimit(_KeyValueLimit):
    """RocksDB, called through rocksdict."""

    library = "rocksdict"

    def open(self) -> None:
        """Open the engine."""
        import rocksdict

        self._batch = rocksdict.WriteBatch
        self._how = rocksdict.WriteOptions()
        self._how.sync = self.durability == "sync"
        options = rocksdict.Options(raw_mode=True)
        options.create_if_missing(True)
        options.set_compression_type(rocksdict.DBCompressionType.none())
        options.set_write_buffer_size(_BUFFER)
        self._db = rocksdict.Rdict(str(self.path), options)

    def store(self, batch: Any) -> None:
        """Write a prepared batch."""
        writes = self._batch(raw_mode=True)
        for key, value in zip(*batch, strict=False):
            writes.put(key, value)
        self._db.write(writes, self._how)

    def _pairs(self) -> Iterable[Any]:
        return self._db.items()  # type: ignore[no-any-return]


class LeveldbLimit(_KeyValueLimit):
    """LevelDB, called through plyvel. Scans verify checksums, because otherwise they would return damaged data."""

    library = "plyvel"

    def open(self) -> None:
        """Open the engine."""
        import plyvel

        self._db = plyvel.DB(str(self.path), create_if_missing=True, compression=None, write_buffer_size=_BUFFER)

    def store(self, batch: Any) -> None:
        """Write a prepared batch."""
        with self._db.write_batch(sync=self.durability == "sync") as writes:
            for key, value in zip(*batch, strict=False):
                writes.put(key, value)

    def _pairs(self) -> Iterable[Any]:
        return self._db.iterator(verify_checksums=True)  # type: ignore[no-any-return]


class _ArrowLimit(_LibraryLimit):
    """The limit of a library that stores and scans Arrow data."""

    def encode(self, batch: list[Message]) -> pa.RecordBatch:
        """Return the batch as Arrow columns."""
        return MessageBatch.from_messages(batch).to_arrow()

    @abstractmethod
    def _batches(self) -> Iterable[pa.RecordBatch]:
        """Return all messages."""

    def replay(self, topic_filter: str, start: int = 0) -> Iterator[Message]:
        """Return all messages."""
        for batch in self._batches():
            yield from MessageBatch.from_arrow(batch).to_messages()


class DuckdbLimit(_ArrowLimit):
    """A table of DuckDB, with the options of topicstore's backend.

    DuckDB resolves a table name in a statement to the local variable of that name, which holds an Arrow table.
    """

    library = "duckdb"

    def open(self) -> None:
        """Open a file with one table, which has the columns of messages."""
        import duckdb

        self.path.mkdir(exist_ok=True)
        rows = topicstore.SCHEMA.empty_table()  # noqa: F841 - the statement names it
        self._db = duckdb.connect(":memory:", config=_DUCKDB)
        self._db.execute(f"ATTACH '{self.path / 'plain.duckdb'}' AS plain ({_DUCKDB_FILE})").complete()
        self._db.execute("CREATE TABLE IF NOT EXISTS plain.messages AS SELECT * FROM rows LIMIT 0").complete()

    def encode(self, batch: list[Message]) -> pa.Table:
        """Return the batch as rows of the table."""
        return pa.Table.from_batches([super().encode(batch)])

    def store(self, batch: Any) -> None:
        """Insert a prepared batch; DuckDB syncs every commit."""
        self._db.execute("INSERT INTO plain.messages SELECT * FROM batch").complete()

    def _batches(self) -> pa.RecordBatchReader:
        return self._db.execute("SELECT * FROM plain.messages").to_arrow_reader(100_000)

    def scan(self) -> int:
        """Read all columns into Arrow."""
        return sum(batch.num_rows for batch in self._batches())


class ParquetLimit(_ArrowLimit):
    """One Parquet file, compressed with zstd, with a row group for every 100,000 messages."""

    library = "pyarrow"

    def open(self) -> None:
        """Begin a new file, or use the existing one for reading."""
        self.path.mkdir(exist_ok=True)
        self._file = self.path / "messages.parquet"
        self._held: list[pa.RecordBatch] = []
        self._db = None if self._file.exists() else pq.ParquetWriter(self._file, topicstore.SCHEMA, compression="zstd")

    def store(self, batch: Any) -> None:
        """Buffer a prepared batch, and write a row group when enough messages are buffered."""
        self._held.append(batch)
        if sum(held.num_rows for held in self._held) >= _ROW_GROUP:
            self.finish()

    def finish(self) -> None:
        """Write the buffered messages."""
        if self._held and self._db is not None:
            self._db.write_table(pa.Table.from_batches(self._held))
            self._held = []

    def scan(self) -> int:
        """Read all columns into Arrow."""
        rows: int = pq.read_table(self._file).num_rows
        return rows

    def _batches(self) -> Iterable[pa.RecordBatch]:
        return pq.ParquetFile(self._file).iter_batches()  # type: ignore[no-any-return]

    def close(self) -> None:
        """Complete and close the file."""
        if self._db is not None:
            self._db.close()

    def settings(self) -> Mapping[str, object]:
        """Return the settings that differ from Arrow's defaults."""
        return {"compression": "zstd", "row group": _ROW_GROUP}
