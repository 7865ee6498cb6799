"""The errors that topicstore raises, and the caller's remedy for each.

There are two families, so that a caller can distinguish them with one ``except``:

* `RecoverableError`: the request is valid; the same call may succeed later
  or after the step that the docstring names. Stored data is safe.
* `UnrecoverableError`: the same call will never succeed. Change the request; for the
  storage errors among them, examine the named place.

Unless the docstring of an error says otherwise, the failed call had no effect.
"""

from __future__ import annotations

__all__ = [
    "BackendUnavailableError",
    "ClusterNotReadyError",
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
    "ReplicasRefusedError",
    "SessionEndedError",
    "SessionNotFoundError",
    "SessionTakenOverError",
    "ShardElsewhereError",
    "ShardMovedError",
    "ShardReadOnlyError",
    "StateConflictError",
    "StorageFullError",
    "SubscriptionClosedError",
    "TimestampAheadError",
    "TooManyOpenFilesError",
    "TopicstoreError",
    "UnknownPluginError",
    "UnknownSiteError",
    "UnrecoverableError",
    "UnsupportedError",
    "WrongDatabaseError",
]


class TopicstoreError(Exception):
    """The base class of all errors that topicstore defines."""


class RecoverableError(TopicstoreError):
    """The base class of errors after which the same call may succeed later, or after the step named in the message."""


class UnrecoverableError(TopicstoreError):
    """The base class of errors after which the same call will never succeed unchanged."""


# --- arguments ----------------------------------------------------------------------


class InvalidArgumentError(UnrecoverableError, ValueError):
    """An argument has the wrong type or range. Nothing was done; correct the call."""


class InvalidTopicError(InvalidArgumentError):
    """A topic name breaks the MQTT 5 rules. Nothing was stored; correct the topic."""


class InvalidFilterError(InvalidArgumentError):
    """A topic filter breaks the MQTT 5 rules. Nothing was read; correct the filter."""


class InvalidMessageError(InvalidArgumentError):
    """A message is invalid. Its whole batch was refused; ``index`` is the message's index in the batch, or None."""

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
    """A message's timestamp is further ahead of the clock than the allowed skew (``timestamps="message"``).

    The whole batch was refused, because one wrong clock would move the positions of its whole shard into the future.
    Correct the timestamp, or create the database with a larger ``max_skew``.
    """


class InvalidOptionError(InvalidArgumentError):
    """A plugin doesn't have the option, or the option's value is invalid. Nothing was opened."""


class InvalidCursorError(InvalidArgumentError):
    """The bytes are not a cursor, or the text is not a `Place`: damaged, truncated, or of a newer version.

    Nothing was read.
    """


class WrongDatabaseError(InvalidCursorError):
    """The cursor or `Place` belongs to another database. Nothing was read; use the database that created it."""


class PlaceAheadError(InvalidCursorError):
    """The cursor or `Place` lies after all stored messages: the database has lost messages that were read before.

    It was restored from an older copy, or lost its last writes in a power failure. Messages stored since then may lie
    before the place, and would be skipped. Nothing was read. Restart at a time, which may repeat messages, or from
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
    """The path holds something other than a topicstore database, or one where a new path is required.

    It was not changed.
    """


class NewerFormatError(UnrecoverableError):
    """The database was written by a newer version of topicstore. It was not changed; upgrade to read it.

    A damaged version byte causes the same error. ``place`` therefore names the stored value that has the version; it
    is empty if the version isn't part of a stored value.
    """

    def __init__(self, reason: str, place: str = "") -> None:
        super().__init__(f"{place}: {reason}" if place else reason)
        self.reason = reason
        self.place = place


class ManifestMismatchError(UnrecoverableError):
    """An argument of ``open`` contradicts the database's manifest. The database was not changed."""


class DatabaseLockedError(RecoverableError):
    """Another process, or another `Database` object of this process, has the database open.

    The message names the holder of the lock. Data is safe; try again after the holder has closed the database.
    """


