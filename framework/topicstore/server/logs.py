"""The server's log: one line for each event, written by a separate thread.

Lines are text for people on a terminal, and JSON for programs elsewhere, unless settings choose. A line of JSON has
``time`` (ISO 8601, UTC), ``level``, ``logger`` and ``event``, then the event's own fields, given as
``extra={"fields": {...}}``. A line of text has the same without the logger. Passwords and payloads of clients are never
fields. Events that clients can cause at will, such as refused logins, are logged by `RateLimitedLog`.

No other thread of the server waits for the log: if the disk is slow or full, or the pipe is not read, lines are lost.
Once lines can be written again, a line reports the number of lost lines.
"""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import re
import select
import sys
import threading
import time
import warnings
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import IO, Any

import attrs
import msgspec

from topicstore.contract.errors import InvalidArgumentError

from .config.model import LogSettings

__all__ = [
    "ConnectionRecord",
    "JsonLines",
    "RateLimitedLog",
    "TextLines",
    "log_connected",
    "log_connection",
    "logging_to",
    "reopen",
    "set_level",
]


class ConnectionRecord(msgspec.Struct, kw_only=True):
    """The log record of one connection, from the socket's opening to its end. It contains no secrets."""

    client_id: str = ""
    """Empty if there was no CONNECT."""
    listener: str
    address: str
    version: int = 0
    """4 for MQTT 3.1.1, 5 for MQTT 5, 0 if there was no CONNECT."""
    user: str | None = None
    """The user; of a client that was not accepted the name that it gave. None for an anonymous client."""
    reason: str = "the client closed the connection"
    code: int | None = None
    """The reason code with which the connection ended, if there was one."""
    session_present: bool = False
    packets_in: int = 0
    packets_out: int = 0
    messages_in: int = 0
    messages_out: int = 0
    bytes_in: int = 0
    bytes_out: int = 0
    seconds: float = 0.0

    def who(self) -> dict[str, object]:
        """Return the fields that identify the client and the kind of its connection."""
        return {
            "client_id": self.client_id,
            "user": self.user,
            "listener": self.listener,
            "address": self.address,
            "version": self.version,
        }


_ROOT = "topicstore.server"
_UVICORN = "uvicorn"
"""The logger of the HTTP server; at the level ``info`` it only logs its own start and end."""
_WAITING = 10_000
"""Most lines that wait for a slow disk or a full pipe; further lines are lost."""
_FAREWELL = 2.0
"""Seconds for writing waiting lines when the log is closed; lines that are left then are lost."""

_LINE_ENDS = {ord(end): f"\\u{ord(end):04x}" for end in "\x7f\x85\u2028\u2029"}
"""Characters that JSON does not escape, but that some programs and terminals treat as line ends or control codes."""

_log = logging.getLogger(_ROOT)
_connections = logging.getLogger(f"{_ROOT}.connections")


def log_connected(record: ConnectionRecord) -> None:
    """Log that a client's CONNECT was accepted."""
    if _connections.isEnabledFor(logging.INFO):
        _log_event("client connected", {**record.who(), "session_present": record.session_present})


def log_connection(record: msgspec.Struct) -> None:
    """Log the end of a connection; the record's fields become the line's fields."""
    if _connections.isEnabledFor(logging.INFO):
        _log_event("connection ended", msgspec.structs.asdict(record))


def _log_event(event: str, fields: Mapping[str, object]) -> None:
    """Log an event of a connection. The record has no place in the source, whose search takes as long as the rest."""
    record = logging.LogRecord(_connections.name, logging.INFO, "", 0, event, None, None)
    record.fields = fields
    _connections.handle(record)


def set_level(settings: LogSettings) -> None:
    """Set the server's log level to the level of the settings."""
    _log.setLevel(settings.level.upper())


def reopen() -> None:
    """Let the writing thread open the log's file again, if the file was renamed or removed."""
    for handler in _log.handlers:
        if isinstance(handler, _Writer):
            handler.reopen()


class JsonLines(logging.Formatter):
    """A formatter that encodes any log record as one line of JSON."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the line of JSON, without a line end."""
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


