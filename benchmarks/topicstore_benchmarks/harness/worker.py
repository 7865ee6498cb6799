"""A worker: the process in which one contender is measured, with nothing else in it.

``python -m topicstore_benchmarks.harness.worker`` reads lines of JSON on its standard input, a `WorkerPlan` and then
the names of phases (of `results.phases`, or `WORKER`), and answers each with a line on its standard output: a `Reply`,
the first one when it is ready for phases. It ends when its input does, or with the process that started it. What a
contender prints goes to standard error at once, so that it is there however the process ends.

It doesn't restrict cores: engines may use all their threads, because only one worker works at a time.
Its memory is that of Python with a part of the messages, and of the contender: ``memory_before`` is the former,
measured before the contender was opened.
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
"""The beginning of the reason if a replay returned other messages than were stored."""

_PR_SET_PDEATHSIG = 1


class WorkerPlan(msgspec.Struct, frozen=True, kw_only=True):
    """What a worker is to measure."""

    contender: ContenderSpec
    path: str
    """The directory of the contender, which doesn't exist yet."""
    durability: Durability
    data: str
    """The directory of the messages."""
    settings: Settings


class Reply(msgspec.Struct, frozen=True, kw_only=True):
    """The result of a phase."""

    phase: str
    status: Literal["ok", "skipped", "failed"]
    reason: str | None = None
    values: dict[str, float] = {}
    messages: int = 0
    started: float
    """Seconds since the epoch."""
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
    """Ask the kernel to end this process with its parent, where that is possible."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _answer(stream: IO[bytes], reply: Reply) -> None:
    stream.write(msgspec.json.encode(reply) + b"\n")
    stream.flush()


def main() -> None:
    """Run a worker."""
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
