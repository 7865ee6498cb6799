"""RocksDB, through rocksdict in its raw mode. A shard is one RocksDB database.

On disk
    Each keyspace is a column family with its name; the family ``default`` stays empty. Keys of bytes
    are stored as they are, tuples as their numbers big-endian, one after the other: ``(4, 8, 8)``
    is 20 bytes. Values are stored as they are. Beside RocksDB's files lies ``rocksdict-config.json``.
    Opening for writing merges the small tables that short runs of programs leave (`small_tables`).
    Compactions that later writes set off free the space of deleted data; an idle shard keeps it.

Silent faults of rocksdict 0.3.29, and what this package does about them
    * Iterators made from its snapshots show later writes. An open iterator doesn't, as RocksDB promises
      (https://github.com/facebook/rocksdb/wiki/Iterator): a snapshot here is one open iterator per keyspace,
      all made while no write runs.
    * ``RdictItems`` stops at a damaged block as if the data ended there. `Scan` uses ``RdictIter`` and
      checks its status at the end.
    * An iterator's upper bound becomes a dangling pointer when options and key are freed, and a lower bound is applied
      as an upper bound. `Cursor` keeps options and key alive, and nothing sets a lower bound.
    * Every object that refers to the database keeps it open and locked after ``close``. Only `Cursor` holds
      iterators, and the engine empties all cursors before it closes.

rocksdict holds the GIL in all calls except ``get`` of a list, flushes and compactions. So a
single ``get`` or ``write`` can't overlap with ``close``; closing waits for the other calls (`Calls`).
"""

from .backend import RocksdbBackend, RocksdbOptions
from .engine import RocksdbEngine, RocksdbReader

__all__ = ["RocksdbBackend", "RocksdbEngine", "RocksdbOptions", "RocksdbReader"]
