"""``topicstore checkpoint``."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from click.testing import Result

Run = Callable[..., Result]


def test_checkpoint(run: Run, db: Path, tmp_path: Path) -> None:
    assert "60 messages" in run("checkpoint", db, tmp_path / "copy").stdout
    assert run("replay", tmp_path / "copy").stdout == run("replay", db).stdout
    run("checkpoint", db, tmp_path / "copy", code=3)
