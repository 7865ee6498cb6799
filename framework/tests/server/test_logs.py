"""The server's log: lines of JSON or text, which a slow reader of the log never blocks."""

from __future__ import annotations

import io
import json
import logging
import os
import pty
import re
import sys
import threading
import warnings
from pathlib import Path
from typing import Any

import msgspec
import pytest
import topicstore as ts
from topicstore.server import logs
from topicstore.server.config.model import LogSettings
from topicstore.server.logs import RateLimitedLog, log_connection, logging_to, reopen
from topicstore_conformance.faults.threads import wait_until

LOG = logging.getLogger("topicstore.server.anything")


class Ended(msgspec.Struct):
    """A stand-in for a closed connection, with the attributes that the log reads."""

    client_id: str
    seconds: float


def written(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()]


def test_a_line_is_json_with_the_events_own_fields(tmp_path: Path) -> None:
    """A log line is JSON with the event's fields, and stays one line whatever the client's name is."""
    file = tmp_path / "log"
    with logging_to(LogSettings(file=file)):
        log_connection(Ended('a\n"b"\x1b\u2028', 1.5))
        LOG.info("it is %d", 7)
        try:
            raise LookupError("lost")
        except LookupError:
            LOG.exception("it failed")
    first, second, third = written(file)
    assert 'a\n"b"\x1b\u2028' == first["client_id"]
    assert (1.5, "connection ended", "info") == (first["seconds"], first["event"], first["level"])
    assert first["time"].endswith("+00:00")
    assert ("it is 7", "topicstore.server.anything") == (second["event"], second["logger"])
    assert "LookupError: lost" in third["error"]


def test_the_level_is_the_settings_and_nothing_is_left_behind(tmp_path: Path) -> None:
    """Logging uses the level of the settings; after the server's end, an embedding program's logging is as before."""
    root, file = logging.getLogger("topicstore.server"), tmp_path / "log"
    before = root.level, root.propagate, list(root.handlers)
    with logging_to(LogSettings(level="warning", file=file)):
        LOG.info("no")
        LOG.warning("yes")
    assert ["yes"] == [line["event"] for line in written(file)]
    assert before == (root.level, root.propagate, list(root.handlers))


def test_lines_are_added_to_a_file(tmp_path: Path) -> None:
    """Lines are appended to the log file; a log file that can't be written is an error before the server serves."""
    for event in ("first", "second"):
        with logging_to(LogSettings(file=tmp_path / "log")):
            LOG.info(event)
    assert ["first", "second"] == [line["event"] for line in written(tmp_path / "log")]
    with pytest.raises(ts.InvalidArgumentError, match="can't be written"), logging_to(LogSettings(file=tmp_path)):
        pass


@pytest.mark.parametrize(("chosen", "text"), [("auto", True), ("text", True), ("json", False)])
def test_a_terminal_gets_text(chosen: Any, text: bool) -> None:
    """On a terminal, lines are text unless the settings say JSON; nothing in a line of text controls the terminal."""
    reads, writes = pty.openpty()
    with os.fdopen(reads, "rb", buffering=0) as seen, os.fdopen(writes, "w") as terminal:
        with logging_to(LogSettings(format=chosen), terminal):
            log_connection(Ended("a\n\x1b[2J\u2028\u202eb", 1.5))
            try:
                raise LookupError("lost\x1b[1m")
            except LookupError:
                LOG.exception("it failed\nat once")
        found = b""
        while b"LookupError: lost" not in found:
            found += seen.read(4_096)
    lines = found.decode().replace("\r\n", "\n").split("\n")
    assert "\x1b" not in found.decode()
    if text:
        event = "info    connection ended  client_id="
        assert re.fullmatch(rf"[0-9-]{{10}} [0-9:]{{8}}\.[0-9]{{3}}Z {event}\S+ seconds=1.5", lines[0])
        assert "\u202e" not in lines[0]
        assert lines[1].endswith("error   it failed\\u000aat once")
        assert all(line.startswith("    ") for line in lines[2:-1])
    else:
        assert json.loads(lines[0])["event"] == "connection ended"


@pytest.mark.parametrize(("chosen", "text"), [("auto", False), ("text", True), ("json", False)])
def test_a_file_gets_json(tmp_path: Path, chosen: Any, text: bool) -> None:
    """In a file, lines are JSON unless the settings say text."""
    with logging_to(LogSettings(format=chosen, file=tmp_path / "log")):
        LOG.info("yes")
    assert text != (tmp_path / "log").read_text().startswith("{")


