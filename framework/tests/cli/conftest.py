"""Runs the program in this process, and provides databases for the tests of its commands."""

from __future__ import annotations

import contextlib
import json
import os
import pty
import shutil
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import IO, Any

import pytest
import topicstore as ts
from click.testing import CliRunner, Result
from topicstore.cli import cli
from topicstore.cli.terminal.exits import DAMAGED


def run(*arguments: object, stdin: str | bytes | None = None, code: int = 0) -> Result:
    """Run the program, and check its exit code; an error must be one line."""
    result = CliRunner().invoke(cli, list(map(str, arguments)), input=stdin)
    assert result.exit_code == code, result.output
    if code > DAMAGED:
        assert result.stderr.startswith("error: ")
        assert result.stderr.count("\n") == 1
    return result


def document(*arguments: object, **named: Any) -> dict[str, Any]:
    """Run the program with ``--json``, and return its output."""
    found = json.loads(run(*arguments, "--json", **named).stdout)
    assert isinstance(found, dict)
    return found


@pytest.fixture
def on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> Callable[..., str]:
    """Return a function that runs the program with a terminal as `stdout` or `stderr`, and returns its output."""

    def on_a_terminal(stream: str, *arguments: object, code: int = 0) -> str:
        ours, theirs = pty.openpty()
        with (
            ThreadPoolExecutor() as threads,
            monkeypatch.context() as patch,
            os.fdopen(ours, "rb", buffering=0) as screen,
        ):
            shown = threads.submit(_read_to_the_end, screen)
            with os.fdopen(theirs, "w", encoding="utf-8") as terminal:
                patch.setattr(sys, stream, terminal)
                with pytest.raises(SystemExit) as end:
                    cli(list(map(str, arguments)))
                assert end.value.code == code
            return shown.result()

    return on_a_terminal


def _read_to_the_end(screen: IO[bytes]) -> str:
    shown = b""
    with contextlib.suppress(OSError):  # at the end of a pseudo-terminal, Linux raises an error
        while piece := screen.read(65_536):
            shown += piece
    return shown.decode()


@pytest.fixture(scope="session")
def rows() -> tuple[ts.Message, ...]:
    """Messages of three topics and five publishers."""
    return tuple(
        ts.Message(f"fleet/{n % 3}/speed", b"%d" % n, f"bus-{n % 5}", timestamp=1_000_000 * n) for n in range(60)
    )


@pytest.fixture(scope="session")
def made(tmp_path_factory: pytest.TempPathFactory, rows: Sequence[ts.Message]) -> Path:
    """Return a folder of databases, which tests copy."""
    folder = tmp_path_factory.mktemp("made")
    ts.open(folder / "empty", mode="x", shards=2).close()
    with ts.open(folder / "filled", mode="x", shards=2, timestamps="message") as opened:
        opened.store(rows)
    return folder


@pytest.fixture
def path(tmp_path: Path, made: Path) -> Path:
    """An empty database of two shards."""
    return shutil.copytree(made / "empty", tmp_path / "db")


@pytest.fixture
def db(tmp_path: Path, made: Path) -> Path:
    """A database of two shards that holds `rows`, with the messages' own times as positions."""
    return shutil.copytree(made / "filled", tmp_path / "db")
