"""The first step of a run: open, store, read and open again, in a process of its own, before anything else is tried.

As a program it gets the plans as arguments, each as ``SUITE:BACKEND:LAYOUT`` or ``broker:HOST:PORT``. It reports each
step before the step begins, and how each plan ended, in lines of JSON.
"""

from __future__ import annotations

import os
import subprocess
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import attrs
import msgspec
import topicstore as ts
from topicstore.contract.engine import KEYSPACES, Backend, Engine, WriteBatch

from topicstore_conformance.broker.fixtures import QUICK_ANSWER, Broker, greeting
from topicstore_conformance.conditions.directories import quick_directory
from topicstore_conformance.layout.fixtures import Stored, numbered
from topicstore_conformance.subjects.pairs import backend_for, make_backend, make_layout, pair_of
from topicstore_conformance.subjects.subject import LayoutSubject

__all__ = ["first_causes"]


class Report(msgspec.Struct, frozen=True):
    """A report of one step; the last report of a plan has an empty step, and a cause if it failed."""

    plan: str
    step: str
    cause: str = ""


Step = Callable[[str], None]
"""A function that is called with the name of each step before that begins."""


def try_backend(name: str, path: Path, step: Step) -> None:
    """Open a shard of a backend, write, read in all ways, and open it again."""
    step("make the backend")
    backend = make_backend(name)
    step("open a new shard")
    engine = backend.open_shard(path, KEYSPACES, create=True)
    for keyspace in KEYSPACES:
        key = b"key" if keyspace.shape is None else (1, 2, 3)
        step(f"put a value into the keyspace {keyspace.name!r}, and get it")
        batch = WriteBatch()
        batch.put(keyspace, key, b"value")
        engine.write(batch)
        assert engine.get(keyspace, key) == b"value", "get returns another value"
        step(f"scan the keyspace {keyspace.name!r}")
        assert [*engine.scan(keyspace)] == [[(key, b"value")]], "the scan yields something else"
    step("read a snapshot")
    with engine.snapshot() as snapshot:
        assert snapshot.get_many(KEYSPACES[0], [b"key", b"none"]) == [b"value", None], "get_many returns something else"
    step("delete a key, flush and ask for sizes")
    batch = WriteBatch()
    batch.delete(KEYSPACES[1], b"key")
    engine.write(batch, sync=True)
    engine.flush_log()
    engine.info()
    step("close the shard")
    engine.close()
    step("open the shard again")
    engine = _again(backend, path)
    engine.close()


def _again(backend: Backend, path: Path) -> Engine:
    engine = backend.open_shard(path, KEYSPACES, create=False)
    found = engine.get(KEYSPACES[0], b"key"), engine.get(KEYSPACES[1], b"key")
    assert found in ((b"value", None), (None, None)), f"after opening again it has {found}"
    return engine


def try_layout(name: str, path: Path, step: Step) -> None:
    """Create a slab of a layout, store messages, read and count them, and open it again."""
    step("make the layout")
    make_layout(name)
    step("open its engine")
    engine = make_backend(backend_for(name)).open_shard(path, KEYSPACES, create=True)
    stored = Stored(LayoutSubject(make=lambda: make_layout(name), capabilities={"position_order"}), engine)
    step("create a slab")
    stored.create()
    step("store messages")
    stored.put(numbered(["a", "b/c"], 6))
    for again in ("", " again"):
        step(f"read them{again}")
        assert len(stored.slab.cover(ts.TopicFilter("#"))), "no stream covers #"
        stored.read_all()
        step(f"verify them{again}")
        assert stored.verify() == (6, []), "verify counts something else"
        step("open the slab again")
        stored.reopen()
    engine.close()


