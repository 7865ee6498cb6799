"""Trials: the measured values, the checks of replays, and the handling of contenders that fail."""

from __future__ import annotations

import math
import os
import select
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any

import msgspec
import pyarrow.parquet as pq
import pytest

pytest.importorskip("rocksdict", reason='needs rocksdict: pip install "topicstore[bench]"')

from topicstore_benchmarks.contenders.catalogue import ContenderSpec, catalogue
from topicstore_benchmarks.harness import trial as trials
from topicstore_benchmarks.harness.dataset import Dataset
from topicstore_benchmarks.harness.plan import Plan, Settings, Trial
from topicstore_benchmarks.harness.trial import Outcome, run_trial
from topicstore_benchmarks.harness.worker import Reply, WorkerPlan
from topicstore_benchmarks.results import SCHEMA, UNITS, WORKER, phases
from topicstore_conformance.conditions.skipping import need
from topicstore_conformance.faults.threads import PATIENCE, wait_until

Row = dict[str, Any]
Measure = Callable[..., tuple[Outcome, list[Row]]]

REPLAYS = ("replay all", "wildcard", "one device", "late start")
PHASES = phases(REPLAYS)
SETTINGS = Settings(batch=100, repeat=2, patience=1.0, mixed_seconds=0.2)


def faulty(name: str) -> ContenderSpec:
    return ContenderSpec(name=name.lower(), kind="peer", target=f"faulty_contenders:{name}")


@pytest.fixture
def measure(small: Dataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Measure:
    """A function that runs a trial of the given contenders, and returns its outcome and rows."""
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent), prepend=os.pathsep)
    monkeypatch.delenv("PYTHONUNBUFFERED", raising=False)

    def run(
        *specs: ContenderSpec,
        settings: Settings = SETTINGS,
        seconds: float = math.inf,
        progress: Callable[[str], None] = lambda _: None,
    ) -> tuple[Outcome, list[Row]]:
        plan = Plan(workloads=(), durabilities=("commit",), contenders=specs, repetitions=2, settings=settings)
        trial = Trial(workload="small", durability="commit", repetition=1)
        outcome = run_trial(trial, plan, small.directory, tmp_path, progress, seconds)
        assert [] == list((tmp_path / "scratch").iterdir())
        return outcome, pq.read_table(tmp_path / "trials" / f"{trial.name}.parquet", schema=SCHEMA).to_pylist()

    return run


def status(rows: list[Row], contender: str) -> dict[str, str]:
    """Return the status of each phase of a contender."""
    return {row["phase"]: row["status"] for row in rows if row["contender"] == contender}


def reasons(rows: list[Row], contender: str) -> dict[str, str]:
    return {row["phase"]: row["reason"] for row in rows if row["contender"] == contender and row["reason"]}


def test_what_is_measured(measure: Measure, small: Dataset) -> None:
    """A trial measures every phase with plausible values, and its rows name the workload and the units."""
    specs = catalogue()
    outcome, rows = measure(specs["rocksdb-block"], specs["sqlite"], specs["raw rocksdb"], specs["parquet"])
    assert () == outcome.failed
    assert {*PHASES, "worker"} == set(status(rows, "rocksdb-block"))
    assert {"ok"} == set(status(rows, "rocksdb-block").values())
    values = {(row["contender"], row["phase"], row["metric"]): row for row in rows}
    assert 0 < values["sqlite", "store", "messages_per_second"]["value"]
    for phase in REPLAYS:
        wanted = sum(answer.messages for answer in small.about.expected[phase])
        assert wanted == values["sqlite", phase, "messages_per_second"]["messages"]
        taken = values["sqlite", phase, "seconds"]["value"]
        assert values["sqlite", phase, "messages_per_second"]["value"] == pytest.approx(wanted / taken)
        assert 0 < values["sqlite", phase, "first_message_ms"]["value"] <= taken * 1_000
    assert 0 < values["sqlite", "mixed", "store_p50_ms"]["value"] <= values["sqlite", "mixed", "store_p99_ms"]["value"]
    assert 1_000 < values["sqlite", "store", "disk_bytes"]["value"]
    assert 10_000_000 < values["sqlite", "worker", "peak_memory"]["value"] < 10_000_000_000
    for row in rows:
        assert (small.about.messages, small.about.topics) == (row["workload_messages"], row["workload_topics"])
        assert row["status"] != "ok" or UNITS[row["metric"]] == row["unit"]


