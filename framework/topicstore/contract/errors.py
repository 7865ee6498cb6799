"""Every error that topicstore raises, and what to do about each.

There are two families, so that a caller can decide with one ``except``:

* `RecoverableError`: nothing is wrong with the request; the same call may succeed later
  or after the step that the docstring names. Stored data is safe.
* `UnrecoverableError`: the same call will never succeed. Change the request, or, for the
  storage errors among them, look at the named place.

Unless its docstring says otherwise, an error means that nothing of the call took effect.
"""

from __future__ import annotations

__all__ = [
    "BackendUnavailableError",
    "CorruptionError",
    "DataLossError",
    "DatabaseClosedError",
    "DatabaseLockedError",
    "DatabaseNotFoundError",
    "EngineError",
    "FileAccessError",
    "FileSystemError",
    "ForkedProcessError",
    "GenerationArchivedError",
    "GenerationDroppedError",
    "GenerationError",
    "ImportSourceError",
    "IncompatibleError",
    "InvalidArgumentError",
    "InvalidCursorError",
    "InvalidFilterError",
    "InvalidMessageError",
    "InvalidOptionError",
    "InvalidTopicError",
    "LateMessageError",
    "LogDamagedError",
    "ManifestMismatchError",
    "MessageTooLargeError",
    "NestedCallError",
    "NewerFormatError",
    "NotADatabaseError",
    "PathExistsError",
    "PathNotDirectoryError",
    "PlaceAheadError",
    "PluginError",
    "QuotaExceededError",
    "ReadOnlyDatabaseError",
    "RecoverableError",
    "SessionEndedError",
    "SessionNotFoundError",
    "SessionTakenOverError",
    "ShardReadOnlyError",
    "StateConflictError",
    "StorageFullError",
    "SubscriptionClosedError",
    "TimestampAheadError",
    "TooManyOpenFilesError",
    "TopicstoreError",
    "UnknownPluginError",
    "UnrecoverableError",
    "UnsupportedError",
    "WrongDatabaseError",
]


class TopicstoreError(Exception):
    """The base class of every error that this package raises on purpose."""


class RecoverableError(TopicstoreError):
    """The same call may succeed later, or after the step its message names."""


class UnrecoverableError(TopicstoreError):
    """The same call will never succeed as it is."""


# --- arguments ----------------------------------------------------------------------


class InvalidArgumentError(UnrecoverableError, ValueError):
    """An argument has the wrong type or range. Nothing was done; correct the call."""


class InvalidTopicError(InvalidArgumentError):
    """A topic name breaks the MQTT 5 rules. Nothing was stored; correct the topic."""


class InvalidFilterError(InvalidArgumentError):
    """A topic filter breaks the MQTT 5 rules. Nothing was read; correct the filter."""


class InvalidMessageError(InvalidArgumentError):
    """A message can't be stored. Its whole batch was refused; ``index`` says which one it was."""

    def __init__(self, reason: str, index: int | None = None) -> None:
        super().__init__(reason if index is None else f"message {index} of the batch: {reason}")
        self.reason = reason
        self.index = index


class MessageTooLargeError(InvalidMessageError):
    """A payload exceeds `topicstore.MAX_PAYLOAD`. Its whole batch was refused; split the payload."""


class LateMessageError(InvalidMessageError):
    """A message is older than the last one of its shard (``timestamps="message"``).

    The whole batch was refused. Sort the input by time, or create the database with ``late="lift"``.
    """


class TimestampAheadError(InvalidMessageError):
    """A message's time lies further ahead of the clock than the allowed skew.

    The whole batch was refused, because one wrong clock would move its whole shard into the future.
    Correct the time, or create the database with a larger ``max_skew``.
    """


class InvalidOptionError(InvalidArgumentError):
    """An option is unknown to the plugin it was given for, or has a bad value. Nothing was opened."""


class InvalidCursorError(InvalidArgumentError):
    """The bytes are not a cursor, or the text no place: garbled, truncated, or of a newer version. Nothing was read."""