_PLAIN = re.compile(r"[\w./:@%+,;$#*()\[\]-]+")
"""Texts that a line of text shows without quotes."""
_CONTROL = re.compile(r"[^\x20-\x7e\xa0-\u2027\u202f-\u2065\u2070-\ud7ff\ue000-\U0010ffff]")
"""Control characters, line ends, marks of the direction of writing, and surrogates."""


def _harmless(text: str) -> str:
    """Return text in which characters that could change a terminal's state, or fake a line, are escaped."""
    return _CONTROL.sub(lambda found: f"\\u{ord(found[0]):04x}", text)


class TextLines(logging.Formatter):
    """A formatter that writes any log record as a line of text for people; a traceback follows in indented lines."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the text, without a line end. Nothing in it can control a terminal."""
        moment = datetime.fromtimestamp(record.created, UTC).strftime("%Y-%m-%d %H:%M:%S")
        fields: Mapping[str, Any] = getattr(record, "fields", {})
        shown = [f"{name}={_shown(value)}" for name, value in fields.items() if value not in (None, "")]
        head = f"{moment}.{int(record.msecs):03d}Z {record.levelname.lower():7} {_harmless(record.getMessage())}"
        lines = ["  ".join([head, " ".join(shown)]).rstrip()]
        if record.exc_info:
            lines += [f"    {_harmless(line)}" for line in self.formatException(record.exc_info).splitlines()]
        return "\n".join(lines)


def _shown(value: object) -> str:
    """Return a field's value: texts are quoted if they contain blanks or special characters, all else is JSON."""
    if isinstance(value, str) and _PLAIN.fullmatch(value):
        return _harmless(value)
    return _harmless(msgspec.json.encode(value, enc_hook=str).decode())


_SECONDS = 10.0
"""The period in which the numbers of lines are limited."""
_LINES, _ALL_LINES = 10, 100
"""Most lines about one client in a period, and about all clients together."""
_KEYS = 1_000
"""Most clients of which the lines are counted; then the one whose period began first is forgotten."""


@attrs.define
class _Period:
    began: float
    written: int = 0
    omitted: int = 0
    """Number of lines omitted since the last written line."""


class RateLimitedLog:
    """Logs one kind of event that clients can cause at will, at most ten times in ten seconds for each client.

    All clients together have at most a hundred lines in ten seconds. The first line after a period reports the number
    of lines that were omitted, as the field ``omitted``. Used in one thread.
    """

    def __init__(self, event: str, logger: logging.Logger) -> None:
        self._event, self._log = event, logger
        self._all = _Period(float("-inf"))
        self._periods: OrderedDict[str, _Period] = OrderedDict()
        """The current period of each client, in the order in which the periods began."""

    def note(self, key: str, fields: Mapping[str, object]) -> None:
        """Log the event as a warning, unless too many lines about the client ``key``, or in all, were written."""
        now = time.monotonic()
        if now - self._all.began >= _SECONDS:
            self._all = _Period(now, omitted=self._all.omitted)
        found = self._periods.get(key)
        if found is None or now - found.began >= _SECONDS:
            found = self._periods[key] = _Period(now, omitted=0 if found is None else found.omitted)
            self._periods.move_to_end(key)
            if len(self._periods) > _KEYS:
                _, forgotten = self._periods.popitem(last=False)
                self._all.omitted += forgotten.omitted
        if found.written >= _LINES or self._all.written >= _ALL_LINES:
            found.omitted += 1
            return
        found.written += 1
        self._all.written += 1
        omitted, found.omitted, self._all.omitted = found.omitted + self._all.omitted, 0, 0
        self._log.warning(self._event, extra={"fields": {**fields, **({"omitted": omitted} if omitted else {})}})


