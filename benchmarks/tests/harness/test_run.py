"""``topicstore bench`` as a program: whole runs with Spark, also interrupted and resumed ones."""

from __future__ import annotations

import math
import os
import signal
import statistics
import subprocess
import sys
from pathlib import Path

import msgspec
import pyarrow.parquet as pq
import pytest
from click.testing import CliRunner, Result

pytest.importorskip("rocksdict", reason='needs rocksdict: pip install "topicstore[bench]"')
pytest.importorskip("pyspark", reason='needs pyspark: pip install "topicstore[spark]"')

from topicstore.cli import cli
from topicstore.storage.directory.directory_lock import DirectoryLock
from topicstore_benchmarks.contenders.catalogue import ContenderSpec, catalogue
from topicstore_benchmarks.harness.choosing import RunOptions, new_run
from topicstore_benchmarks.harness.drive import begin, share
from topicstore_benchmarks.harness.plan import Plan, Run, Settings, Trial
from topicstore_benchmarks.results import SCHEMA
from topicstore_benchmarks.workloads.definition import read
from topicstore_conformance.faults.threads import PATIENCE

pytestmark = pytest.mark.slow

TESTS = Path(__file__).parent
SMALL = ("--messages", "1500", "--set", "mixed_seconds=0.1", "--durability", "commit")


def command(*arguments: object) -> list[str]:
    return [sys.executable, "-m", "topicstore.cli", "bench", *map(str, arguments)]


def bench(*arguments: object) -> subprocess.CompletedProcess[str]:
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(TESTS), *filter(None, [os.environ.get("PYTHONPATH")])]),
        "MASTER": "local[2]",
    }
    return subprocess.run(command(*arguments), env=environment, capture_output=True, text=True, timeout=PATIENCE)


def asked(*arguments: object) -> Result:
    """Run a command that measures nothing, in this process, because its imports are already loaded."""
    return CliRunner().invoke(cli, ["bench", *map(str, arguments)])


def times(directory: Path) -> dict[str, int]:
    """Return the modification times of the trials' files, by name."""
    return {path.name: path.stat().st_mtime_ns for path in (directory / "trials").glob("small-*.parquet")}


def test_a_killed_run_can_be_resumed(small_toml: Path, tmp_path: Path) -> None:
    """A killed run can be resumed: only the missing trials are measured, and no temporary file is left."""
    directory = tmp_path / "run"
    options = ("--workload", small_toml, "--contender", "sqlite", "--contender", "rocksdb-block", *SMALL)
    first = subprocess.Popen(
        command("run", directory, *options, "--repetitions", "2"), stderr=subprocess.PIPE, env=os.environ, text=True
    )
    assert first.stderr is not None
    with first.stderr as lines:
        for line in lines:
            if "trial 2 of 2" in line:
                first.send_signal(signal.SIGKILL)  # the output ends when Spark's processes have ended, too
    assert -signal.SIGKILL == first.wait(PATIENCE)
    before = times(directory)
    assert "small-commit-1.parquet" in before

    done = bench("run", directory)
    assert (0, f"{directory / 'report.html'}\n") == (done.returncode, done.stdout), done.stderr
    assert "trial 1 of 1: small-commit-2" in done.stderr
    after = times(directory)
    assert before["small-commit-1.parquet"] == after["small-commit-1.parquet"]
    assert {f"small-commit-{n}.parquet" for n in (1, 2)} == set(after)
    assert not list(directory.glob("scratch/*"))
    results = pq.read_table(directory / "results.parquet")
    assert SCHEMA == results.schema
    assert {1, 2} == set(results["repetition"].to_pylist())
    assert {"ok", "skipped"} == set(results["status"].to_pylist())
    assert {"rocksdb-block", "sqlite"} == set(results["contender"].to_pylist())
    for row in pq.read_table(directory / "summary.parquet").to_pylist():
        values = dict(row["by_trial"])
        assert (2, statistics.median(values.values())) == (row["trials"], pytest.approx(row["median"]))
        assert (row["least"], row["most"]) == (min(values.values()), max(values.values()))

    again = asked("run", directory)
    assert (0, after) == (again.exit_code, times(directory)), again.stderr


def test_what_does_not_fit_into_the_budget_is_left_out(small_toml: Path, tmp_path: Path) -> None:
    """Trials that exceed the time budget are omitted and reported as omitted; a run without any value has no report."""
    options = ("--workload", small_toml, "--contender", "sqlite", *SMALL, "--repetitions", "2", "--set", "budget=0.001")
    done = bench("run", tmp_path / "run", *options)
    assert (1, "") == (done.returncode, done.stdout), done.stderr
    assert done.stderr.endswith(f"error: {tmp_path / 'run'} holds no measured value to report on\n")
    assert "2 trials are left out: the time for the run was over" in done.stderr
    assert {} == times(tmp_path / "run")


def test_each_workload_has_time_before_any_is_repeated() -> None:
    """Trials of the first repetition share the remaining time equally; each later trial may use all of it."""
    first, second = (
        [Trial(workload=name, durability="commit", repetition=number) for name in ("a", "b")] for number in (1, 2)
    )
    assert 120.0 == share(240.0, [*first, *second])
    assert 180.0 == share(180.0, [first[1], *second])
    assert 10.0 == share(10.0, second)
    assert math.inf == share(math.inf, second)


def test_a_quick_run_has_a_budget_within_five_minutes() -> None:
    """A quick run has a time budget of less than five minutes, and a full run has none."""
    quick, whole = (
        new_run("run", [], RunOptions(preset=one, contenders=("sqlite",))).plan.settings for one in ("quick", "full")
    )
    assert quick.budget is not None
    assert quick.budget < 300
    assert whole.budget is None


