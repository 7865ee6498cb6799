"""A worker: the process in which a single contender is measured.

``python -m topicstore_benchmarks.harness.worker`` reads lines of JSON from standard input: a `WorkerPlan`, and then
names of phases (of `results.phases`, or `WORKER`). It answers each with a `Reply` as a line on standard output; the
first reply reports that it is ready. It ends at the end of its input, or when its parent process ends. The contender's
output goes to standard error unbuffered, so that none is lost if the process crashes.

Engines may use all cores and threads, because only one worker works at a time. The worker's memory includes Python and
a part of the messages, which ``memory_before`` measures before the contender is opened.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import shutil
import signal
import sys
import time
import traceback
from pathlib import Path
from typing import IO, Any, Literal

import msgspec

from topicstore_benchmarks.contenders.catalogue import ContenderSpec
from topicstore_benchmarks.contenders.contender import Contender, Durability
from topicstore_benchmarks.results import WORKER

from .dataset import Dataset, WrongReplayError
from .hardware import peak_memory
from .phases import PhaseResult, Phases, Skipped
from .plan import Settings

__all__ = ["READY", "WRONG", "Reply", "WorkerPlan"]

READY = "ready"
"""The phase of the first reply."""
WRONG = "wrong replay"
"""The beginning of the reason if a replay returned other messages than the stored ones."""

_PR_SET_PDEATHSIG = 1


class WorkerPlan(msgspec.Struct, frozen=True, kw_only=True):
    """The contender, data set and settings that a worker measures."""

    contender: ContenderSpec
    path: str
    """The directory for the contender's files, which doesn't exist yet."""
    durability: Durability
    data: str
    """The directory of the data set."""
    settings: Settings


class Reply(msgspec.Struct, frozen=True, kw_only=True):
    """A worker's reply: the result of a phase."""

    phase: str
    status: Literal["ok", "skipped", "failed"]
    reason: str | None = None
    values: dict[str, float] = {}
    messages: int = 0
    started: float
    """The start of the phase, in seconds since the epoch."""
    versions: dict[str, str] = {}
    settings: dict[str, Any] = {}


class _Worker:
    def __init__(self, plan: WorkerPlan) -> None:
        data = Dataset.load(Path(plan.data))
        data.chunk(0)
        self._memory_before = peak_memory()
        Path(plan.path).parent.mkdir(parents=True, exist_ok=True)
        self._contender: Contender = plan.contender.make(Path(plan.path), plan.durability)
        self._phases = Phases(self._contender, data, plan.settings)

    def run(self, phase: str) -> Reply:
        """Run a phase, and return its result or failure."""
        started = time.time()
        try:
            if phase == WORKER:
                values = {"peak_memory": float(peak_memory()), "memory_before": float(self._memory_before)}
                measured = PhaseResult(values, 0)
            else:
                measured = self._phases.run(phase)
        except Skipped as why:
            return Reply(phase=phase, status="skipped", reason=str(why), started=started)
        except Exception as error:  # noqa: BLE001 - whatever a contender raises is its result
            with contextlib.suppress(OSError):  # such as a full disk, which the reply reports
                traceback.print_exc()
            kind = WRONG if isinstance(error, WrongReplayError) else type(error).__name__
            return Reply(phase=phase, status="failed", reason=f"{kind}: {error}", started=started)
        return Reply(
            phase=phase,
            status="ok",
            values=measured.values,
            messages=measured.messages,
            started=started,
            versions=dict(self._contender.versions()),
            settings=dict(self._contender.settings()),
        )

    def close(self) -> None:
        """Close the contender."""
        self._contender.close()


def _end_with_parent() -> None:
    """Ask the kernel to kill this process when its parent ends; only Linux supports this."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _answer(stream: IO[bytes], reply: Reply) -> None:
    stream.write(msgspec.json.encode(reply) + b"\n")
    stream.flush()


def main() -> None:
    """Run a worker: read a plan and phases from standard input, and write replies to standard output."""
    parent = os.getppid()
    _end_with_parent()
    if os.getppid() != parent:
        return
    replies = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    sys.stdout = sys.stderr
    plan = msgspec.json.decode(sys.stdin.buffer.readline(), type=WorkerPlan)
    worker = _Worker(plan)
    _answer(replies, Reply(phase=READY, status="ok", started=time.time()))
    for line in sys.stdin.buffer:
        _answer(replies, worker.run(msgspec.json.decode(line, type=str)))
    worker.close()
    shutil.rmtree(plan.path, ignore_errors=True)


if __name__ == "__main__":
    main()
