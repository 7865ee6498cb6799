"""The server's log: lines of JSON that a slow reader never holds up."""

from __future__ import annotations

import io
import json
import logging
import threading
from pathlib import Path
from typing import Any

import msgspec
import pytest
import topicstore as ts
from topicstore.server import logs
from topicstore.server.logs import log_connection, logging_to
from topicstore.server.settings import LogSettings

LOG = logging.getLogger("topicstore.server.anything")


class Ended(msgspec.Struct):
    """A connection that has ended, as far as this test needs it."""

    client_id: str
    seconds: float


def written(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()]


def test_a_line_is_json_with_the_events_own_fields(tmp_path: Path) -> None:
    """Whatever the client's name is: a line stays one line."""
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
    """Neither handlers nor a level, for a program that embeds the server."""
    root, file = logging.getLogger("topicstore.server"), tmp_path / "log"
    before = root.level, root.propagate, list(root.handlers)
    with logging_to(LogSettings(level="warning", file=file)):
        LOG.info("no")
        LOG.warning("yes")
    assert ["yes"] == [line["event"] for line in written(file)]
    assert before == (root.level, root.propagate, list(root.handlers))


def test_lines_are_added_to_a_file(tmp_path: Path) -> None:
    """And one that can't be written is an error before the server serves."""
    for event in ("first", "second"):
        with logging_to(LogSettings(file=tmp_path / "log")):
            LOG.info(event)
    assert ["first", "second"] == [line["event"] for line in written(tmp_path / "log")]
    with pytest.raises(ts.InvalidArgumentError, match="can't be written"), logging_to(LogSettings(file=tmp_path)):
        pass


class Stuck(io.StringIO):
    """A stream that takes nothing until it is told to."""

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
    """The server goes on meanwhile."""
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


def test_what_serves_http_writes_to_the_same_log() -> None:
    """Its warnings only, as lines of JSON like the others."""
    stream = io.StringIO()
    with logging_to(LogSettings(), stream):
        logging.getLogger("uvicorn.error").info("begun")
        logging.getLogger("uvicorn.error").warning("a request was wrong")
    (line,) = map(json.loads, stream.getvalue().splitlines())
    assert ("warning", "uvicorn.error", "a request was wrong") == (line["level"], line["logger"], line["event"])
