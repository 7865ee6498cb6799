"""``topicstore delete``: what goes, and who is asked."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import topicstore as ts
from click.testing import Result

Run = Callable[..., Result]
Document = Callable[..., dict[str, Any]]


def test_delete(run: Run, document: Document, rows: list[ts.Message], db: Path) -> None:
    span = ("--start", "1970-01-01T00:00:10Z", "--until", "1970-01-01T00:00:20Z")
    assert "--yes" in run("delete", db, "#", code=2).stderr
    gone = sum(m.topic == "fleet/1/speed" and 10 <= (m.timestamp or 0) / 1e6 < 20 for m in rows)
    assert document("delete", db, "fleet/1/speed", *span, "--yes") == {
        "path": str(db),
        "filter": "fleet/1/speed",
        "deleted": gone,
    }
    assert f"{60 - gone} messages" in run("delete", db, "#", "--yes").stdout
