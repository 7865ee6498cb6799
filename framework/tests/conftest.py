"""Processes that are killed on purpose: at a step that is counted, never when a clock says so."""

from __future__ import annotations

import multiprocessing
import signal
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from typing import Any

import pytest
from topicstore_conformance.threads import PATIENCE

PROCESSES = multiprocessing.get_context("forkserver")
PROCESSES.set_forkserver_preload(
    [
        "hypothesis.stateful",
        "pytest",
        "topicstore.cli.app",
        "topicstore.sessions",
        "topicstore.tiering.exporting",
        "topicstore_backends.rocksdb",
        "topicstore_conformance.profiles",
        "topicstore_layouts.block.layout",
    ]
)  # imported once by the server; children begin within milliseconds

CHILD = """
import os, signal, traceback
from itertools import count
from topicstore_backends.rocksdb import RocksdbEngine

step = count(1)

def die(*moment):
    if moment == death:
        os.kill(os.getpid(), signal.SIGKILL)

def counts(owner, name):
    function = getattr(owner, name)
    def counted(*arguments, **options):
        number = next(step)
        die(number, "before")
        try:
            return function(*arguments, **options)
        finally:
            die(number, "after")
    setattr(owner, name, counted)

def say(*words):
    connection.send(words)

try:
    exec(code)
except BaseException:
    say("failed", traceback.format_exc())
"""


def run_until(death: tuple[int, str] | None, code: str, *arguments: object) -> list[tuple[Any, ...]]:
    """Run code in a process that is killed just before or after one of its steps, counted from 1; None: it isn't.

    Steps are calls of what the code names by ``counts(owner, name)``, such as ``counts(RocksdbEngine, "write")``.
    It finds ``arguments``, and what it hands to ``say(...)`` is returned.
    """
    ours, theirs = PROCESSES.Pipe(duplex=False)
    names = {"code": code, "arguments": arguments, "death": death, "connection": theirs}
    child = PROCESSES.Process(target=exec, args=(CHILD, names))
    child.start()
    theirs.close()
    try:
        said = list(_received(ours))
        child.join(PATIENCE)
        failures = [words[1] for words in said if words[0] == "failed"]
        assert (failures, child.exitcode) == ([], 0 if death is None else -signal.SIGKILL)
    finally:
        child.kill()
        child.join()
        child.close()
        ours.close()
    return said


def _received(connection: Connection) -> Iterator[tuple[Any, ...]]:
    """Yield what a process says until it ends."""
    while connection.poll(PATIENCE):
        try:
            yield connection.recv()
        except EOFError:
            return
    pytest.fail(f"waited {PATIENCE:.0f} seconds for a process to say something or to end")


@pytest.fixture(name="run_until")
def _run_until() -> Callable[..., list[tuple[Any, ...]]]:
    return run_until