class DatabaseClosedError(UnrecoverableError):
    """The database object was closed. Data is safe; open it again."""


class NestedCallError(RecoverableError):
    """A signal handler or destructor made the call while its thread was inside another call that is writing.

    It is also raised if the interrupted call concerns sessions, and the nested call needs sessions that another thread
    is changing. Nothing was done. Set a flag in the handler, and make the call after the interrupted one has returned.
    `Database.close` may be called anywhere.
    """


class ForkedProcessError(UnrecoverableError):
    """The process was forked from one that had used the engine, and lacks the engine's threads. Nothing was opened.

    Start the process with ``multiprocessing.get_context("spawn")`` or ``"forkserver"``.
    """


class ReadOnlyDatabaseError(UnrecoverableError):
    """The database was opened with ``mode="r"``. Nothing was changed; open it with another mode to write."""


# --- plugins ------------------------------------------------------------------------


class SubscriptionClosedError(UnrecoverableError):
    """The subscription was closed. A new subscription can start at the `acknowledged` place of the closed one."""


class UnknownPluginError(UnrecoverableError, LookupError):
    """No installed plugin has that name. The message lists the names of those installed."""


class PluginError(UnrecoverableError):
    """A plugin is faulty: its name is already taken, or one of its hooks violates the contract."""


class BackendUnavailableError(UnrecoverableError, ImportError):
    """The plugin is installed, but can't be imported, usually because a module is missing.

    The message names the pip command.
    """


class IncompatibleError(UnrecoverableError):
    """The layout requires a capability that the backend does not declare. Nothing was created."""


class UnsupportedError(UnrecoverableError):
    """The plugin did not declare the capability that the call needs. Nothing was done."""


# --- sessions -----------------------------------------------------------------------


class SessionEndedError(UnrecoverableError):
    """The session object was disconnected, lost its connection, or was closed with its database. Reopen the session."""


class SessionTakenOverError(SessionEndedError):
    """The session's client connected again and took the session over: close this older connection.

    Source: session takeover, MQTT 5, section 3.1.4. Messages that were acknowledged on the older connection, but not
    committed, may be delivered again on the newer one.
    """


class SessionNotFoundError(UnrecoverableError, LookupError):
    """There is no session with that client id."""


# --- storage ------------------------------------------------------------------------


class GenerationError(UnrecoverableError):
    """The generation doesn't exist, or doesn't allow the operation.

    The current generation can't be dropped or exported. Messages of an archived generation can't be deleted, because
    exports are immutable: drop the generation, or delete from a later start.
    """


class GenerationDroppedError(UnrecoverableError):
    """The cursor's generation was dropped, and with it the messages that were not read. Start a new replay."""


class GenerationArchivedError(GenerationDroppedError):
    """The cursor's generation was archived, and the cursor's place can't be found in the export.

    No message is lost: start a new replay after the last message that was read.
    """


class StateConflictError(RecoverableError):
    """A conditional state write (compare-and-set) found another value than expected; the call had no effect.

    Read the state, and decide again.
    """


class EngineError(UnrecoverableError):
    """The storage engine failed. Acknowledged messages are safe; the error's text is that of the engine."""


class FileSystemError(UnrecoverableError, OSError):
    """The operating system refused an operation on the database's files, such as ``flock`` where it isn't supported.

    ``errno``, ``strerror`` and ``filename`` are those of the system's error. Acknowledged messages are safe. The call
    had no effect, except that an interrupted export or checkpoint may leave an incomplete directory, which the next
    export or checkpoint removes.
    """


class FileAccessError(FileSystemError, PermissionError):
    """The user lacks permission to read or write a file or directory. Grant it, or run as another user."""


class PathExistsError(FileSystemError, FileExistsError):
    """A file or directory that was to be created exists already. It was not changed."""


class PathNotDirectoryError(FileSystemError, NotADirectoryError):
    """A component of a path that must be a directory is a file."""


