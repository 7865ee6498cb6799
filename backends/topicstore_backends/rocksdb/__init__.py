"""RocksDB, through rocksdict in its raw mode. One database of RocksDB a shard.

On disk
    A column family a keyspace, with its name; the family ``default`` stays empty. Keys of bytes
    are stored as they are, tuples as their numbers big-endian, one behind the other: ``(4, 8, 8)``
    is 20 bytes. Values are stored as they are. Beside RocksDB's files lies ``rocksdict-config.json``.
    Deleted bytes go back to the disk with the compactions that later writes set off; an idle shard
    keeps them.

What rocksdict 0.3.29 does wrong without a word, and what is done about it
    * Iterators made from its snapshots show later writes. An iterator that is open already doesn't:
      a snapshot here is one open iterator a keyspace, made while nobody writes.
    * ``RdictItems`` stops at a damaged block as if the data ended there. `Scan` walks a
      ``RdictIter`` and asks for its status at the end.
    * An iterator's upper bound dangles when options and key are freed; the lower bound is taken for
      an upper one. `Cursor` keeps the former alive and nothing uses the latter.
    * Whatever refers to the database keeps it open, and its lock held, after ``close``. `Cursor`
      is the only place where an iterator lives, and the engine empties all of them before it closes.

rocksdict holds the interpreter's lock in all calls but ``get`` of a list, flushes and compactions,
so a single ``get`` or ``write`` can't overlap with ``close``; the others are counted (`Calls`).
"""

from .backend import RocksdbBackend, RocksdbOptions
from .engine import RocksdbEngine, RocksdbReader

__all__ = ["RocksdbBackend", "RocksdbEngine", "RocksdbOptions", "RocksdbReader"]
