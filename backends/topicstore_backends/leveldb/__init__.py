"""LevelDB, through plyvel. One database of LevelDB a shard.

On disk
    LevelDB has one ordered map a database, so a stored key begins with a byte that says whose it is::

        00          -> the format: a line with its name and version, then one a keyspace, "data 4 8 8"
        01 start    -> end: the stored keys start <= key < end are deleted, and not yet removed
        10+n key    -> value of the n-th keyspace. Keys of bytes as they are, tuples as their
                       numbers big-endian, one behind the other: (4, 8, 8) is 20 bytes
        ff          -> empty: the last key, always there

    A batch over several keyspaces is one ``WriteBatch`` of LevelDB, atomic by its log.

Deleting ranges
    LevelDB can only delete keys by name. A range that holds few is deleted so, in the batch it came
    with. Of a larger one the batch puts a record that hides it (`HiddenRanges`): readers see nothing in it
    from then on, also after a crash. Its keys are removed bit by bit, in the batches that follow and by
    `LeveldbEngine.reclaim`, and the record shrinks with them. A key put into a hidden range splits it.

What plyvel 1.5.1 (LevelDB 1.22) does wrong without a word, and what is done about it
    * Without ``verify_checksums`` a damaged block is handed out as it is. All reads ask for it.
    * LevelDB's iterators skip a damaged block; plyvel asks for their status only where another pair
      follows. The keys 00 and ff lie around all others, so one does, unless the damage took them:
      at the end of its range a scan makes sure that they are there.
    * A reverse iterator gives nothing when the only key of its range is its start. `Scan` looks again.
    * ``Iterator.seek`` backwards past the start of its range goes on below it, and one that finds no
      key begins anew at the other end. `Scan` doesn't seek that far, and checks where it came out.
    * With ``paranoid_checks`` off, opening drops what is damaged in the log.
    * A synced write syncs the newest log only. There may be an older one, whose table isn't written
      yet: `LeveldbEngine.flush_log` syncs all of them, and their names in the directory.
    * After a failed write LevelDB may append behind a torn record of its log, and not find what is
      behind it later. The engine takes no writes from then on.
    * Opening a database twice in one process fails, and lets go of the lock that keeps other processes
      out, as closing any file named LOCK does. Nothing here opens a directory that is open (`Instance`).
    * Closing frees what other threads are using: calls are counted (`Calls`), and closing waits.

plyvel lets other threads run in all calls but one: closing holds the interpreter's lock, for as long as
LevelDB takes to end what it writes out in the background.

Power failures: a log whose table isn't written yet may lose its end while the next one keeps its
beginning, so of batches that were not synced an older one may be lost and a newer one not.
"""

from .backend import LeveldbBackend, LeveldbOptions
from .engine import LeveldbEngine

__all__ = ["LeveldbBackend", "LeveldbEngine", "LeveldbOptions"]