class WrongDatabaseError(InvalidCursorError):
    """The cursor or place belongs to another database. Nothing was read; use it where it was made."""


class PlaceAheadError(InvalidCursorError):
    """The cursor or place lies after everything that the database has: the database has lost what was read there.

    It was restored from an older copy, or a power failure took its last writes. Messages stored since then may lie
    before the place, and would be skipped. Nothing was read. Begin again at a time, which may repeat messages, or from
    now on, which may skip some.
    """


class ImportSourceError(InvalidArgumentError):
    """A file to import isn't valid in its format; the message names the row.

    The rows before it are stored, and importing the corrected file continues after them.
    """


# --- which database -----------------------------------------------------------------


class DatabaseNotFoundError(UnrecoverableError, FileNotFoundError):
    """There is no database at the path, and the call does not create one."""


class NotADatabaseError(UnrecoverableError):
    """The path holds something that is not a topicstore database. It was left as it is."""


class NewerFormatError(UnrecoverableError):
    """The database was written by a newer topicstore. It was left as it is; upgrade to read it.

    A damaged version byte looks the same, so ``place`` names where it was read, if it was in a stored value.
    """

    def __init__(self, reason: str, place: str = "") -> None:
        super().__init__(f"{place}: {reason}" if place else reason)
        self.reason = reason
        self.place = place


class ManifestMismatchError(UnrecoverableError):
    """An argument of ``open`` contradicts what the database was created with. It was left as it is."""


class DatabaseLockedError(RecoverableError):
    """Another process, or another `Database` object of this one, has the database open.

    The message names the holder. Data is safe; try again when the holder has closed it.
    """


class DatabaseClosedError(UnrecoverableError):
    """The database object was closed. Data is safe; open it again."""


class NestedCallError(RecoverableError):
    """The call was made within another one of the same thread that is writing, as by a signal handler or a destructor.

    Or it was made within another call for sessions, and is for sessions that another thread is changing. Nothing was
    done. Set a flag there, and make the call when the other one has returned. `Database.close` may be called anywhere.
    """


class ForkedProcessError(UnrecoverableError):
    """The process was forked from one that had used the engine, and lacks the engine's threads. Nothing was opened.

    Start the process with ``multiprocessing.get_context("spawn")`` or ``"forkserver"``.
    """


class ReadOnlyDatabaseError(UnrecoverableError):
    """The database was opened with ``mode="r"``. Nothing was changed; another mode lets you write."""


# --- plugins ------------------------------------------------------------------------


class SubscriptionClosedError(UnrecoverableError):
    """The subscription was closed. A new one can be opened at its `acknowledged` place."""


class UnknownPluginError(UnrecoverableError, LookupError):
    """No installed plugin has that name. The message lists the names of those installed."""


class PluginError(UnrecoverableError):
    """A plugin is at fault: its name is taken, or a hook of it is wrong."""


class BackendUnavailableError(UnrecoverableError, ImportError):
    """The plugin is installed but a module that it needs is not; the message names the pip command."""


class IncompatibleError(UnrecoverableError):
    """The layout requires a capability that the backend does not declare. Nothing was created."""


class UnsupportedError(UnrecoverableError):
    """The plugin did not declare the capability that the call needs. Nothing was done."""


# --- sessions -----------------------------------------------------------------------


class SessionEndedError(UnrecoverableError):
    """The session object was disconnected, lost, or closed with its database. Open the session again."""


class SessionTakenOverError(SessionEndedError):
    """The session's client connected again, so this object's connection is the older one: close it.

    MQTT 5 calls this a session takeover (section 3.1.4). Messages that were acknowledged on this connection and not
    committed may be delivered again on the newer one.
    """


class SessionNotFoundError(UnrecoverableError, LookupError):
    """There is no session with that client id."""


# --- storage ------------------------------------------------------------------------


