"""Imports that are killed or interrupted, in processes of their own, and what the next one makes of it."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import topicstore as ts
from topicstore.cli.fleet import fleet
from topicstore.cli.rows import encode_lines

MESSAGES = 12_000
BATCH = 100
PROGRAM = [sys.executable, "-m", "topicstore.cli"]


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("source") / "fleet.jsonl"
    path.write_bytes(b"".join(map(encode_lines, fleet(MESSAGES))))
    return path


@contextmanager
def importing(db: Path, file: Path, *more: str) -> Iterator[tuple[subprocess.Popen[str], Iterator[int]]]:
    """Start an import; yield the process and the numbers of rows that it reports as safe."""
    reports, report_to = os.pipe()
    command = [*PROGRAM, "import", str(db), str(file), "--batch-size", str(BATCH), "--acknowledge", str(report_to)]
    child = subprocess.Popen(
        [*command, *more], pass_fds=[report_to], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    os.close(report_to)
    try:
        with os.fdopen(reports, "rb") as lines:
            yield child, (int(line) for line in lines if line.endswith(b"\n"))
    finally:
        child.kill()
        child.communicate()


def rows(db: Path) -> list[list[ts.Message]]:
    """Return everything in a database, shard by shard, after checking it."""
    with ts.open_existing(db) as opened:
        report = opened.verify()
        assert (report.damages, report.messages) == ([], opened.info().messages)
        found: list[list[ts.Message]] = [[] for _ in range(opened.manifest.shards)]
        for batch in opened.replay_arrow("#", order="time", ids=True):
            for shard in set(batch["shard"].to_pylist()):
                mine = batch.filter([one == shard for one in batch["shard"].to_pylist()])
                found[shard] += ts.MessageBatch.from_arrow(mine).to_messages()
    return found


@pytest.mark.parametrize("shards", [1, 4])
def test_killed_again_and_again_it_ends_like_one_that_was_not(tmp_path: Path, file: Path, shards: int) -> None:
    """Nothing that was reported is lost, nothing is stored twice, wherever SIGKILL strikes."""
    creation = ("--shards", str(shards))
    chance = random.Random(shards)
    killed = safe = 0
    while True:
        strike = safe + chance.randrange(BATCH, MESSAGES // 6, BATCH)
        with importing(tmp_path / "db", file, *creation) as (child, reports):
            for safe in reports:
                if safe >= strike and child.poll() is None:
                    child.kill()
            if child.wait() == 0:
                break
        assert child.returncode == -signal.SIGKILL
        killed += 1
        with ts.open_existing(tmp_path / "db") as db:
            assert db.info().messages >= safe
    assert killed >= 3
    with importing(tmp_path / "clean", file, *creation) as (child, _):
        assert child.wait() == 0
    assert rows(tmp_path / "db") == rows(tmp_path / "clean")


@pytest.mark.parametrize("shards", [1, 4])
def test_interrupted_it_ends_cleanly_and_says_how_to_go_on(tmp_path: Path, file: Path, shards: int) -> None:
    """What it says is stored is what is stored: at least what it reported, and maybe one batch it had no time to."""
    with importing(tmp_path / "db", file, "--shards", str(shards)) as (child, reports):
        for safe in reports:
            if safe == 10 * BATCH:
                child.send_signal(signal.SIGINT)
        out, error = child.communicate()
    assert (child.returncode, out) == (130, "")
    stored = sum(map(len, rows(tmp_path / "db")))
    assert stored in (safe, safe + BATCH)
    assert stored < MESSAGES
    assert error == f"error: interrupted; {stored:,} rows of {file} are stored; the same command goes on from there\n"
    with importing(tmp_path / "db", file) as (child, _):
        out, error = child.communicate()
    assert (child.returncode, error) == (0, "")
    assert f"went on behind row {stored:,}" in out
    with importing(tmp_path / "clean", file, "--shards", str(shards)) as (child, _):
        assert child.wait() == 0
    assert rows(tmp_path / "db") == rows(tmp_path / "clean")


def test_interrupted_while_it_waits_for_more(tmp_path: Path, file: Path) -> None:
    """A stream that has nothing to say doesn't keep Ctrl-C waiting."""
    with importing(tmp_path / "db", Path("-"), "--source", "feed") as (_, __):
        pass
    reports, report_to = os.pipe()
    command = [*PROGRAM, "import", str(tmp_path / "fed"), "--batch-size", "10", "--acknowledge", str(report_to)]
    child = subprocess.Popen(command, pass_fds=[report_to], stdin=subprocess.PIPE, stderr=subprocess.PIPE)
    os.close(report_to)
    assert child.stdin is not None
    child.stdin.write(b"".join(file.read_bytes().splitlines(keepends=True)[:25]))
    child.stdin.flush()
    with os.fdopen(reports, "rb") as lines:
        assert [next(lines), next(lines)] == [b"10\n", b"20\n"]
        child.send_signal(signal.SIGINT)
        _, error = child.communicate()
    assert child.returncode == 130
    assert b"20 rows of standard input are stored" in error
    assert b"--source" in error
    assert len(rows(tmp_path / "fed")[0]) == 20


def test_who_reads_may_go(tmp_path: Path, file: Path) -> None:
    """``topicstore replay … | head -1`` ends quietly."""
    with importing(tmp_path / "db", file) as (child, _):
        assert child.wait() == 0
    for more in ((), ("--format", "table"), ("--format", "csv")):
        reader = subprocess.Popen(
            [*PROGRAM, "replay", str(tmp_path / "db"), *more], stdout=subprocess.PIPE, stderr=subprocess.PIPE
        )
        assert reader.stdout is not None
        assert reader.stdout.readline()
        reader.stdout.close()
        assert reader.stderr is not None
        with reader.stderr:
            assert (reader.stderr.read(), reader.wait()) == (b"", 0)


def test_help_loads_neither_arrow_nor_an_engine() -> None:
    code = (
        "import sys\n"
        "from topicstore.cli import cli\n"
        "for arguments in ([], ['--help'], ['import', '--help'], ['demo', '--help']):\n"
        "    try:\n"
        "        cli(arguments)\n"
        "    except SystemExit:\n"
        "        pass\n"
        "heavy = {'pyarrow', 'rocksdict', 'rich'} & set(sys.modules)\n"
        "sys.exit(f'loaded {heavy}' if heavy else 0)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "Exit codes:" in done.stdout
