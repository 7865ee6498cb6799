"""A trial: all contenders with one workload and one durability, each in a worker process; the workers take turns.

All workers are ready before the first begins. Each phase runs in all workers, one after the other, before the next
phase begins. The compared values are therefore measured shortly after each other, when the machine is equally fast for
all. The order changes from repetition to repetition.

A worker that ends, raises or takes too long has rows that report this, and the others continue. When the time of a
trial is over, the current phase counts for no worker. The rows of that phase and of later ones report that the phases
were left out.
"""

from __future__ import annotations

import contextlib
import datetime as dt
import math
import select
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO, Any

import attrs
import msgspec
import pyarrow as pa
import pyarrow.parquet as pq

from topicstore_benchmarks.contenders.catalogue import ContenderSpec
from topicstore_benchmarks.results import SCHEMA, STORE, UNITS, WORKER, phases
from topicstore_benchmarks.timing import Progress

from .dataset import Dataset
from .hardware import machine
from .plan import Plan, Trial
from .worker import WRONG, Reply, WorkerPlan

__all__ = ["LEFT_OUT", "SCRATCH", "WRONG", "Outcome", "run_trial", "skipped_row", "write_rows"]

Row = dict[str, Any]

SCRATCH = "scratch"
"""The subdirectory of a run for the contenders' files."""
LEFT_OUT = "the time for the run was over"
"""The reason in rows of phases that were left out for lack of time."""
_LAST_LINES = 5
_ENDING = 300.0
"""The seconds that a worker may take to close its contender."""


@attrs.frozen(kw_only=True)
class Outcome:
    """The outcome of a trial."""

    trial: str
    seconds: float
    failed: tuple[str, ...]
    """A line of text for each failure: contender, phase, reason."""
    left_out: tuple[str, ...]
    """The phases that were left out for lack of time."""

    def lines(self) -> Iterator[str]:
        """Yield the lines that report the outcome to the user."""
        yield f"{self.trial}: {self.seconds:.0f} s"
        yield from (f"    {line}" for line in self.failed)
        if self.left_out:
            yield f"{self.trial}: without {', '.join(self.left_out)}: {LEFT_OUT}"


class _WorkerProcess:
    """A worker, as seen by the process that controls it."""

    def __init__(self, plan: WorkerPlan, log: Path, deadline: float) -> None:
        self.spec = plan.contender
        self._deadline = deadline
        self._timeout = plan.settings.phase_timeout
        self._log = log
        self.versions: dict[str, str] = {}
        self.settings: dict[str, Any] = {}
        self.over = False
        """Whether the worker runs no further phases."""
        with log.open("wb") as errors:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "topicstore_benchmarks.harness.worker"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
            )
        assert self._process.stdin is not None  # noqa: S101 - both are pipes
        assert self._process.stdout is not None  # noqa: S101
        self._input, self._output = self._process.stdin, self._process.stdout
        self._say(plan)

    def _say(self, line: WorkerPlan | str) -> None:
        with contextlib.suppress(BrokenPipeError):  # the worker has ended; reading its reply reports that
            self._input.write(msgspec.json.encode(line) + b"\n")
            self._input.flush()

    def ready(self) -> Reply:
        """Wait until the worker is ready; a failure counts as one of the first phase."""
        return self._reply(STORE)

    def run(self, phase: str) -> Reply:
        """Run a phase, and return the worker's reply."""
        self._say(phase)
        reply = self._reply(phase)
        self.versions = reply.versions or self.versions
        self.settings = reply.settings or self.settings
        if reply.status == "failed" and phase == STORE:
            self.over = True
        return reply

    def _reply(self, phase: str) -> Reply:
        """Return the worker's reply. If no reply comes in time, kill the worker and return a reply that says so."""
        output, started = self._output, time.time()
        left = math.inf if phase == WORKER else self._deadline - time.monotonic()
        if _answers(output, max(0.0, min(self._timeout, left))):
            line = output.readline()
            if line.endswith(b"\n"):
                return msgspec.json.decode(line, type=Reply)
            reason = self._last_words()
        elif left <= self._timeout:
            self._kill()
            return _left_out(phase)
        else:
            reason = f"no answer within {self._timeout:,.0f} s"
        self._kill()
        return Reply(phase=phase, status="failed", reason=reason, started=started)

    def _last_words(self) -> str:
        """Return why no reply comes, from the log and the exit code of the ended process."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_ENDING)
        code = self._process.poll()
        ended = "the process closed its output" if code is None else f"the process ended with {code}"
        lines = self._log.read_text(errors="replace").split("\n")
        return f"{ended}: " + "\n".join([line for line in lines if line.strip()][-_LAST_LINES:])

    def _kill(self) -> None:
        self.over = True
        self._process.kill()
        self._process.wait()

    def close(self) -> None:
        """Close the worker's input, so that the worker closes its contender and ends."""
        with contextlib.suppress(BrokenPipeError):
            self._input.close()

    def end(self) -> None:
        """Wait for the end of the process, and kill it if it takes too long."""
        try:
            self._process.wait(_ENDING)
        except subprocess.TimeoutExpired:
            self._kill()
        self._output.close()


def _answers(output: IO[bytes], seconds: float) -> bool:
    """Wait until a reply or the end of the output can be read; return whether that came within ``seconds``."""
    readable, _, _ = select.select([output], [], [], seconds)
    return bool(readable)


