"""The server's log: a line of JSON for each event, written by a thread of its own.

A line has ``time`` (ISO 8601, UTC), ``level``, ``logger`` and ``event``, then the event's own fields, given as
``extra={"fields": {...}}``. What clients send as passwords or payloads is never a field.
"""

from __future__ import annotations

import contextlib
import logging
import logging.handlers
import queue
import sys
from collections.abc import Iterator
from datetime import UTC, datetime
from typing import IO, Any

import msgspec

from topicstore.contract.errors import InvalidArgumentError

from .settings import LogSettings

__all__ = ["JsonLines", "log_connection", "logging_to", "set_level"]

_ROOT = "topicstore.server"
_UVICORN = "uvicorn"
"""What serves HTTP; at the level ``info`` it tells of nothing but its own start and end."""
_WAITING = 10_000
"""Lines that wait for a slow disk or a full pipe; the server doesn't wait for its log."""

_LINE_ENDS = {ord(end): f"\\u{ord(end):04x}" for end in "\x7f\x85\u2028\u2029"}
"""Characters that JSON leaves as they are, and that some programs and terminals act on."""

_connections = logging.getLogger(f"{_ROOT}.connections")


def log_connection(record: msgspec.Struct) -> None:
    """Write the line of a connection that has ended; the record's fields are the line's."""
    _connections.info("connection ended", extra={"fields": msgspec.structs.asdict(record)})


def set_level(settings: LogSettings) -> None:
    """Write only lines of the settings' level, and above, from now on."""
    logging.getLogger(_ROOT).setLevel(settings.level.upper())


class JsonLines(logging.Formatter):
    """A formatter that makes one line of JSON of a record, whatever is in it."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the line, without its end."""
        document: dict[str, Any] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "event": record.getMessage(),
            **getattr(record, "fields", {}),
        }
        if record.exc_info:
            document["error"] = self.formatException(record.exc_info)
        return msgspec.json.encode(document, enc_hook=str).decode().translate(_LINE_ENDS)


class _Waiting(logging.handlers.QueueHandler):
    """Hands records to the writing thread, and counts those for which there is no room."""

    lost = 0

    def prepare(self, record: logging.LogRecord) -> logging.LogRecord:
        """Return the record as it is: it stays in this process."""
        return record

    def enqueue(self, record: logging.LogRecord) -> None:
        """Hand on a record, after one that says how many were lost before it."""
        try:
            if self.lost:
                text = f"{self.lost:,} lines were lost, because the log is slower than what happens"
                self.queue.put_nowait(logging.LogRecord(_ROOT, logging.WARNING, __file__, 0, text, None, None))
                self.lost = 0
            self.queue.put_nowait(record)
        except queue.Full:
            self.lost += 1


@contextlib.contextmanager
def logging_to(settings: LogSettings, stream: IO[str] | None = None) -> Iterator[None]:
    """Write the server's log while the context lasts: to the settings' file, else to ``stream``, else to stderr.

    Raises `InvalidArgumentError` where the file can't be written.
    """
    written: logging.StreamHandler[Any]
    if settings.file is not None:
        try:
            written = logging.FileHandler(settings.file, encoding="utf-8")
        except OSError as bad:
            raise InvalidArgumentError(f"the log {settings.file} can't be written: {bad}") from bad
    else:
        written = logging.StreamHandler(stream if stream is not None else sys.stderr)
    written.setFormatter(JsonLines())
    waiting: queue.Queue[logging.LogRecord] = queue.Queue(_WAITING)
    handler, listener = _Waiting(waiting), logging.handlers.QueueListener(waiting, written)
    listener.start()
    try:
        with _handled_by(handler, _ROOT, settings.level), _handled_by(handler, _UVICORN, "warning"):
            yield
    finally:
        listener.stop()
        handler.close()
        written.close()


@contextlib.contextmanager
def _handled_by(handler: logging.Handler, name: str, level: str) -> Iterator[None]:
    """Hand what a logger is told to a handler, and to no other."""
    logger = logging.getLogger(name)
    before = logger.level, logger.propagate
    logger.setLevel(level.upper())
    logger.propagate = False
    logger.addHandler(handler)
    try:
        yield
    finally:
        logger.removeHandler(handler)
        level_before, logger.propagate = before
        logger.setLevel(level_before)
