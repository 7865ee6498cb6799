"""``topicstore replay`` without matches, as Arrow, and by timestamp; `test_formats` tests the other formats."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pytest
import topicstore as ts
from topicstore_conformance.faults.threads import PATIENCE

from .conftest import run


def test_a_replay_of_nothing(
    db: Path, tmp_path: Path, on_a_terminal: Callable[..., str], capsys: pytest.CaptureFixture[str]
) -> None:
    """If no message matches, a terminal shows the time of the newest stored message; a script gets no output."""
    newest = "no messages match; the newest of the database is of 1970-01-01T00:00:59Z\r\n"
    assert newest == on_a_terminal("stderr", "replay", db, "nosuch")
    assert newest == on_a_terminal("stderr", "replay", db, "--start", "-2h", "--format", "jsonl")
    assert "" == on_a_terminal("stderr", "replay", db, "--limit", 0)
    run("create", tmp_path / "empty")
    assert "no messages: the database holds none\r\n" == on_a_terminal("stderr", "replay", tmp_path / "empty")
    assert "" == capsys.readouterr().out
    assert ("", "") == (run("replay", db, "nosuch").stdout, run("replay", db, "nosuch").stderr)


def test_arrow_goes_through_pipes(db: Path, tmp_path: Path) -> None:
    """Arrow is written as an IPC stream with the messages of the replay in order, even if there are none."""
    with ts.open(db, mode="r") as opened:
        expected = list(opened.replay("fleet/1/#", order="time"))
    stream = run("replay", db, "fleet/1/#", "--format", "arrow").stdout_bytes
    table = pa.ipc.open_stream(stream).read_all()
    assert table.schema == ts.SCHEMA
    assert expected == [m for batch in table.to_batches() for m in ts.MessageBatch.from_arrow(batch).to_messages()]
    followed = run("replay", db, "fleet/1/#", "--format", "arrow", "--follow", "--limit", 7).stdout_bytes
    assert pa.ipc.open_stream(followed).read_all() == table.slice(0, 7)
    assert 0 == pa.ipc.open_stream(run("replay", db, "none", "--format", "arrow").stdout_bytes).read_all().num_rows
    run("replay", db, "--format", "arrow", "--reverse", "--limit", 2, "--output", tmp_path / "two.arrows")
    with (tmp_path / "two.arrows").open("rb") as file:
        assert [b"59", b"58"] == pa.ipc.open_stream(file).read_all()["payload"].to_pylist()


def test_arrow_is_not_printed_on_a_terminal(
    db: Path, on_a_terminal: Callable[..., str], capsys: pytest.CaptureFixture[str]
) -> None:
    """Arrow is not written to a terminal, because its bytes could make the terminal unusable."""
    assert "" == on_a_terminal("stdout", "replay", db, "--format", "arrow", code=2)
    assert "--output FILE" in capsys.readouterr().err


@pytest.mark.parametrize("file_format", ["jsonl", "table"])
def test_a_reader_that_goes_is_no_error(tmp_path: Path, file_format: str) -> None:
    """If the reader of the output ends early, as ``head`` does, the command ends without an error."""
    with ts.open(tmp_path / "db") as opened:
        opened.store([ts.Message("a", bytes(100_000)) for _ in range(100)])
    program = [sys.executable, "-m", "topicstore.cli", "replay", str(tmp_path / "db"), "--format", file_format]
    with subprocess.Popen(program, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.read(10)
        process.stdout.close()
        said = process.stderr.read()
        assert (0, b"") == (process.wait(PATIENCE), said)


def test_by_timestamp(tmp_path: Path) -> None:
    """`--by timestamp` finds late messages by their own time in every format; `--follow` uses positions only."""
    hour, start = 3_600_000_000, 1_700_000_000_000_000
    times = [0, 1, 2, 1, 5]
    with ts.open(tmp_path / "db", layout="block") as db:
        db.store([ts.Message("a", b"%d" % n, "c", timestamp=start + at * hour) for n, at in enumerate(times)])
    asked = ("replay", tmp_path / "db", "a", "--start", start + hour, "--until", start + 2 * hour)
    assert "" == run(*asked, "--format", "jsonl").stdout
    lines = run(*asked, "--by", "timestamp", "--format", "jsonl").stdout.splitlines()
    assert ["1", "3"] == [json.loads(line)["payload"] for line in lines]
    (newest,) = run(*asked, "--by", "timestamp", "--reverse", "--limit", 1, "--format", "jsonl").stdout.splitlines()
    assert "3" == json.loads(newest)["payload"]
    run(*asked, "--by", "timestamp", "--output", tmp_path / "late.parquet")
    run("import", tmp_path / "copy", tmp_path / "late.parquet")
    with ts.open(tmp_path / "copy", mode="r") as copy:
        assert [b"1", b"3"] == [message.payload for message in copy.replay("#")]
    told = run("explain", tmp_path / "db", "a", "--by", "timestamp", "--start", start + 20 * hour, "--json")
    assert (0, 1, 0) == tuple(json.loads(told.stdout)[name] for name in ("zones", "all_zones", "messages"))
    assert (
        "0 of 1 zones" in run("explain", tmp_path / "db", "a", "--by", "timestamp", "--start", start + 20 * hour).stdout
    )
    refused = run("replay", tmp_path / "db", "--follow", "--by", "timestamp", code=2)
    assert "--follow goes by positions" in refused.stderr


def test_times_before_1970_are_before_all_messages(db: Path) -> None:
    """Times before 1970 are accepted, and are earlier than all messages."""
    everything = run("replay", db).stdout
    assert everything
    assert everything == run("replay", db, "--start", "1960-01-01").stdout
    assert "" == run("replay", db, "--until", "1969-12-31T23:59:59.5").stdout