def test_one_client_cannot_fill_the_log(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    """A client has ten lines in a period, all clients together a hundred; later lines count those that were omitted."""
    monkeypatch.setattr(logs, "_SECONDS", float("inf"))
    limited = RateLimitedLog("refused", LOG)
    for _ in range(50):
        limited.note("loud", {"client": "loud"})
    assert 10 == len(caplog.records)
    for number in range(10_000):
        limited.note(f"other {number}", {})
    assert 100 == len(caplog.records)
    assert len(limited._periods) <= logs._KEYS
    monkeypatch.setattr(logs, "_SECONDS", 0.0)
    for number in range(10_000):
        limited.note(f"other {number}", {})
    limited.note("loud", {})
    fields: list[dict[str, Any]] = [getattr(one, "fields", {}) for one in caplog.records]
    assert 50 + 10_000 + 10_000 + 1 == len(fields) + sum(one.get("omitted", 0) for one in fields)


class Stuck(io.StringIO):
    """A stream whose writes block until the test allows them."""

    def __init__(self) -> None:
        super().__init__()
        self.begun, self.gate, self.four = threading.Event(), threading.Event(), threading.Event()

    def write(self, text: str) -> int:
        self.begun.set()
        self.gate.wait()
        size = super().write(text)
        if self.getvalue().count("\n") >= 4:
            self.four.set()
        return size


def test_a_full_pipe_loses_lines_and_says_how_many(monkeypatch: pytest.MonkeyPatch) -> None:
    """When the reader of the log is too slow, lines are dropped and counted, and the server isn't blocked."""
    monkeypatch.setattr(logs, "_WAITING", 3)
    stream = Stuck()
    with logging_to(LogSettings(), stream):
        LOG.info("first")
        stream.begun.wait()
        for number in range(10):
            LOG.info("%d", number)
        stream.gate.set()
        stream.four.wait()
        LOG.info("last")
    events = [json.loads(line)["event"] for line in stream.getvalue().splitlines()]
    assert ["first", "0", "1", "2", "7 lines were lost, because the log is slower than what happens", "last"] == events


class Failing(io.StringIO):
    """A stream whose writes fail for a while, as on a full disk."""

    failing = True

    def __init__(self) -> None:
        super().__init__()
        self.tries = 0

    def write(self, text: str) -> int:
        self.tries += 1
        if self.failing:
            raise OSError(28, "No space left on device")
        return super().write(text)


def test_lines_that_could_not_be_written_are_counted(capfd: pytest.CaptureFixture[str]) -> None:
    """Lines that can't be written are counted, and a later line reports the number; stderr stays empty."""
    stream = Failing()
    with logging_to(LogSettings(), stream):
        for number in range(3):
            LOG.info("%d", number)
        wait_until(lambda: stream.tries >= 3, "three tries")
        stream.failing = False
        LOG.info("last")
    events = [json.loads(line)["event"] for line in stream.getvalue().splitlines()]
    assert ["3 lines were lost, because the log could not be written", "last"] == events
    assert "" == capfd.readouterr().err


@pytest.mark.parametrize("gone", [False, True])
def test_a_file_that_was_renamed_or_removed_is_made_anew(tmp_path: Path, gone: bool) -> None:
    """If the log file was renamed or removed, the next line goes to a new file, as log rotation expects."""
    file, old = tmp_path / "log", tmp_path / "log.1"
    with logging_to(LogSettings(file=file)):
        LOG.info("before")
        wait_until(lambda: file.exists() and file.read_text().endswith("\n"), "the first line")
        file.rename(old)
        if gone:
            old.unlink()
        LOG.info("after")
    assert ["after"] == [line["event"] for line in written(file)]
    assert gone or ["before"] == [line["event"] for line in written(old)]


def test_a_file_is_opened_anew_without_a_line(tmp_path: Path) -> None:
    """`reopen` opens the log file again without a new line, so that a removed file's space is freed at once."""
    file = tmp_path / "log"
    with logging_to(LogSettings(file=file)):
        file.unlink()
        reopen()
        wait_until(file.exists, "the new file")


def test_lines_go_on_into_the_old_file_where_a_new_one_cannot_be_made(tmp_path: Path) -> None:
    """If a new log file can't be created, lines continue in the old one, and one line says so."""
    folder = tmp_path / "logs"
    folder.mkdir()
    with logging_to(LogSettings(file=folder / "log")):
        folder.rename(tmp_path / "moved")
        LOG.info("first")
        LOG.info("second")
    told, first, second = (line["event"] for line in written(tmp_path / "moved" / "log"))
    assert "can't be opened anew" in told
    assert ("first", "second") == (first, second)


def test_what_python_writes_to_standard_error_is_in_the_log(capfd: pytest.CaptureFixture[str]) -> None:
    """Warnings, uncaught errors and lines of other libraries go to the log instead of stderr."""

    def fail() -> None:
        raise LookupError("lost")

    class Broken:
        def __del__(self) -> None:
            raise LookupError("ignored")

    before = warnings.showwarning, threading.excepthook, sys.unraisablehook
    stream = io.StringIO()
    with warnings.catch_warnings(), logging_to(LogSettings(), stream):
        warnings.simplefilter("always")
        warnings.warn("first\nsecond", RuntimeWarning, stacklevel=1)
        thread = threading.Thread(target=fail)
        thread.start()
        thread.join()
        Broken()
        logging.getLogger("asyncio").warning("a task was forgotten")
    lines = [json.loads(line) for line in stream.getvalue().splitlines()]
    events = [line["event"] for line in lines]
    assert ["first second", "a thread has ended with an error"] == events[:2]
    assert "__del__" in events[2]
    assert "a task was forgotten" == events[3]
    assert "LookupError: lost" in lines[1]["error"]
    assert "LookupError: ignored" in lines[2]["error"]
    assert before == (warnings.showwarning, threading.excepthook, sys.unraisablehook)
    assert "" == capfd.readouterr().err


def test_what_serves_http_writes_to_the_same_log() -> None:
    """Warnings of the HTTP server go to the same log as JSON lines; its messages of lower levels are dropped."""
    stream = io.StringIO()
    with logging_to(LogSettings(), stream):
        logging.getLogger("uvicorn.error").info("begun")
        logging.getLogger("uvicorn.error").warning("a request was wrong")
    (line,) = map(json.loads, stream.getvalue().splitlines())
    assert ("warning", "uvicorn.error", "a request was wrong") == (line["level"], line["logger"], line["event"])