@pytest.mark.parametrize("name", [spec.name for spec in catalogue().values() if spec.kind == "limit"])
def test_limits_are_stored_and_scanned(name: str, measure: Measure) -> None:
    """A contender that is a bare engine or file runs only ``store`` and ``replay all``, with checked results."""
    limit = catalogue()[name]
    if limit.backend is not None:
        need(limit.backend)
    outcome, rows = measure(limit)
    assert () == outcome.failed
    found = status(rows, name)
    assert {"store", "replay all", "worker"} == {phase for phase, how in found.items() if how == "ok"}
    assert "it has no filters" == reasons(rows, name)["wildcard"]


def test_a_trial_without_time_was_not_measured(small: Dataset, tmp_path: Path) -> None:
    """A trial that begins after the time budget has run out writes no file, so a resumed run measures the trial."""
    specs = (catalogue()["sqlite"], catalogue()["parquet"])
    plan = Plan(workloads=(), durabilities=("commit",), contenders=specs, repetitions=1, settings=SETTINGS)
    trial = Trial(workload="small", durability="commit", repetition=1)
    outcome = run_trial(trial, plan, small.directory, tmp_path, lambda _: None, 0.0)
    assert ((), PHASES) == (outcome.failed, outcome.left_out)
    assert [] == [path for path in tmp_path.rglob("*") if path.is_file()]


def test_a_phase_that_time_ends_is_skipped_for_all(measure: Measure, monkeypatch: pytest.MonkeyPatch) -> None:
    """If the time budget runs out during a phase, all contenders skip the phase; earlier phases keep their values."""
    jumped = [0.0]
    monkeypatch.setattr(trials.time, "monotonic", lambda now=trials.time.monotonic: now() + jumped[0])
    answers = trials._answers

    def ends_in_the_second_turn_of_wildcard(output: IO[bytes], seconds: float) -> bool:
        answered = answers(output, seconds)
        if begun.count("wildcard") == 1:
            jumped[0] = 2 * PATIENCE
        return answered

    begun: list[str] = []
    monkeypatch.setattr(trials, "_answers", ends_in_the_second_turn_of_wildcard)
    outcome, rows = measure(
        catalogue()["sqlite"],
        catalogue()["rocksdb-block"],
        seconds=PATIENCE,
        progress=lambda text: begun.append(text.partition(": ")[2]),
    )
    assert () == outcome.failed
    assert PHASES[PHASES.index("wildcard") :] == outcome.left_out
    for name in ("sqlite", "rocksdb-block"):
        found = status(rows, name)
        assert {"store": "ok", "replay all": "ok"}.items() <= found.items()
        assert {"skipped"} == {found[phase] for phase in outcome.left_out}
        assert WORKER not in found


def test_contenders_begin_in_turn() -> None:
    """The second of two repetitions begins with the second of two contenders."""
    specs = (catalogue()["sqlite"], catalogue()["parquet"])
    trials = [Trial(workload="small", durability="commit", repetition=n) for n in (1, 2)]
    assert [specs, specs[::-1]] == [tuple(one.order(specs, 2)) for one in trials]


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("Losing", "gave 2,999 of 3,000 messages"),
        ("Reordering", "gave messages that were changed, or in another order"),
        ("Changing", "gave messages that were changed, or in another order"),
    ],
)
def test_a_wrong_replay_is_caught(name: str, says: str, measure: Measure) -> None:
    """A replay with lost, reordered or changed messages is reported as a failure and has no time."""
    outcome, rows = measure(faulty(name))
    reason = f"wrong replay: a replay of '#' from 0 {says}"
    assert reason == reasons(rows, name.lower())["replay all"]
    assert f"{name.lower()}, replay all: {reason}" in outcome.failed
    assert [row["metric"] for row in rows if row["phase"] == "replay all"] == ["status"]


def test_what_is_lost_while_reading_is_caught(measure: Measure) -> None:
    """Messages that are lost during the phase ``mixed`` are detected after it."""
    settings = Settings(batch=1_000, repeat=1, mixed_seconds=0.1)
    outcome, rows = measure(faulty("Forgetting"), settings=settings)
    assert ["mixed"] == [phase for phase, how in status(rows, "forgetting").items() if how == "failed"]
    assert reasons(rows, "forgetting")["mixed"].startswith("wrong replay: a replay of '#' from 0 gave ")
    assert 1 == len(outcome.failed)


