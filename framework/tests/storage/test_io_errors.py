"""An I/O error while a database is opened is raised, and no message is lost."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import topicstore as ts
from topicstore_conformance.conditions.skipping import need
from topicstore_conformance.faults import power
from topicstore_conformance.faults.threads import PATIENCE

MESSAGES = [b"%d" % number for number in range(300)]
OPENED = """
import sys
import topicstore as ts

try:
    with ts.open(sys.argv[1], auto_compact=False) as db:
        assert len(list(db.replay("#"))) == 300, "messages are missing"
except (ts.TopicstoreError, OSError) as error:
    assert not isinstance(error, ts.DataLossError), error
"""


@pytest.mark.parametrize("backend", ["leveldb", "rocksdb", "duckdb"])
def test_a_directory_that_can_not_be_listed(tmp_path: Path, backend: str) -> None:
    """Whichever directory listing fails, opening raises or shows all messages, as does the next opening."""
    need(backend)
    if (reason := power.why_no_tracing()) is not None:
        pytest.skip(reason)
    whole, copy = tmp_path / "whole", tmp_path / "copy"
    with ts.open(whole, backend=backend, auto_compact=False) as db:
        for payload in MESSAGES:
            db.store([ts.Message("t", payload)])
    calls = _opened(whole.with_name("copy"), whole, None)
    assert calls
    for number in range(1, calls + 1):
        _opened(copy, whole, number)
        with ts.open(copy, auto_compact=False) as db:
            assert [message.payload for message in db.replay("#")] == MESSAGES, f"listing {number} of {calls}"


def _opened(copy: Path, whole: Path, failing: int | None) -> int:
    """Open a copy of a database, with one listing of the shard's directory failing. Return the number of listings."""
    shutil.rmtree(copy, ignore_errors=True)
    shutil.copytree(whole, copy)
    trace = copy.with_name("trace")
    inject = () if failing is None else ("-e", f"inject=getdents64:error=EIO:when={failing}")
    tracer = ("strace", "-f", "-o", trace, "-P", copy / "shard-0000", "-e", "trace=getdents64", *inject)
    done = subprocess.run(
        [*tracer, sys.executable, "-c", OPENED, copy], capture_output=True, text=True, timeout=PATIENCE
    )
    assert not done.returncode, done.stderr
    return len(re.findall(r"getdents64\(", trace.read_text()))


def test_an_opening_that_was_killed_before_logs_were_checked(tmp_path: Path) -> None:
    """If a kill interrupted the check of LevelDB's logs, the next opening restores files that LevelDB has deleted."""
    need("leveldb")
    with ts.open(tmp_path / "db", backend="leveldb", auto_compact=False) as db:
        for payload in MESSAGES:
            db.store([ts.Message("t", payload)])
    shard = tmp_path / "db" / "shard-0000"
    kept = shard / "topicstore-opening"
    shutil.copytree(shard, kept)
    [log] = shard.glob("*.log")
    log.unlink()  # as LevelDB deletes a log that is not in its listing
    (tmp_path / "db" / "closed").unlink()
    with ts.open(tmp_path / "db", auto_compact=False) as db:
        assert [message.payload for message in db.replay("#")] == MESSAGES
    assert not list(shard.glob("topicstore-opening*"))
