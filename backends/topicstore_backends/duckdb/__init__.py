"""DuckDB, an embedded column store that speaks SQL. One file a shard.

On disk
    ``shard.duckdb``, of DuckDB's storage version 2.0.0, and its log ``shard.duckdb.wal``. A keyspace
    is a table of its name with the columns of its keys (``key BLOB``, or ``key_0``, ``key_1``, …:
    UINTEGER for 4 bytes, UBIGINT for 8), then ``part UINTEGER``, ``size UBIGINT`` and ``value BLOB``:
    values are cut into pieces of 4,000 bytes, numbered from 0, each with the size of the whole. What
    `WriteBatch.put_rows` appends lies in a table of its name, which ``tables_of_rows`` (name VARCHAR,
    keyspace VARCHAR) lists. Tables have no index.

Durability
    ``commit`` and ``sync`` are the same: DuckDB syncs its log in every commit, so stored messages
    always survive power loss, and a commit costs as much as a sync of the disk. Few large batches
    suit it, not many small ones.

Other processes
    can't open a shard's file, not even to read, while it is open here: DuckDB locks it. Within the
    process, open it by this backend only: whoever opens and closes the file otherwise ends the lock.

Why it is done so, with DuckDB 2.0.0
    * No primary key. Its index would have to fit in memory, doesn't help ranges, and refuses a key
      that was deleted as long as an older snapshot is open. A write deletes what it replaces by a
      join, bounded by the smallest and largest key so that whole row groups are passed over.
    * DuckDB reads 2,048 values at a time, all in memory, and rewrites the last row group of a table
      at every checkpoint. With whole values of 16 MB it needs gigabytes for that, and when they
      aren't there the file becomes unusable until it is attached again. So values are cut into
      pieces, and row groups are of 8,192 rows.
    * A sort of a range holds all of it. A scan takes what lies in a few rows, for which one statement is
      enough; behind that it sorts only keys, some at a time, and then fetches the values of about a megabyte.
    * All shards of a database are attached to one DuckDB in memory: they share its memory limit, and
      one statement can read all of them in one transaction.
    * A checkpoint that fails, on a full disk say, makes a file unusable until it is attached again.
      The engine does that, so that what was acknowledged stays readable.
"""

from .backend import DuckdbBackend, DuckdbOptions
from .engine import DuckdbEngine

__all__ = ["DuckdbBackend", "DuckdbEngine", "DuckdbOptions"]
