"""DuckDB, an embedded column store that speaks SQL. A shard is one file.

On disk
    ``shard.duckdb``, of DuckDB's storage version 2.0.0, and its log ``shard.duckdb.wal``. A keyspace
    is a table of the same name with the columns of its keys (``key BLOB``, or ``key_0``, ``key_1``, …:
    UINTEGER for 4 bytes, UBIGINT for 8), then ``part UINTEGER``, ``size UBIGINT`` and ``value BLOB``:
    values are cut into pieces of 4,000 bytes, numbered from 0, each with the size of the whole value. Rows that
    `WriteBatch.put_rows` appends lie in a table of the name that its caller chose, listed in ``tables_of_rows`` (name
    VARCHAR, keyspace VARCHAR). Tables have no index.

Durability
    ``commit`` and ``sync`` are the same: DuckDB syncs its log in every commit, so stored messages
    always survive power loss, and a commit costs a sync of the disk. A few large batches suit
    it better than many small ones.

Disk space
    A checkpoint writes the log into the file. Then the space of deleted rows becomes reusable, and free space at the
    end of the file is truncated. DuckDB checkpoints when the log is large. The engine does so in a write after a
    delete, once a quarter of the file's size was put, and in `Engine.reclaim`, which is called when a generation is
    dropped or archived and in `Database.compact`. A file need not shrink, so ``reclaims_disk`` isn't declared: the file
    stays within a small multiple of the largest size of its data so far.

Other processes
    can't open a shard's file while it is open here, not even to read: DuckDB locks it
    (https://duckdb.org/docs/current/connect/concurrency). Within the process, open it through this backend
    only: closing any other descriptor of the file releases a POSIX lock (see ``fcntl(2)``).

Reasons for this design, with DuckDB 2.0.0
    * There is no primary key. Its index must fit in memory when it is made, doesn't help ranges, and refuses
      a deleted key as long as an older snapshot is open (https://duckdb.org/docs/stable/sql/indexes). A write
      deletes the rows it replaces by a join, bounded by the smallest and largest key so that DuckDB skips
      whole row groups.
    * DuckDB reads 2,048 values at a time, all in memory (https://github.com/duckdb/duckdb/pull/23396), and
      rewrites the last row group of a table at every checkpoint. Whole values of 16 MB would take gigabytes,
      and if that much memory is missing the file is unusable until it is attached again. So values are cut
      into pieces, and row groups have 8,192 rows.
    * Sorting a range holds all of it in memory. A scan reads the first few rows in one statement; after that
      it sorts only keys, some at a time, and then fetches about a megabyte of values.
    * All shards of a database are attached to one DuckDB in memory: they share its memory limit, and
      one statement can read all of them in one transaction.
    * A failed checkpoint, such as on a full disk, makes a file unusable until it is attached again
      (https://github.com/duckdb/duckdb/issues/19343 shows the error). The engine does that, so that
      acknowledged messages stay readable.
"""

from .backend import DuckdbBackend, DuckdbOptions
from .engine import DuckdbEngine

__all__ = ["DuckdbBackend", "DuckdbEngine", "DuckdbOptions"]
