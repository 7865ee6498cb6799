"""The program, run in this process, and the databases that most of its commands are shown."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import topicstore as ts
from click.testing import CliRunner, Result
from topicstore.cli import cli


@pytest.fixture
def run() -> Callable[..., Result]:
    """Return what runs the program, and checks how it ends: an error is one line."""

    def run(*arguments: object, stdin: str | bytes | None = None, code: int = 0) -> Result:
        result = CliRunner().invoke(cli, list(map(str, arguments)), input=stdin)
        assert result.exit_code == code, result.output
        if code:
            assert result.stderr.startswith("error: ")
            assert result.stderr.count("\n") == 1
        return result

    return run


@pytest.fixture
def document() -> Callable[..., dict[str, Any]]:
    """Return what runs the program with ``--json``, and gives what it printed."""

    def document(*arguments: object, code: int = 0) -> dict[str, Any]:
        result = CliRunner().invoke(cli, [*map(str, arguments), "--json"])
        assert result.exit_code == code, result.output
        found = json.loads(result.stdout)
        assert isinstance(found, dict)
        return found

    return document


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """An empty database of two shards."""
    with ts.open(tmp_path / "db", mode="x", shards=2):
        return tmp_path / "db"


@pytest.fixture
def rows() -> list[ts.Message]:
    """Messages of three topics and five publishers."""
    return [ts.Message(f"fleet/{n % 3}/speed", b"%d" % n, f"bus-{n % 5}", timestamp=1_000_000 * n) for n in range(60)]


@pytest.fixture
def db(tmp_path: Path, rows: list[ts.Message]) -> Path:
    """A database of two shards that has them."""
    with ts.open(tmp_path / "db", mode="x", shards=2, timestamps="message") as opened:
        opened.store(rows)
    return tmp_path / "db"
