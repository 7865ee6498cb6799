"""The process from which Spark's Python workers are forked: PySpark's own, but without a needless traceback.

Java closes the connection to a worker when a task needs no more of its rows, as after ``limit`` or ``show``.
PySpark's daemon then prints a ``BrokenPipeError``, although nothing is wrong
(https://github.com/apache/spark/pull/53055). A session names this module in ``spark.python.daemon.module``. While Spark
plans a query it starts workers from PySpark's own daemon all the same, and closes their connections as soon as it has
an answer; they call `be_quiet` when they load the data source.

This module imports nothing of topicstore: modules that start threads must be imported after workers were forked.
"""

from __future__ import annotations

import socket
import sys
import traceback
from types import ModuleType, SimpleNamespace

from pyspark import daemon

_worker = daemon.worker
_CLOSED = (BrokenPipeError, ConnectionResetError, EOFError)


def _work(sock: socket.socket, authenticated: bool) -> int:
    """Serve Java until it needs no more rows; return 1, as after other failures: the connection can't be reused."""
    try:
        return _worker(sock, authenticated)
    except _CLOSED:
        return 1


def _print_exc() -> None:
    """Print the error that ends a worker, unless Java has closed the connection, as when Java ends meanwhile."""
    if not isinstance(sys.exc_info()[1], _CLOSED):
        traceback.print_exc()


def _quiet(module: ModuleType) -> None:
    vars(module)["traceback"] = SimpleNamespace(print_exc=_print_exc, format_exc=traceback.format_exc)


def be_quiet() -> None:
    """Print no needless traceback when this process ends, if PySpark's own daemon has forked it."""
    main = sys.modules["__main__"]
    if getattr(main.__spec__, "name", None) == daemon.__name__:
        _quiet(main)


if __name__ == "__main__":
    daemon.worker = _work
    _quiet(daemon)
    daemon.manager()
