"""A table of DuckDB by itself, with the options of topicstore's backend: plain inserts, each committed, and a scan.

DuckDB finds a table of Arrow by the name of the local variable that holds it.
"""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa

__all__ = ["PlainTable"]

_CONFIG: dict[str, str | bool | int | float | list[str]] = {"threads": 1, "wal_autocheckpoint": "64MiB"}
_STORAGE = "STORAGE_VERSION 'v2.0.0', ROW_GROUP_SIZE 8192"


class PlainTable:
    """A file with one table, which has the columns of ``rows``."""

    def __init__(self, path: Path, rows: pa.Table) -> None:
        import duckdb

        self._db = duckdb.connect(":memory:", config=_CONFIG)
        self._db.execute(f"ATTACH '{path}' AS plain ({_STORAGE})").complete()
        self._db.execute("CREATE TABLE IF NOT EXISTS plain.messages AS SELECT * FROM rows LIMIT 0").complete()

    def insert(self, rows: pa.Table) -> None:
        """Insert rows; DuckDB syncs every commit."""
        self._db.execute("INSERT INTO plain.messages SELECT * FROM rows").complete()

    def batches(self) -> pa.RecordBatchReader:
        """Return all columns as Arrow."""
        return self._db.execute("SELECT * FROM plain.messages").to_arrow_reader(100_000)

    def close(self) -> None:
        """Close it."""
        self._db.close()
