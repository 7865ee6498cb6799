"""LevelDB, through plyvel. A shard is one LevelDB database.

On disk
    A LevelDB database is one ordered map, so a stored key begins with a byte for its keyspace or purpose::

        00          -> the format: a line with its name and version, then a line per keyspace, "data 4 8 8"
        01 start    -> end: the stored keys start <= key < end are deleted, and not yet removed
        10+n key    -> value of the n-th keyspace. Keys of bytes as they are, tuples as their
                       numbers big-endian, one after the other: (4, 8, 8) is 20 bytes
        ff          -> empty: the last key, always there

    A batch over several keyspaces is one ``WriteBatch`` of LevelDB, which its log makes atomic.

Deleting ranges
    LevelDB can only delete single keys. The keys of a small range are deleted in the batch that deletes the
    range. For a larger one the batch puts a record that hides it (`HiddenRanges`): from then on readers see
    nothing in it, also after a crash. Later batches and `LeveldbEngine.reclaim` remove its keys little by
    little, and the record shrinks with them. A key put into a hidden range splits it.

Silent faults of plyvel 1.5.1 (LevelDB 1.22), and what this package does about them
    * Without ``verify_checksums`` a damaged block is returned unchecked. All reads set it.
    * LevelDB's iterators skip a damaged block, and plyvel checks their status only when another pair follows.
      The keys 00 and ff lie around all others, so that another pair always follows unless these keys are
      damaged, too: at the end of its range a scan checks that they can be read.
    * A reverse iterator yields nothing if the only key of its range is its start. `Scan` then seeks again.
    * ``Iterator.seek`` backwards past the start of its range continues below the range, and a seek that
      finds no key starts again at the other end. `Scan` doesn't seek that far, and checks the position.
    * With ``paranoid_checks`` off, opening drops damaged entries of the log.
    * A synced write syncs the newest log only, though the table of an older one may not be written yet
      (https://github.com/google/leveldb/issues/193). `LeveldbEngine.flush_log` syncs all logs, and their
      names in the directory.
    * A compaction that closing ends leaves its unfinished table behind, unsynced. `LeveldbEngine.close` syncs it.
    * After a failed write LevelDB may append to its log after a torn record, and not find the appended
      records later. The engine refuses writes from then on.
    * Opening a database a second time in one process fails, but releases the lock that keeps other processes
      out: closing any descriptor of a file releases the process's POSIX locks on it (``fcntl(2)``). `Instance`
      never opens a directory that is open.
    * Closing frees objects that other threads are using. The engine waits for their calls first (`Calls`).

plyvel releases the GIL in all calls but ``close``, which holds it until LevelDB's background
work ends.

Power failures: a log whose table isn't written yet may lose its end while the next log keeps its beginning.
So an older unsynced batch may be lost while a newer one survives (https://github.com/google/leveldb/issues/894).
"""

from .backend import LeveldbBackend, LeveldbOptions
from .engine import LeveldbEngine

__all__ = ["LeveldbBackend", "LeveldbEngine", "LeveldbOptions"]