def run_trial(
    trial: Trial, plan: Plan, data: Path, directory: Path, progress: Progress, seconds: float = math.inf
) -> Outcome:
    """Measure a trial within ``seconds``, and write its file by rename; ``directory`` is that of the run.

    No file is written if there was no time for any phase.
    """
    started = time.monotonic()
    deadline = started + seconds
    about = Dataset.load(data)
    order = phases(about.about.expected, mixed=plan.settings.mixed_seconds > 0)
    (directory / SCRATCH).mkdir(exist_ok=True)
    scratch = Path(tempfile.mkdtemp(dir=directory / SCRATCH, prefix=f"{trial.name}-"))
    workers: list[_WorkerProcess] = []
    try:
        for number, spec in enumerate(trial.order(plan.contenders, plan.repetitions)):
            place = scratch / f"{number:02}"
            worker_plan = WorkerPlan(
                contender=spec,
                path=str(place),
                durability=trial.durability,
                data=str(data),
                settings=plan.settings,
            )
            workers.append(_WorkerProcess(worker_plan, place.with_suffix(".log"), deadline))
        replies = list(_take_turns(workers, order, deadline, lambda text: progress(f"{trial.name}: {text}")))
    finally:
        for worker in workers:
            worker.close()
        for worker in workers:
            worker.end()
        shutil.rmtree(scratch, ignore_errors=True)
    rows = [row for worker, reply in replies for row in _rows(worker, reply, trial, about, directory.name)]
    if any(reply.reason != LEFT_OUT for _, reply in replies):
        write_rows(rows, directory / "trials" / f"{trial.name}.parquet")
    return Outcome(
        trial=trial.name,
        seconds=time.monotonic() - started,
        failed=tuple(
            f"{worker.spec.name}, {reply.phase}: {reply.reason}"
            for worker, reply in replies
            if reply.status == "failed"
        ),
        left_out=tuple(dict.fromkeys(reply.phase for _, reply in replies if reply.reason == LEFT_OUT)),
    )


def _take_turns(
    workers: Sequence[_WorkerProcess], order: Sequence[str], deadline: float, progress: Progress
) -> Iterator[tuple[_WorkerProcess, Reply]]:
    able = []
    for worker in workers:
        reply = worker.ready()
        if reply.status == "failed":
            yield worker, reply
        else:
            able.append(worker)
    for number, phase in enumerate(order if able else ()):
        replies = [(worker, _left_out(phase)) for worker in able]
        if time.monotonic() < deadline:
            progress(phase)
            replies = [(worker, worker.run(phase)) for worker in able]
        if any(reply.reason == LEFT_OUT for _, reply in replies):
            # If one contender had no time for the phase, results of the others would not be comparable.
            yield from ((one, reply if reply.status == "failed" else _left_out(phase)) for one, reply in replies)
            yield from ((worker, _left_out(name)) for name in order[number + 1 :] for worker in able)
            return
        yield from replies
        able = [worker for worker in able if not worker.over]
    for worker in able:
        yield worker, worker.run(WORKER)


def _left_out(phase: str) -> Reply:
    return Reply(phase=phase, status="skipped", reason=LEFT_OUT, started=time.time())


# --- rows ---


def _rows(worker: _WorkerProcess, reply: Reply, trial: Trial, data: Dataset, run: str) -> Iterator[Row]:
    base = _base(worker.spec, trial, data, run, reply)
    base |= {"versions": _json(worker.versions), "settings": _json(worker.settings)}
    if reply.status != "ok":
        yield base
    for metric, value in reply.values.items():
        yield base | {"metric": metric, "value": value, "unit": UNITS[metric]}


def _base(spec: ContenderSpec, trial: Trial, data: Dataset, run: str, reply: Reply) -> Row:
    return {
        "run": run,
        "trial": trial.name,
        "contender": spec.name,
        "kind": spec.kind,
        "backend": spec.backend,
        "layout": spec.layout,
        "durability": trial.durability,
        "workload": trial.workload,
        "workload_messages": data.about.messages,
        "workload_topics": data.about.topics,
        "workload_bytes": data.about.bytes,
        "repetition": trial.repetition,
        "machine": _json(machine()),
        "phase": reply.phase,
        "messages": reply.messages,
        "started": dt.datetime.fromtimestamp(reply.started, dt.UTC),
        "versions": "{}",
        "settings": "{}",
        "metric": "status",
        "unit": "",
        "status": reply.status,
        "reason": reply.reason,
    }


def skipped_row(spec: ContenderSpec, reason: str, trial: Trial, data: Dataset, run: str) -> Row:
    """Return the row, with repetition 0, of a contender that is skipped in all repetitions of a trial."""
    reply = Reply(phase=WORKER, status="skipped", reason=reason, started=time.time())
    return _base(spec, msgspec.structs.replace(trial, repetition=0), data, run, reply)


def _json(value: Any) -> str:
    return msgspec.json.encode(value, order="sorted").decode()


def write_rows(rows: list[Row], path: Path) -> None:
    """Write rows to a Parquet file by rename, so that the file is complete or absent."""
    path.parent.mkdir(exist_ok=True)
    making = path.with_name(f".{path.name}")
    pq.write_table(pa.Table.from_pylist(rows, schema=SCHEMA), making)
    making.rename(path)
