"""Processes that are killed at a counted step, never after a time; sites in processes; a plugin for payloads."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from typing import Any

import attrs
import pytest
import topicstore as ts
from topicstore.contract.requests import ReadResult, StoreRequest, StoreResult
from topicstore.plugins import registry
from topicstore_conformance.faults.killing import ENDS, received
from topicstore_conformance.faults.threads import PATIENCE
from topicstore_conformance.replication.site_processes import Processes

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
)  # imported once by the fork server, so that children start within milliseconds

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
    """Run code in a process that is killed before, within or after a step, counted from 1; with None it isn't killed.

    Steps are calls that the code registers by ``counts(owner, name)``, such as ``counts(RocksdbEngine, "write")``. With
    a predicate as third argument, only calls for which it returns true count. The code can use ``arguments``, and what
    it passes to ``say(...)`` is returned.
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


class _Reversing:
    @ts.hookimpl(wrapper=True)
    def topicstore_store(self, request: StoreRequest) -> Generator[None, StoreResult, StoreResult]:
        request.batch = _reversed(request.batch)
        return (yield)

    @ts.hookimpl(wrapper=True)
    def topicstore_read(self, request: object) -> Generator[None, ReadResult, ReadResult]:
        result = yield
        return attrs.evolve(result, batch=_reversed(result.batch))


def _reversed(batch: ts.MessageBatch) -> ts.MessageBatch:
    return batch.replace(payloads=[bytes(payload)[::-1] for payload in batch.payloads])


@pytest.fixture
def reversing(monkeypatch: pytest.MonkeyPatch) -> str:
    """Return the name of a plugin that stores payloads reversed, and returns them in their original order."""
    monkeypatch.setitem(registry().plugins, "reversing", _Reversing())
    return "reversing"


@pytest.fixture(name="run_until")
def _run_until() -> Callable[..., list[tuple[Any, ...]]]:
    return run_until


@pytest.fixture
def processes(tmp_path: Path) -> Iterator[Processes]:
    """Return the sites of a cluster as processes that aren't running yet; running ones are killed after the test."""
    found = Processes(tmp_path)
    yield found
    for name in [*found.running]:
        found.kill(name)