class _Output:
    """An output for lines, written to a file descriptor. ``_number`` is the descriptor; -1: none."""

    _number = -1
    _rest = b""
    """The rest of a partly written line, which is written before the next line."""

    def renew(self) -> None:
        """Open the file again if it was renamed or removed. If that raises OSError, the old file stays open."""

    def write(self, line: bytes) -> None:
        """Write a line. If no byte of the line was written, raises OSError, or ValueError for a closed output."""
        data, written = self._rest + line, 0
        try:
            while written < len(data):
                written += self._write_some(data[written:])
        except OSError:
            begun = written > len(self._rest)
            self._rest = data[written:] if begun else self._rest[written:]
            if not begun:
                raise
        else:
            self._rest = b""

    def _write_some(self, data: bytes) -> int:
        try:
            return os.write(self._number, data)
        except BlockingIOError:  # another process that shares the pipe has made it non-blocking
            waiting = select.poll()
            waiting.register(self._number, select.POLLOUT)
            waiting.poll()
            return 0

    def is_terminal(self) -> bool:
        """Return whether a person reads the lines on a terminal."""
        return self._number >= 0 and os.isatty(self._number)

    def close(self) -> None:
        """Close the descriptor, if this object has opened it. Raises OSError."""


class _File(_Output):
    """A file to which lines are appended; opened again when another file, or none, has its name.

    So programs that rename or remove the file, such as logrotate, need not signal the server.
    """

    def __init__(self, path: Path) -> None:
        """Open the file, or create it. Raises OSError."""
        self._path = path
        self._found = -1, -1
        """The device and the inode of the open file."""
        self._open()

    def _open(self) -> None:
        opened = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o666)
        before, self._number, self._rest = self._number, opened, b""
        status = os.fstat(opened)
        self._found = status.st_dev, status.st_ino
        if before >= 0:
            os.close(before)

    def renew(self) -> None:
        """Open the file again if another file, or none, has its name. If that raises OSError, the old file stays."""
        try:
            status = self._path.stat()
        except FileNotFoundError:
            self._open()
            return
        if (status.st_dev, status.st_ino) != self._found:
            self._open()

    def close(self) -> None:
        """Close the file. Raises OSError."""
        os.close(self._number)


class _Stream(_Output):
    """A text stream, written by its file descriptor if it has one.

    The interpreter can't exit while a thread waits for a stream's lock, but can while a thread waits in a system call.
    """

    def __init__(self, stream: IO[str]) -> None:
        self._stream = stream
        with contextlib.suppress(OSError, ValueError, AttributeError):  # streams in memory have no descriptor
            self._number = stream.fileno()

    def _write_some(self, data: bytes) -> int:
        if self._number >= 0:
            return super()._write_some(data)
        self._stream.write(data.decode())
        self._stream.flush()
        return len(data)


class _Writer(logging.Handler):
    """A handler that queues records for the writing thread, and counts records that are lost."""

    def __init__(self, output: _Output, *, text: bool) -> None:
        super().__init__()
        self.setFormatter(TextLines() if text else JsonLines())
        self._output = output
        self._waiting: queue.SimpleQueue[logging.LogRecord | Callable[[], None] | None] = queue.SimpleQueue()
        self._lost = 0
        """Number of records lost because the queue was full. Guarded by the handler's lock."""
        self._unwritten = 0
        """Number of lines that the writing thread failed to write."""
        self._kept_open = False
        """Whether the last attempt to open the file again failed, so that the old file stays open."""
        self._thread = threading.Thread(target=self._run, name="topicstore-log", daemon=True)
        self._thread.start()

    # --- in all threads ---

    def emit(self, record: logging.LogRecord) -> None:
        """Queue a record, after a record with the number of lost ones, if any. Called with the handler's lock held."""
        if self._waiting.qsize() + (self._lost > 0) >= _WAITING:
            self._lost += 1
            return
        if self._lost:
            self._waiting.put(_about_lost(self._lost))
            self._lost = 0
        self._waiting.put(record)

    def reopen(self) -> None:
        """Let the writing thread open the file again, if the file was renamed or removed."""
        self._waiting.put(self._renew)

    def stop(self) -> None:
        """Wait until all records are written, at most `_FAREWELL` seconds, even if the writing thread blocks."""
        self._waiting.put(None)
        self._thread.join(_FAREWELL)

    # --- in the writing thread ---

    def _run(self) -> None:
        while (one := self._waiting.get()) is not None:
            if callable(one):
                one()
            else:
                self._write(one)
            if self._waiting.empty():
                self._tell_lost()
        self._tell_lost()
        with contextlib.suppress(OSError):  # no log is left to report the error
            self._output.close()

    def _tell_lost(self) -> None:
        self.acquire()
        lost, self._lost = self._lost, 0
        self.release()
        if lost:
            self._write(_about_lost(lost))

    def _renew(self) -> None:
        try:
            self._output.renew()
            self._kept_open = False
        except OSError as bad:
            if not self._kept_open:
                self._kept_open = True
                self._write_line(_own_record("the log can't be opened anew, and stays the file that it was: %s", bad))

    def _write(self, record: logging.LogRecord) -> None:
        self._renew()
        if self._unwritten:
            text = "%s lines were lost, because the log could not be written"
            if not self._write_line(_own_record(text, f"{self._unwritten:,}")):
                self._unwritten += 1
                return
            self._unwritten = 0
        if not self._write_line(record):
            self._unwritten += 1

    def _write_line(self, record: logging.LogRecord) -> bool:
        """Write a record; return whether that succeeded."""
        try:
            line = self.format(record)
        except Exception as bad:  # noqa: BLE001 - a record that can't be formatted must not be lost
            line = self.format(_own_record("an event that can't be written as it is, %s: %a", repr(bad), record.msg))
        try:
            self._output.write(f"{line}\n".encode())
        except (OSError, ValueError):
            return False
        return True


