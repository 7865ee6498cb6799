"""Limits of engines: the speed of their own put and scan.

A message is one value, encoded before the clock starts, under a key of 24 bytes, like that of the layout
``reference``: nothing is compressed, indexed or learned. A batch is one write. DuckDB inserts the rows of a
table like that of the layout ``table``, a batch a transaction, and scans it as Arrow.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

import msgspec
import pyarrow as pa
import topicstore
from topicstore import Message
from topicstore.contract.batch import MessageBatch

from topicstore_benchmarks.timing import consume

from .contender import Durability
from .limit import Limit
from .plain_table import PlainTable
from .raw_engine import BUFFER, RAW_ENGINES, RawEngine

__all__ = ["DuckdbLimit", "EngineLimit"]

_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(Message).decode
_DISTRIBUTIONS = {"rocksdb": "rocksdict", "leveldb": "plyvel"}


class EngineLimit(Limit):
    """Puts and scans of a key-value engine."""

    def __init__(self, name: str, path: Path, durability: Durability = "commit", *, backend: str) -> None:
        super().__init__(name, path, durability)
        self._backend = backend
        self._stored = 0
        self._raw: RawEngine

    def open(self) -> None:
        """Open the engine with a write buffer of 64 MiB, without compression."""
        self._raw = RAW_ENGINES[self._backend](self.path, sync=self.durability == "sync")

    def encode(self, batch: list[Message]) -> tuple[list[bytes], list[bytes]]:
        """Return keys and values."""
        first, self._stored = self._stored, self._stored + len(batch)
        keys = [bytes(16) + number.to_bytes(8, "big") for number in range(first, self._stored)]
        return keys, list(map(_encode, batch))

    def store(self, batch: Any) -> None:
        """Write a prepared batch."""
        self._raw.write(*batch)

    def scan(self) -> int:
        """Read every key and value."""
        return consume(self._raw.pairs())

    def replay(self, topic_filter: str, start: int = 0) -> Iterator[Message]:
        """Return all messages."""
        return (_decode(bytes(value)) for _, value in self._raw.pairs())

    def close(self) -> None:
        """Close it."""
        self._raw.close()

    def versions(self) -> Mapping[str, str]:
        """Return the version of the engine's Python module."""
        distribution = _DISTRIBUTIONS[self._backend]
        return {distribution: version(distribution)}

    def settings(self) -> Mapping[str, object]:
        """Return the engine's options."""
        return {"compression": "none", "write buffer": BUFFER}


class DuckdbLimit(Limit):
    """Inserts into a table of DuckDB, and its scan."""

    def open(self) -> None:
        """Open DuckDB with the options of topicstore's backend."""
        self.path.mkdir(exist_ok=True)
        self._table = PlainTable(self.path / "plain.duckdb", topicstore.SCHEMA.empty_table())

    def encode(self, batch: list[Message]) -> pa.Table:
        """Return the batch as rows of the table."""
        return pa.Table.from_batches([MessageBatch.from_messages(batch).to_arrow()])

    def store(self, batch: Any) -> None:
        """Insert a prepared batch."""
        self._table.insert(batch)

    def scan(self) -> int:
        """Read all columns into Arrow."""
        return sum(batch.num_rows for batch in self._table.batches())

    def replay(self, topic_filter: str, start: int = 0) -> Iterator[Message]:
        """Return all messages."""
        for batch in self._table.batches():
            yield from MessageBatch.from_arrow(batch).to_messages()

    def close(self) -> None:
        """Close it."""
        self._table.close()

    def versions(self) -> Mapping[str, str]:
        """Return the version of DuckDB."""
        return {"duckdb": version("duckdb")}