def test_a_worker_that_dies_does_not_take_the_others_along(
    measure: Measure, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A crashed worker's row has its exit code and last output, its earlier values are kept, and others continue."""
    wait = subprocess.Popen.wait

    def let_end_and_wait(process: subprocess.Popen[bytes], timeout: float | None = None) -> int:
        for scratch in tmp_path.glob("scratch/*"):
            (scratch / "may end").touch()
        return wait(process, timeout)

    monkeypatch.setattr(subprocess.Popen, "wait", let_end_and_wait)
    outcome, rows = measure(faulty("Dying"), catalogue()["sqlite"])
    assert ("dying, wildcard: the process ended with 3: my last words",) == outcome.failed
    assert {"store": "ok", "replay all": "ok", "wildcard": "failed"} == status(rows, "dying")
    assert "the process ended with 3: my last words" == reasons(rows, "dying")["wildcard"]
    assert "failed" not in status(rows, "sqlite").values()


def test_a_worker_that_hangs_is_ended(measure: Measure, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker that doesn't reply within the phase timeout is killed, and its row says so."""
    limits: list[float] = []

    def there(output: IO[bytes]) -> bool:
        return select.select([output], [], [], 0)[0] != []

    def answers(output: IO[bytes], seconds: float) -> bool:
        limits.append(seconds)
        wait_until(lambda: there(output) or [*tmp_path.glob("scratch/*/hanging")], "an answer, or a worker that hangs")
        return there(output)

    monkeypatch.setattr(trials, "_answers", answers)
    outcome, rows = measure(faulty("Hanging"), settings=Settings(batch=1_000, phase_timeout=1_234.0))
    assert {"store": "ok", "replay all": "failed"} == status(rows, "hanging")
    assert "no answer within 1,234 s" == reasons(rows, "hanging")["replay all"]
    assert ("hanging, replay all: no answer within 1,234 s",) == outcome.failed
    assert {1_234.0} == set(limits)


def test_an_answer_is_waited_for() -> None:
    """Waiting for a reply times out, and ends early when the worker closes its output."""
    receiving, sending = os.pipe()
    with os.fdopen(receiving, "rb") as output:
        assert not trials._answers(output, 0.0)
        os.close(sending)
        assert trials._answers(output, PATIENCE)


def test_a_contender_that_stored_nothing_runs_no_further_phase(measure: Measure) -> None:
    """A contender whose ``store`` fails runs no further phase, and has one row with the reason."""
    _, rows = measure(faulty("Refusing"))
    assert [("store", "failed", "OSError: the disk is gone")] == [
        (row["phase"], row["status"], row["reason"]) for row in rows
    ]


def test_a_contender_that_can_not_be_made_has_a_row(measure: Measure) -> None:
    """A contender whose constructor raises has a row with the end of the traceback; others are measured."""
    _, rows = measure(faulty("Unmade"), catalogue()["parquet"])
    assert {"store": "failed"} == status(rows, "unmade")
    assert reasons(rows, "unmade")["store"].endswith("RuntimeError: no such luck")
    assert "ok" == status(rows, "parquet")["replay all"]


def test_what_one_can_not_do_is_skipped(measure: Measure) -> None:
    """Phases that a contender doesn't support are skipped with the reason."""
    _, rows = measure(faulty("Narrow"))
    assert {
        "wildcard": "it has no filters",
        "one device": "it has no filters",
        "late start": "it can't start at a time",
        "reopen": "it can't start at a time",
        "compact": "it has nothing to compact",
        **{f"{phase}, compacted": "it has nothing to compact" for phase in REPLAYS},
        "mixed": "it can't be read while it is written",
    } == reasons(rows, "narrow")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full, which Linux has")
def test_a_full_disk_is_reported(small: Dataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker reports a contender's failure even if its own log can't be written, because the disk is full."""
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent), prepend=os.pathsep)
    plan = WorkerPlan(
        contender=faulty("Refusing"),
        path=str(tmp_path / "files"),
        durability="commit",
        data=str(small.directory),
        settings=SETTINGS,
    )
    lines = b"\n".join(map(msgspec.json.encode, (plan, "store", WORKER)))
    with Path("/dev/full").open("wb") as full:
        worker = [sys.executable, "-m", "topicstore_benchmarks.harness.worker"]
        done = subprocess.run(worker, input=lines, stdout=subprocess.PIPE, stderr=full, timeout=PATIENCE)
    _ready, store, _worker = (msgspec.json.decode(line, type=Reply) for line in done.stdout.splitlines())
    assert ("failed", "OSError: the disk is gone") == (store.status, store.reason)