def _own_record(text: str, *values: object) -> logging.LogRecord:
    return logging.LogRecord(_ROOT, logging.WARNING, __file__, 0, text, values, None)


def _about_lost(lost: int) -> logging.LogRecord:
    return _own_record("%s lines were lost, because the log is slower than what happens", f"{lost:,}")


@contextlib.contextmanager
def logging_to(settings: LogSettings, stream: IO[str] | None = None) -> Iterator[None]:
    """Write the server's log within the context: to the settings' file, else to ``stream``, else to stderr.

    Lines are text if the settings say so, or if they leave it open and a terminal shows them; else they are JSON.

    Warnings of libraries and uncaught exceptions are logged, too. On exit, waiting lines are written for at most two
    seconds. Raises `InvalidArgumentError` if the file can't be opened.
    """
    output: _Output
    if settings.file is not None:
        try:
            output = _File(settings.file)
        except OSError as bad:
            raise InvalidArgumentError(f"the log {settings.file} can't be written: {bad}") from bad
    else:
        output = _Stream(stream if stream is not None else sys.stderr)
    text = output.is_terminal() if settings.format == "auto" else settings.format == "text"
    handler = _Writer(output, text=text)
    try:
        with (
            _handled_by(handler, None, "warning"),
            _handled_by(handler, _ROOT, settings.level),
            _handled_by(handler, _UVICORN, "warning"),
            _nothing_on_stderr(),
        ):
            yield
    finally:
        handler.stop()
        handler.close()


@contextlib.contextmanager
def _handled_by(handler: logging.Handler, name: str | None, level: str) -> Iterator[None]:
    """Let a handler be the only one for a logger's records; the name None is the root logger."""
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


@contextlib.contextmanager
def _nothing_on_stderr() -> Iterator[None]:
    """Log warnings and uncaught exceptions instead of writing them to stderr, where an unread pipe would block."""
    before = warnings.showwarning, threading.excepthook, sys.unraisablehook

    def warned(message: Warning | str, *_: object) -> None:
        _log.warning("%s", " ".join(str(message).split()))

    def failed(what: Any) -> None:
        if what.exc_type is not SystemExit:
            _log.error("a thread has ended with an error", exc_info=(what.exc_type, what.exc_value, what.exc_traceback))

    def ignored(what: Any) -> None:
        about = f"{what.err_msg or 'an exception was ignored in'}: {what.object!r}"
        _log.error("%s", about, exc_info=(what.exc_type, what.exc_value, what.exc_traceback))

    warnings.showwarning, threading.excepthook, sys.unraisablehook = warned, failed, ignored  # type: ignore[assignment]
    try:
        yield
    finally:
        warnings.showwarning, threading.excepthook, sys.unraisablehook = before