class StorageFullError(RecoverableError):
    """The disk or a quota is full. Acknowledged messages are safe and readable.

    The batch that was being stored is not acknowledged. Free some space, then call `Database.recover`.
    """


class TooManyOpenFilesError(RecoverableError):
    """The process, or the machine, has reached its limit of open files. Stored data is safe.

    Close some files, or raise the limit (``ulimit -n``), and try again; after a write that failed with this error, call
    `Database.recover`. A shard of RocksDB or LevelDB needs about ten files at least, and more as it grows.
    """


class QuotaExceededError(RecoverableError):
    """The database, or a queue, has reached its limit of bytes or messages. The call stored nothing.

    Delete messages, drop generations, commit the messages read from the queue, or raise the limit; then try again.
    """


class CorruptionError(EngineError):
    """Stored bytes are damaged; ``place`` names the location. The rest of the database stays readable.

    `Database.verify` lists every damaged place.
    """

    def __init__(self, reason: str, place: str = "") -> None:
        super().__init__(f"{place}: {reason}" if place else reason)
        self.reason = reason
        self.place = place


class LogDamagedError(CorruptionError):
    """A write in a shard's log is unreadable or missing, for example after a power failure.

    `Backend.open_shard` raises this error before it has changed anything. `topicstore.open` then truncates the log
    before that write, or raises `DataLossError` if this would lose writes that were known to be on disk. A backend may
    raise a subclass that keeps its findings, because `Backend.open_damaged` and `Backend.repair_log` get the error.
    """

    def __init__(self, reason: str, place: str = "", discarded: str = "") -> None:
        super().__init__(reason, place)
        self.discarded = discarded
        """A description of the readable writes that are discarded because an earlier write is missing, such as
        "3 writes of 000012.log". It is empty, and there is no warning, if only a torn tail is truncated."""


class DataLossError(CorruptionError):
    """Acknowledged writes that were on disk are missing, or files that existed when the database was closed.

    Restore the database from a copy. Alternatively, ``open(…, recovery="point_in_time")`` continues from the state
    before the first missing write, unless a missing file or directory prevents the shard from being opened at all.
    """


class ShardReadOnlyError(RecoverableError):
    """An earlier write or flush of this shard failed, so it takes no more writes.

    Acknowledged messages are safe and readable. Remove the cause, then call `Database.recover`, or close and reopen the
    database.
    """


# --- clusters -----------------------------------------------------------------------


class ClusterNotReadyError(RecoverableError):
    """Fewer sites have joined the cluster than `Cluster.n_sites`, or its creation is not complete.

    Nothing was stored; start the missing sites, or complete the creation.
    """


class ReplicasRefusedError(InvalidArgumentError):
    """A change of a cluster's sites or replicas is refused; the text says why. Nothing was changed."""


class UnknownSiteError(UnrecoverableError, LookupError):
    """The cluster has no site of that name, or the site keeps no replica of the shards. Nothing was changed."""


class ShardElsewhereError(RecoverableError):
    """Another site of the cluster owns the shard, or this site has no copy to read. Send the call to the owner.

    A server forwards reads of such a shard to the sites that keep a copy; from a server, the error means that no such
    site has answered. Nothing was stored.
    """

    def __init__(self, reason: str, shard: int = 0, site: str = "", address: str = "") -> None:
        super().__init__(reason)
        self.shard = shard
        """The number of the shard."""
        self.site = site
        """The name of the owner; empty while the shard has none."""
        self.address = address
        """The owner's `Cluster.address`; empty if it has none."""


class ShardMovedError(RecoverableError):
    """Another site took over the shard during the call, or this site has released it. Send the call to the owner.

    Check the error's attribute ``stored`` first, so that nothing is stored twice.
    """

    def __init__(self, reason: str, *, stored: bool | None = False) -> None:
        super().__init__(reason)
        self.stored = stored
        """Whether the call's changes were stored in this shard: False, or None if that is unknown, because an answer of
        the log store was lost."""
