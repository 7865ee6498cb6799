"""Processes that are killed on purpose: at a step that is counted, never when a clock says so."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable
from typing import Any

import pytest
from topicstore_conformance.faults.killing import ENDS, received
from topicstore_conformance.faults.threads import PATIENCE

PROCESSES = multiprocessing.get_context("forkserver")
PROCESSES.set_forkserver_preload(
    [
        "hypothesis.stateful",
        "pytest",
        "topicstore.cli.app",
        "topicstore.sessions",
        "topicstore.lifecycle.exporting",
        "topicstore_backends.rocksdb",
        "topicstore_conformance.conditions.profiles",
        "topicstore_layouts.block.layout",
    ]
)  # imported once by the server; children begin within milliseconds

CHILD = """
import os, traceback
from itertools import count
from topicstore_backends.rocksdb import RocksdbEngine
from topicstore_conformance.faults.killing import Countdown, moment_of

countdown = Countdown(-1 if death is None else moment_of(*death))
countdown.start()

def counts(owner, name, *which):
    setattr(owner, name, countdown.counted(getattr(owner, name), *which))

def say(*words):
    connection.send(words)

try:
    exec(code)
except BaseException:
    say("failed", traceback.format_exc())
"""


def run_until(death: tuple[int, str] | None, code: str, *arguments: object) -> list[tuple[Any, ...]]:
    """Run code in a process that is killed before, within or after one of its steps, counted from 1; None: it isn't.

    Steps are calls of what the code names by ``counts(owner, name)``, such as ``counts(RocksdbEngine, "write")``, or
    with a function more, those calls for which it is true. The code finds ``arguments``, and what it hands to
    ``say(...)`` is returned.
    """
    ours, theirs = PROCESSES.Pipe(duplex=False)
    names = {"code": code, "arguments": arguments, "death": death, "connection": theirs}
    child = PROCESSES.Process(target=exec, args=(CHILD, names))
    child.start()
    theirs.close()
    try:
        said = list(received(ours, ours.recv))
        child.join(PATIENCE)
        failures = [words[1] for words in said if words[0] == "failed"]
        assert failures == []
        assert child.exitcode in ((0,) if death is None else ENDS)
    finally:
        child.kill()
        child.join()
        child.close()
        ours.close()
    return said


@pytest.fixture(name="run_until")
def _run_until() -> Callable[..., list[tuple[Any, ...]]]:
    return run_until
