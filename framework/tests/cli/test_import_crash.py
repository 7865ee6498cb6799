"""Imports in processes that are killed or interrupted, and the imports that resume them."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, Self

import pytest
import topicstore as ts
from click.testing import CliRunner
from topicstore.cli import cli
from topicstore.cli.demo.fleet import fleet
from topicstore.files.formats import encode_lines
from topicstore_conformance.faults.threads import PATIENCE

pytestmark = pytest.mark.slow

MESSAGES = 6_000
BATCH = 100
SHARDS = (1, 4)


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("source") / "fleet.jsonl"
    path.write_bytes(b"".join(map(encode_lines, fleet(MESSAGES))))
    return path


WAITING = """
import os, sys
import topicstore
from topicstore.cli import main

store = topicstore.Database.store
report_to, answers = map(int, sys.argv[1:3])
rows = 0


def stored(*arguments, **named):
    global rows
    result = store(*arguments, **named)
    rows += result.count
    os.write(report_to, b"%d\\n" % rows)
    os.read(answers, 1)
    return result


topicstore.Database.store = stored
sys.argv[1:] = sys.argv[3:]
main()
"""


class Import:
    """An import in a process of its own that reports the number of stored rows after each batch, and then waits."""

    def __init__(self, db: Path, file: Path, *more: str, batch: int = BATCH) -> None:
        (reports, report_to), (answers, answer_to) = os.pipe(), os.pipe()
        self._reports, self._answer_to = os.fdopen(reports, "rb"), os.fdopen(answer_to, "wb", buffering=0)
        command = [sys.executable, "-c", WAITING, str(report_to), str(answers)]
        self.process = subprocess.Popen(
            [*command, "import", str(db), str(file), "--batch-size", str(batch), *more],
            pass_fds=[report_to, answers],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        os.close(report_to)
        os.close(answers)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.communicate()
        self._reports.close()
        self._answer_to.close()

    def reports(self) -> Iterator[int]:
        """Yield the numbers of stored rows that the process reports."""
        return (int(line) for line in self._reports if line.endswith(b"\n"))

    def let_on(self) -> None:
        """Let the process begin the next batch."""
        with suppress(BrokenPipeError):
            self._answer_to.write(b"\n")

    def end(self) -> tuple[int, str, str]:
        """Let the process run to its end; return the exit code, standard output and standard error."""
        self._answer_to.close()
        out, error = self.process.communicate()
        return self.process.returncode, out, error


def rows(db: Path) -> list[list[ts.Message]]:
    """Verify a database; return its messages by shard."""
    with ts.open(db, mode="r+") as opened:
        report = opened.verify()
        assert (report.damages, report.messages) == ([], opened.info().messages)
        found: list[list[ts.Message]] = [[] for _ in range(opened.manifest.shards)]
        for batch in opened.replay_arrow("#", order="time", ids=True):
            for shard in set(batch["shard"].to_pylist()):
                mine = batch.filter([one == shard for one in batch["shard"].to_pylist()])
                found[shard] += ts.MessageBatch.from_arrow(mine).to_messages()
    return found


@pytest.fixture(scope="module")
def clean(tmp_path_factory: pytest.TempPathFactory, file: Path) -> dict[int, list[list[ts.Message]]]:
    """Return, for each number of shards, the messages by shard that an uninterrupted import stores."""
    found = {}
    for shards in SHARDS:
        path = tmp_path_factory.mktemp("clean") / "db"
        assert 0 == CliRunner().invoke(cli, ["import", str(path), str(file), "--shards", str(shards)]).exit_code
        found[shards] = rows(path)
    return found


IMPORTING = """
import topicstore as ts
from topicstore.cli import cli
*how, reports = map(str, arguments)
counts(RocksdbEngine, "write")
report_to = os.open(reports, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
store = ts.Database.store


def stored(*arguments, **named):
    result = store(*arguments, **named)
    os.write(report_to, b"%d\\n" % result.count)
    return result


ts.Database.store = stored
cli(["import", *how])
"""


@pytest.mark.parametrize("shards", SHARDS)
def test_killed_again_and_again_it_ends_like_one_that_was_not(
    tmp_path: Path, file: Path, shards: int, clean: dict[int, list[list[ts.Message]]], run_until: Callable[..., object]
) -> None:
    """Whichever writes SIGKILL interrupts, no reported row is lost, and none is stored twice."""
    chance, safe = random.Random(shards), 0
    db, reports = tmp_path / "db", tmp_path / "reports"
    how = (db, file, "--batch-size", BATCH, "--shards", shards, reports)
    for moment in ("before", "within", "after", "within"):
        run_until((chance.randrange(5 * shards, 12 * shards), moment), IMPORTING, *how)
        before, safe = safe, sum(map(int, reports.read_text().splitlines()))
        assert before < safe < MESSAGES
        with ts.open(db, mode="r+") as opened:
            assert safe <= opened.info().messages < MESSAGES
    assert CliRunner().invoke(cli, ["import", *map(str, how[:-1])]).exit_code == 0
    assert rows(db) == clean[shards]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_import_ends_cleanly_and_prints_how_to_resume(
    tmp_path: Path, file: Path, clean: dict[int, list[list[ts.Message]]], number: int
) -> None:
    """An interrupted import prints the number of stored rows: the reported ones, and at most one further batch."""
    with Import(tmp_path / "db", file, "--shards", "4") as child:
        for safe in child.reports():
            child.let_on()
            if safe == 10 * BATCH:
                child.process.send_signal(number)
        code, out, error = child.end()
    assert (code, out) == (130, "")
    stored = sum(map(len, rows(tmp_path / "db")))
    assert stored in (safe, safe + BATCH)
    assert safe in (10 * BATCH, 11 * BATCH)
    assert error == f"error: interrupted; {stored:,} rows of {file} are stored; the same command goes on from there\n"
    with Import(tmp_path / "db", file) as child:
        code, out, error = child.end()
    assert (code, error) == (0, "")
    assert f"went on after row {stored:,}" in out
    assert rows(tmp_path / "db") == clean[4]


def test_an_interrupt_in_the_middle_of_a_batch_waits_for_its_end(
    tmp_path: Path, file: Path, clean: dict[int, list[list[ts.Message]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """An interrupt during a batch takes effect after it was stored, and the next import resumes there."""
    store = ts.Database.store

    def interrupted(*arguments: Any, **named: Any) -> ts.StoreResult:
        signal.raise_signal(signal.SIGINT)
        return store(*arguments, **named)

    command = ["import", str(tmp_path / "db"), str(file), "--batch-size", str(BATCH)]
    with monkeypatch.context() as within:
        within.setattr(ts.Database, "store", interrupted)
        done = CliRunner().invoke(cli, command)
    assert 130 == done.exit_code
    assert f"{BATCH} rows of {file} are stored" in done.stderr
    assert [BATCH] == list(map(len, rows(tmp_path / "db")))
    assert 0 == CliRunner().invoke(cli, command).exit_code
    assert clean[1] == rows(tmp_path / "db")


def test_interrupted_while_it_waits_for_more(tmp_path: Path, file: Path) -> None:
    """Ctrl-C ends an import that waits for standard input."""
    with Import(tmp_path / "db", Path("-"), batch=10) as child:
        assert child.process.stdin is not None
        child.process.stdin.writelines(file.read_text().splitlines(keepends=True)[:25])
        child.process.stdin.flush()
        reports = child.reports()
        for safe in (10, 20, 25):  # at 25, the last five rows are stored although their batch isn't full
            assert safe == next(reports)
            child.let_on()
        child.process.send_signal(signal.SIGINT)
        assert 130 == child.process.wait(PATIENCE)
        assert child.process.stderr is not None
        error = child.process.stderr.read()
    assert "25 rows of standard input are stored" in error
    assert "--source" in error
    assert [25] == list(map(len, rows(tmp_path / "db")))
