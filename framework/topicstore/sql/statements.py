"""Running a statement over the tables ``messages``, ``topics``, ``clients`` and ``latest`` of a database.

DuckDB runs the statement: within the engine if the messages are stored as rows of DuckDB's own tables and no plugin
may change them, otherwise in memory, over the messages that a replay returns.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from topicstore.contract.arguments import check_reading
from topicstore.contract.batch import MessageBatch
from topicstore.contract.errors import BackendUnavailableError, EngineError, InvalidArgumentError
from topicstore.contract.forking import leak, remember
from topicstore.contract.topics import TopicFilter
from topicstore.plugins import registry
from topicstore.storage.counting import contents
from topicstore.storage.storage import Storage

from .messages import MessagesTable

if TYPE_CHECKING:
    import duckdb

__all__ = ["run"]

_CONFIG: dict[str, str | bool | int | float | list[str]] = {
    "python_enable_replacements": False,  # don't look up missing tables among Python variables
    "autoinstall_known_extensions": False,  # statements must not download extensions
    "autoload_known_extensions": False,
}
_TIME = pa.timestamp("us", tz="UTC")
_COUNTS = [("messages", pa.int64()), ("bytes", pa.int64()), ("first", _TIME), ("last", _TIME)]
_EVERYTHING = TopicFilter("#")
_INTERRUPTED = re.compile(r"Query interrupted|KeyboardInterrupt")


class _InMemory:
    """DuckDB in memory, shared by the statements of this process; each has a connection of its own, with its tables.

    Opening it takes 17 ms of CPU, which is more than most statements; connecting takes half a millisecond.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._opened: duckdb.DuckDBPyConnection | None = None
        remember(self)

    def connect(self) -> duckdb.DuckDBPyConnection:
        """Return a new connection. Raises ImportError without DuckDB."""
        import duckdb

        with self._lock:
            if self._opened is None:
                self._opened = duckdb.connect(":memory:", config=_CONFIG)
            return self._opened.cursor()

    def leave_to_parent(self) -> None:
        """Let a forked child open its own DuckDB, because the parent's threads don't exist there."""
        leak(self._opened)
        self._lock, self._opened = threading.Lock(), None


_IN_MEMORY = _InMemory()


def run(storage: Storage, statement: str, parameters: Sequence[Any]) -> pa.Table:
    """Run a statement that only reads; see `topicstore.Database.sql`."""
    storage.check_open()
    messages = MessagesTable(storage)
    try:
        connection = _IN_MEMORY.connect()
    except ImportError as missing:
        raise BackendUnavailableError('SQL needs duckdb: pip install "topicstore[duckdb]"') from missing
    with closing(connection), _translated(messages):
        parsed = _reading(connection, statement)
        connection.execute("SET TimeZone = 'UTC'")
        counted = _COUNTED.keys() & set(re.findall(r"\w+", statement.casefold()))
        if not counted and _within_engine(storage):
            first, *rest = (shard.writer.open_engine() for shard in storage.shards)
            return first.sql(statement, parameters, beside=rest)
        connection.register("messages", messages)
        for name in counted:
            connection.register(name, _COUNTED[name](storage))
        return connection.sql(parsed, params=list(parameters)).to_arrow_table()


def _reading(connection: duckdb.DuckDBPyConnection, statement: str) -> duckdb.Statement:
    """Parse a statement. Raises `InvalidArgumentError` unless it is a single statement that only reads."""
    statements = connection.extract_statements(statement)
    check_reading([one.type.name for one in statements])
    return statements[0]


def _within_engine(storage: Storage) -> bool:
    """Return whether the engines have all messages as rows, in the form in which a replay returns them."""
    if "sql" not in storage.capabilities or storage.plugins or any(shard.writer.elsewhere for shard in storage.shards):
        return False
    records = storage.shards[0].generations.listed()
    return all("sql" in registry().layout(one.layout).requires and one.archive is None for one in records)


@contextmanager
def _translated(messages: MessagesTable) -> Iterator[None]:
    """Raise the errors of reading messages in place of DuckDB's, and `InvalidArgumentError` for a wrong statement."""
    import duckdb

    try:
        yield
    except duckdb.OutOfMemoryException as error:
        raise EngineError(f"the statement needs more memory than there is: {error}") from error
    except (duckdb.Error, RuntimeError) as error:
        if messages.error is not None:
            raise messages.error from None
        if _INTERRUPTED.search(str(error)):
            raise KeyboardInterrupt(str(error)) from error
        if not isinstance(error, duckdb.Error):
            raise
        raise InvalidArgumentError(str(error)) from error


def _topics(storage: Storage) -> pa.Table:
    return _counts("topic", contents.topics(storage, _EVERYTHING))


def _clients(storage: Storage) -> pa.Table:
    return _counts("client_id", contents.clients(storage, _EVERYTHING))


def _counts(name: str, found: Sequence[Any]) -> pa.Table:
    schema = pa.schema([(name, pa.string()), *_COUNTS])
    return pa.table(
        [pa.array([getattr(one, field.name) for one in found]).cast(field.type) for field in schema], schema
    )


def _latest(storage: Storage) -> pa.Table:
    return pa.Table.from_batches([MessageBatch.of(contents.latest(storage, _EVERYTHING)).to_arrow()])


_COUNTED: dict[str, Callable[[Storage], pa.Table]] = {"topics": _topics, "clients": _clients, "latest": _latest}
"""The tables beside ``messages``, each of which is made if a statement names it."""