def try_database(backend: str, layout: str, path: Path, step: Step) -> None:
    """Open a database of a pair, store messages, replay them, and open it again."""
    pair = pair_of(backend, layout)
    step("open a new database")
    with pair.open(path) as db:
        step("store messages")
        db.store([ts.Message("a/b", b"1", "c"), ts.Message("a/c", b"2", "c")])
        step("replay them")
        assert len(list(db.replay("a/#"))) == 2, "the replay has another number of messages"
    step("open the database again")
    with pair.open(path) as db:
        db.info()


def try_broker(host: str, port: str, step: Step) -> None:
    """Connect to a broker with either version of MQTT."""
    step(f"connect to {host}:{port}")
    broker = Broker(host, int(port), QUICK_ANSWER)
    broker.client().close()
    step("connect a client of MQTT 5 or 3.1.1 without a password")
    assert any(greeting(broker, version) for version in (5, 4)), "the broker accepts no client"


def main(plans: Sequence[str]) -> None:
    """Try the plans in turn, and report each step before it begins."""
    for plan in plans:
        suite, backend, layout = plan.split(":")

        def step(name: str, plan: str = plan) -> None:
            os.write(1, msgspec.json.encode(Report(plan, name)) + b"\n")

        with quick_directory() as directory:
            path, cause = Path(directory, "first"), ""
            try:
                if suite == "backend":
                    try_backend(backend, path, step)
                elif suite == "layout":
                    try_layout(layout, path, step)
                elif suite == "broker":
                    try_broker(backend, layout, step)
                else:
                    try_database(backend, layout, path, step)
            except BaseException as error:  # noqa: BLE001 - whatever it is, it is reported as the cause
                cause = cause_of(error)
        os.write(1, msgspec.json.encode(Report(plan, "", cause)) + b"\n")


def cause_of(error: BaseException) -> str:
    """Return an error as one line: its message, and the innermost line of its traceback."""
    at = traceback.extract_tb(error.__traceback__)[-1]
    said = str(error).partition("\n")[0] or type(error).__name__
    return f"{type(error).__name__}: {said} ({at.filename}:{at.lineno})"


# --- in the run's process ------------------------------------------------------------------------


@attrs.define
class _Ended:
    """The progress of a process: the causes of the plans that ended, and the step at which it died."""

    causes: dict[str, str] = attrs.field(factory=dict)
    at: Report | None = None


def first_causes(plans: Sequence[str], limit: float) -> dict[str, str]:
    """Return, for each plan, the cause for which its first step failed, or an empty text.

    limit: the seconds after which the process that tries the plans is killed, and its current plan counts as hanging.
    """
    causes: dict[str, str] = {}
    while left := [plan for plan in plans if plan not in causes]:
        ended = _tried(left, limit)
        causes |= ended.causes
        if ended.at is not None:
            causes[ended.at.plan] = f"{ended.at.step}: {ended.at.cause}"
        elif not ended.causes:
            return causes | dict.fromkeys(left, "")  # the process didn't start; the suites report the reason
    return causes


def _tried(plans: Sequence[str], limit: float) -> _Ended:
    """Try plans in a new process, until it ends, or dies of one of them."""
    command = [sys.executable, "-m", __name__, *plans]
    ended, code = _Ended(), ""
    try:
        done = subprocess.run(command, capture_output=True, timeout=limit)
        output, code = done.stdout, f"the process ended with code {done.returncode}"
    except subprocess.TimeoutExpired as hung:
        output, code = hung.stdout or b"", f"no answer within {limit:.0f} seconds"
    step = ""
    for report in _reports(output):
        if report.step:
            step, ended.at = report.step, Report(report.plan, report.step, code)
        else:
            ended.causes[report.plan] = f"{step}: {report.cause}" if report.cause else ""
            ended.at = None
    return ended


def _reports(output: bytes) -> Iterator[Report]:
    for line in output.splitlines():
        try:
            yield msgspec.json.decode(line, type=Report)
        except msgspec.DecodeError:  # a line that isn't a report: the plugin has printed it
            continue


if __name__ == "__main__":
    main(sys.argv[1:])