def prepared(directory: Path, small_toml: Path, contender: str) -> Path:
    """Write the plan of a run with a faulty contender and one that doesn't support the run's durability."""
    faulty = ContenderSpec(name="faulty", kind="peer", target=f"faulty_contenders:{contender}")
    plan = Plan(
        workloads=(read(str(small_toml)).limited(1_500),),
        durabilities=("sync",),
        contenders=(faulty, catalogue()["parquet"]),
        repetitions=1,
        settings=Settings(mixed_seconds=0.1),
    )
    run = new_run("run", [], RunOptions(workloads=(str(small_toml),), contenders=("sqlite",)))
    msgspec.structs.replace(run, plan=plan).save(directory)
    return directory


def test_another_run_in_the_same_directory_is_refused(small_toml: Path, tmp_path: Path) -> None:
    """A run with another plan in the same directory is rejected with the differences, and the old run is kept."""
    before = (prepared(tmp_path, small_toml, "Losing") / "run.json").read_bytes()
    (tmp_path / "trials").mkdir()
    (tmp_path / "trials" / "small-sync-1.parquet").touch()
    done = asked("run", tmp_path, "--workload", small_toml, "--contender", "sqlite", *SMALL)
    assert 2 == done.exit_code
    assert f"error: {tmp_path} has another run: durabilities, contenders, repetitions differ" in done.stderr
    assert before == (tmp_path / "run.json").read_bytes()


def test_a_run_that_measured_nothing_gives_way(small_toml: Path, tmp_path: Path) -> None:
    """A run without measured trials can be replaced by another plan; the same plan continues the run."""
    there = prepared(tmp_path, small_toml, "Losing")
    run = new_run("run", [], RunOptions(workloads=(str(small_toml),), contenders=("sqlite",)))
    assert run == begin(there, run) == Run.load(there)
    assert run == begin(there, msgspec.structs.replace(run, created="later"))


def test_two_do_not_measure_in_the_same_directory(small_toml: Path, tmp_path: Path) -> None:
    """A run in a directory that another process has locked ends with an error that names that process."""
    lock = DirectoryLock(prepared(tmp_path, small_toml, "Losing"))
    done = bench("run", tmp_path)
    lock.release()
    assert 4 == done.returncode
    assert f"error: {tmp_path} is open elsewhere: process {os.getpid()} on " in done.stderr


def test_a_wrong_replay_is_reported_loudly(small_toml: Path, tmp_path: Path) -> None:
    """A wrong replay is reported on standard error, in the results and by the exit code."""
    done = bench("run", prepared(tmp_path, small_toml, "Losing"))
    assert 1 == done.returncode, done.stderr
    assert "failed: small-sync-1, faulty, replay all: wrong replay: a replay of '#' from 0 gave 1,499 of" in done.stderr
    assert "WRONG: a replay gave other messages than were stored" in done.stderr
    rows = pq.read_table(tmp_path / "results.parquet").to_pylist()
    assert ["it has no durability 'sync'"] == [row["reason"] for row in rows if row["contender"] == "parquet"]
    assert "replay all" in {row["phase"] for row in rows if row["status"] == "failed"}
    assert done.returncode == bench("run", tmp_path).returncode


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--request", "wildcard=#"], "requests go with messages of your own"),
        (["--data", __file__, "--request", "#"], "'#' is not NAME=FILTER"),
        (["--data", __file__, "--request", "store=#"], "'requests' has 'store', which is a phase of its own"),
        (["--data", __file__, "--request", "mine=a/#/b"], "filter 'a/#/b': '#' must be alone in the last level"),
        (["--workload", "nope"], "'nope' is neither a workload nor a TOML file"),
        (["--contender", "rocksdb-*", "--contender", "mars-*"], "there is no contender 'mars-*'; there are: duckdb-"),
        (["--set", "speed=9"], "there is no setting 'speed'; there are: batch, budget, "),
        (["--set", "batch=0"], "settings: Expected `int` >= 1 - at `$.batch`"),
        (["--set", "mixed_seconds=-1"], "settings: Expected `float` >= 0.0 - at `$.mixed_seconds`"),
        (["--set", "budget=inf"], "settings: Expected `float` "),
        (
            ["--workload", "fleet", "--contender", "parquet", "--durability", "sync"],
            "there is nothing to measure: parquet: it has no durability 'sync'",
        ),
        (["--data", __file__], f"error: {__file__}: Parquet magic bytes not found"),
    ],
)
def test_what_can_not_be_measured_is_refused(arguments: list[str], says: str, tmp_path: Path) -> None:
    """Invalid options are rejected before anything is written, with the reason or the valid choices."""
    done = asked("run", tmp_path / "run", *arguments)
    assert 2 == done.exit_code
    assert says in done.stderr
    assert not (tmp_path / "run").exists()


def test_there_is_no_report_without_a_run(tmp_path: Path) -> None:
    """A report of a directory without a run is rejected with the reason."""
    done = asked("report", tmp_path)
    assert (2, f"error: there is no run in {tmp_path}") == (done.exit_code, done.stderr.partition(" (see")[0])


def test_there_is_no_report_before_anything_was_measured(small_toml: Path, tmp_path: Path) -> None:
    """A report of a run without measured values is rejected with the reason in one line."""
    pytest.importorskip("altair", reason='needs altair: pip install "topicstore[bench]"')
    done = asked("report", prepared(tmp_path, small_toml, "Losing"))
    assert (1, f"error: {tmp_path} holds no measured value to report on\n") == (done.exit_code, done.stderr)


def test_workloads_and_contenders_are_listed() -> None:
    """``topicstore bench list`` lists the workloads and the contenders."""
    listed = asked("list").stdout
    assert all(name in listed for name in ("fleet", "rocksdb-block", "sqlite"))
