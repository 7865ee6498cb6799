"""Every error topicstore raises, and what to do about each.

Two families, so that a caller can decide with one ``except``:

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
    "ForkedProcessError",
    "GenerationArchivedError",
    "GenerationDroppedError",
    "GenerationError",
    "ImportSourceError",
    "IncompatibleError",
    "InvalidArgumentError",
    "InvalidFilterError",
    "InvalidIteratorError",
    "InvalidMessageError",
    "InvalidOptionError",
    "InvalidTopicError",
    "LateMessageError",
    "LogDamagedError",
    "ManifestMismatchError",
    "MessageTooLargeError",
    "NewerFormatError",
    "NotADatabaseError",
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
    """The base of every error this package raises on purpose."""


class RecoverableError(TopicstoreError):
    """The same call may succeed later, or after the step its message names."""


class UnrecoverableError(TopicstoreError):
    """The same call will never succeed as it is."""


# --- what was handed in -------------------------------------------------------------


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

    The whole batch was refused: one bad clock would drag its shard into the future.
    Correct the time, or create the database with a larger ``max_skew``.
    """


class InvalidOptionError(InvalidArgumentError):
    """An option is unknown to the plugin it was given for, or has a bad value. Nothing was opened."""


class InvalidIteratorError(InvalidArgumentError):
    """The bytes are not an iterator: garbled, truncated, or of a newer version. Nothing was read."""


class WrongDatabaseError(InvalidIteratorError):
    """The iterator belongs to another database. Nothing was read; use it where it was made."""


class ImportSourceError(InvalidArgumentError):
    """A file to import can't be read as what it claims to be; the message names the row.

    Rows before it are stored, and importing the corrected file goes on behind them.
    """


# --- which database -----------------------------------------------------------------


class DatabaseNotFoundError(UnrecoverableError, FileNotFoundError):
    """There is no database at the path, and the call does not create one."""


class NotADatabaseError(UnrecoverableError):
    """The path holds something that is not a topicstore database. It was left as it is."""


class NewerFormatError(UnrecoverableError):
    """The database was written by a newer topicstore. It was left as it is; upgrade to read it.

    A damaged version byte looks like that, so ``place`` names where it was read, if it was in a stored value.
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


class ForkedProcessError(UnrecoverableError):
    """The process was forked from one that had used the engine, whose threads a fork lacks. Nothing was opened.

    Begin the process with ``multiprocessing.get_context("spawn")`` or ``"forkserver"``.
    """


class ReadOnlyDatabaseError(UnrecoverableError):
    """The database was opened with ``read_only=True``. Nothing was changed; open it without to write."""


# --- plugins ------------------------------------------------------------------------


class SubscriptionClosedError(UnrecoverableError):
    """The subscription was closed. Its `acknowledged` place can be given to a new one."""


class UnknownPluginError(UnrecoverableError, LookupError):
    """No installed plugin has that name. The message lists the names there are."""


class PluginError(UnrecoverableError):
    """A plugin is at fault: its name is taken, or a hook of it is wrong."""


class BackendUnavailableError(UnrecoverableError, ImportError):
    """The plugin is there but what it needs is not; the message names the pip command."""


class IncompatibleError(UnrecoverableError):
    """The layout requires what the backend does not declare. Nothing was created."""


class UnsupportedError(UnrecoverableError):
    """The plugin did not declare the capability that the call needs. Nothing was done."""


# --- sessions -----------------------------------------------------------------------


class SessionEndedError(UnrecoverableError):
    """The session object is of no more use: disconnected, lost, or closed with its database. Open the session anew."""


class SessionTakenOverError(SessionEndedError):
    """The session's client connected anew, so this object's connection is the older one: close it.

    What was acknowledged here and not committed may be delivered again there.
    """


class SessionNotFoundError(UnrecoverableError, LookupError):
    """There is no session of that client id."""


# --- storage ------------------------------------------------------------------------


class GenerationError(UnrecoverableError):
    """The generation does not exist, or is the current one, which can't be dropped or exported.

    Or it was archived, and nothing can be deleted from an export: drop it, or delete from a later start on.
    """


class GenerationDroppedError(UnrecoverableError):
    """The iterator's generation was dropped: what it had not read is gone. Start a new replay."""


class GenerationArchivedError(GenerationDroppedError):
    """The iterator's generation was archived since: its place can't be found in the export.

    All messages are there: begin anew, behind the last that was read.
    """


class StateConflictError(RecoverableError):
    """A conditional state write found another value than expected; nothing of its write took effect.

    Read the state again and decide anew.
    """


class EngineError(UnrecoverableError):
    """The storage engine failed. Whatever was acknowledged is safe; the message is the engine's."""


class StorageFullError(RecoverableError):
    """The disk or a quota is full. Acknowledged messages are safe and readable.

    The batch at hand is not acknowledged. Make room, then close and open the database.
    """


class TooManyOpenFilesError(RecoverableError):
    """As many files are open as this process, or the machine, may have. Stored data is safe.

    Close some, or raise the limit (``ulimit -n``), and try again; after a write that failed so, close and open the
    database. A shard of RocksDB or LevelDB takes some ten files at least, and more with what it holds.
    """


class QuotaExceededError(RecoverableError):
    """The database, or a queue, holds as many bytes or messages as it may. Nothing of the call was stored.

    Delete messages, drop generations, commit what was read of the queue, or raise the limit; then try again.
    """


class CorruptionError(EngineError):
    """Stored bytes are damaged; ``place`` names where. The rest of the database stays readable.

    `Database.verify` lists every damaged place.
    """

    def __init__(self, reason: str, place: str = "") -> None:
        super().__init__(f"{place}: {reason}" if place else reason)
        self.reason = reason
        self.place = place


class LogDamagedError(CorruptionError):
    """The end of a shard's log can't be read, as after a power failure, or writes are missing between two logs.

    Backends raise it from `Backend.open_shard`, and have changed nothing then. Who opens a database meets it only where
    more may be lost than a power failure takes; ``open(…, recovery="point_in_time")`` goes on without what is lost.
    """


class DataLossError(CorruptionError):
    """Writes are missing that were acknowledged and on disk. Restore the database from a copy.

    ``open(…, recovery="point_in_time")`` goes on with what there was before the first that is missing.
    """


class ShardReadOnlyError(RecoverableError):
    """An earlier write or flush of this shard failed, so it takes no more writes.

    What was acknowledged is safe and readable. Remove the cause, then close and open the database.
    """