class GenerationError(UnrecoverableError):
    """The generation does not exist, or can't be changed in this way.

    The current generation can't be dropped or exported. From an archived one nothing can be deleted, because an
    export is never changed: drop the generation, or delete from a later start.
    """


class GenerationDroppedError(UnrecoverableError):
    """The cursor's generation was dropped, and the messages that it had not read are gone. Start a new replay."""


class GenerationArchivedError(GenerationDroppedError):
    """The cursor's generation was archived since, and the cursor's place can't be found in the export.

    No message is lost: start a new replay after the last message that was read.
    """


class StateConflictError(RecoverableError):
    """A conditional state write found another value than it expected; nothing of the call took effect.

    Read the state, and decide again.
    """


class EngineError(UnrecoverableError):
    """The storage engine failed. Acknowledged messages are safe; the text is the engine's."""


class FileSystemError(UnrecoverableError, OSError):
    """The operating system refused something of the database's files, such as a lock where there is no ``flock``.

    ``errno``, ``strerror`` and ``filename`` are the system's. Acknowledged messages are safe. Nothing of the call took
    effect, except that an export or a checkpoint may have left an unfinished directory, which the next one removes.
    """


class FileAccessError(FileSystemError, PermissionError):
    """The user may not read or write a file or directory. Grant it, or be another user."""


class PathExistsError(FileSystemError, FileExistsError):
    """There is a file or directory already where one was to be made. It was left as it is."""


class PathNotDirectoryError(FileSystemError, NotADirectoryError):
    """A part of a path is a file where a directory is needed."""


class StorageFullError(RecoverableError):
    """The disk or a quota is full. Acknowledged messages are safe and readable.

    The batch that was being stored is not acknowledged. Make room, then call `Database.recover`.
    """


class TooManyOpenFilesError(RecoverableError):
    """The process, or the machine, has as many files open as it may have. Stored data is safe.

    Close some, or raise the limit (``ulimit -n``), and try again; after a write that failed with this error, call
    `Database.recover`. A shard of RocksDB or LevelDB needs about ten files at least, and more as it grows.
    """


class QuotaExceededError(RecoverableError):
    """The database, or a queue, holds as many bytes or messages as its limit allows. Nothing of the call was stored.

    Delete messages, drop generations, commit the messages read from the queue, or raise the limit; then try again.
    """


class CorruptionError(EngineError):
    """Stored bytes are damaged; ``place`` says where. The rest of the database stays readable.

    `Database.verify` lists every damaged place.
    """

    def __init__(self, reason: str, place: str = "") -> None:
        super().__init__(f"{place}: {reason}" if place else reason)
        self.reason = reason
        self.place = place


class LogDamagedError(CorruptionError):
    """A shard's log is unreadable from some write on, or lacks a write, as after a power failure.

    `Backend.open_shard` raises this error before it has changed anything. `topicstore.open` then cuts the log there,
    unless writes would be lost that were known to be on disk; in that case it raises `DataLossError`. A backend may
    raise a subclass that keeps its findings, because `Backend.open_damaged` and `Backend.repair_log` get the error.
    """

    def __init__(self, reason: str, place: str = "", discarded: str = "") -> None:
        super().__init__(reason, place)
        self.discarded = discarded
        """The readable writes that are cut off because something before them is missing, such as "3 writes of
        000012.log". It is empty, and there is no warning, if only an unreadable end is cut off."""


class DataLossError(CorruptionError):
    """Writes are missing that were acknowledged and on disk, or files that existed when the database was closed.

    The missing file or directory may be one without which a shard can't be opened at all. Restore the database from a
    copy. ``open(…, recovery="point_in_time")`` continues from the state before the first missing write, if that can be
    opened.
    """


class ShardReadOnlyError(RecoverableError):
    """An earlier write or flush of this shard failed, so it takes no more writes.

    Acknowledged messages are safe and readable. Remove the cause, then call `Database.recover`, or close and open the
    database.
    """
