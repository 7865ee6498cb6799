"""A child process that writes to a database, reports every step, and kills itself in the middle of one.

A `Job` of the parent describes the child's work and the moment at which the child kills itself. The child reports
begun and acknowledged steps through a pipe. The parent's `Ledger` holds the expected contents: every acknowledged
step, and the one in-flight step, which each shard has applied whole or not at all.

A batch's messages are derived from its number, so reports only hold numbers and positions.
"""

from __future__ import annotations

import contextlib
import os
import random
import subprocess
import sys
import threading
import traceback
import warnings
from collections.abc import Iterator
from functools import cache, partial
from typing import Any, Literal

import attrs
import msgspec
import topicstore as ts
from topicstore import Message, MessageId, StateWrite
from topicstore.contract.engine import Backend, Engine
from topicstore.plugins import load_target, registry

from topicstore_conformance.oracle.model import match

from .killing import ENDS, Countdown, heard
from .threads import MOMENT

__all__ = ["MARKER", "Job", "Ledger", "Step", "messages_of", "run_and_kill"]

MARKER = b"marker"
"""The state key under which each shard stores the number of the last batch with messages in it."""


class Job(msgspec.Struct, frozen=True, kw_only=True):
    """The work of a child: ``steps`` random steps, drawn with ``seed`` and numbered from ``first``."""

    path: str
    backend: str
    layout: str
    shards: int
    durability: str
    seed: int
    first: int
    steps: int = 10_000
    beside: bool = False
    """Whether another thread compacts continuously, besides the compactions among the steps."""
    options: dict[str, Any] = {}
    """The options of the layout."""
    after: int = 0
    """The number of reports after which the child begins to count moments, as `killing.Countdown` defines them."""
    moment: int = 0
    """The number of the moment at which the child kills itself; ending before it is a failure."""
    counted: Literal["all", "engines"] = "all"
    """The moments that count: those of engines and of file changes, or of engines alone.

    Engines have the same moments with every backend: one after opening, and three for each write.
    """


class Step(msgspec.Struct, frozen=True, kw_only=True):
    """A child's report that it begins a step, or that the step is done."""

    kind: str
    """The kind: ``open``, ``store``, ``delete``, ``add``, ``drop``, ``compact`` or ``close``."""
    done: bool
    number: int = 0
    """The number of the batch, or of the generation."""
    topic_filter: str = ""
    ids: list[tuple[int, int]] = []


@cache
def messages_of(number: int) -> list[Message]:
    """Return the messages of the batch with this number."""
    draw = random.Random(number)
    size = draw.choice((1, 3, 10, 40, 100))
    return [
        Message(
            f"t/{draw.randrange(3)}/{draw.randrange(12)}",
            b"%d/%d " % (number, index) + draw.randbytes(draw.choice((0, 8, 60))),
            f"c{draw.randrange(5)}",
            index % 3,
        )
        for index in range(size)
    ]


# --- the child --------------------------------------------------------------------------


class _Teller:
    """Reports steps to the parent, and starts the countdown after enough reports."""

    def __init__(self, job: Job) -> None:
        self._left = job.after
        self._countdown = Countdown(job.moment, random.Random(job.moment).random())
        self._watch(load_target(registry().backend(job.backend)))
        if job.counted == "all":
            sys.addaudithook(partial(self._files_change, job.path))

    def __call__(self, step: Step) -> None:
        os.write(1, msgspec.json.encode(step) + b"\n")
        self._left -= 1
        if not self._left:
            self._countdown.start()

    def _watch(self, backend: type[Backend]) -> None:
        """Count the opening, and every write, of each engine that the backend opens."""
        open_shard = backend.open_shard

        def opened(*arguments: Any, **how: Any) -> Engine:
            engine = open_shard(*arguments, **how)
            engine.write = self._countdown.counted(engine.write)  # type: ignore[method-assign]
            self._countdown.moment()
            return engine

        backend.open_shard = opened  # type: ignore[method-assign]

    def _files_change(self, path: str, event: str, arguments: tuple[Any, ...]) -> None:
        """Count an audit event that opens, renames or removes a file of the database, or makes a directory in it."""
        if event in ("open", "os.mkdir", "os.rename", "os.remove") and str(arguments[0]).startswith(path):
            self._countdown.moment()


def _work(job: Job) -> None:
    warnings.simplefilter("ignore", UserWarning)
    draw, tell = random.Random(job.seed), _Teller(job)
    tell(Step(kind="open", done=False))
    options = {job.layout: job.options}
    how: dict[str, Any] = {name: getattr(job, name) for name in ("backend", "layout", "shards", "durability")}
    with ts.open(job.path, **how, options=options, auto_compact=False) as db:
        tell(Step(kind="open", done=True))
        with _compacting(db) if job.beside else contextlib.nullcontext():
            for number in range(job.first, job.first + job.steps):
                _step(tell, db, number, draw.random())
        tell(Step(kind="close", done=False))
    tell(Step(kind="close", done=True))


@contextlib.contextmanager
def _compacting(db: ts.Database) -> Iterator[None]:
    """Compact repeatedly in another thread; an error there ends the process with return code 1."""
    done = threading.Event()

    def work() -> None:
        try:
            while not done.wait(MOMENT):
                db.compact()
        except BaseException:  # noqa: BLE001 - what kills a thread would go unnoticed otherwise
            traceback.print_exc()
            os._exit(1)

    thread = threading.Thread(target=work)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


def _step(tell: _Teller, db: ts.Database, number: int, chance: float) -> None:
    generations = [info.number for info in db.generations()]
    if chance < 0.04:
        tell(Step(kind="add", done=False))
        tell(Step(kind="add", done=True, number=db.add_generation()))
    elif chance < 0.08 and len(generations) > 1:
        tell(Step(kind="drop", done=False, number=generations[0]))
        db.drop_generation(generations[0])
        tell(Step(kind="drop", done=True, number=generations[0]))
    elif chance < 0.16:
        topic_filter = f"t/+/{number % 12}"
        tell(Step(kind="delete", done=False, topic_filter=topic_filter))
        db.delete(topic_filter)
        tell(Step(kind="delete", done=True, topic_filter=topic_filter))
    elif chance < 0.22:
        tell(Step(kind="compact", done=False))
        db.compact()
        tell(Step(kind="compact", done=True))
    else:
        _store(tell, db, number)


def _store(tell: _Teller, db: ts.Database, number: int) -> None:
    messages = messages_of(number)
    marker = StateWrite(MARKER, str(number).encode())
    tell(Step(kind="store", done=False, number=number))
    result = db.store(messages, state={shard: [marker] for shard in {db.shard_of(m.client_id) for m in messages}})
    ids = [(id_.shard, id_.position) for id_ in result.ids]
    tell(Step(kind="store", done=True, number=number, ids=ids))


# --- the parent -------------------------------------------------------------------------


def run_and_kill(job: Job, after: int, moment: int) -> Iterator[Step]:
    """Run a child that kills itself at moment number ``moment``, counted after ``after`` reports; yield its reports."""
    job = msgspec.structs.replace(job, after=after, moment=moment)
    command = [sys.executable, "-m", "topicstore_conformance.faults.crash", msgspec.json.encode(job).decode()]
    child = subprocess.Popen(command, stdout=subprocess.PIPE)
    assert child.stdout is not None
    with child:
        try:
            told = b"".join(heard(child.stdout))
        finally:
            child.kill()
    assert child.returncode in ENDS, f"it ended by itself, with {child.returncode}, before moment {moment}"
    for line in told.split(b"\n")[:-1]:
        yield msgspec.json.decode(line, type=Step)


@attrs.define
class Ledger:
    """The expected contents of a database, derived from the reports of its killed writers."""

    rows: dict[MessageId, tuple[int, int]] = attrs.field(factory=dict)
    """The (batch, index) of every message that was acknowledged and not deleted."""
    generation: dict[MessageId, int] = attrs.field(factory=dict)
    current: int = 1
    highest: dict[int, int] = attrs.field(factory=dict)
    """The highest position ever seen, by shard."""
    marker: dict[int, int] = attrs.field(factory=dict)
    next_number: int = 0
    pending: Step | None = None
    """The step that was begun and not acknowledged."""

    def hear(self, step: Step) -> None:
        """Update the expected contents with a child's report."""
        self.next_number = max(self.next_number, step.number + 1 if step.kind == "store" else 0)
        self.pending = None if step.done else step
        if not step.done:
            return
        if step.kind == "store":
            self._stored(step)
        elif step.kind == "add":
            self.current = step.number
        elif step.kind == "drop":
            self.forget({id_ for id_, generation in self.generation.items() if generation == step.number})
        elif step.kind == "delete":
            self.forget(self.matching(step.topic_filter))

    def _stored(self, step: Step) -> None:
        for index, (shard, position) in enumerate(step.ids):
            assert position > self.highest.get(shard, 0), "positions strictly increase, over restarts too"
            self.highest[shard] = position
            self.marker[shard] = step.number
            id_ = MessageId(shard, position)
            self.rows[id_] = step.number, index
            self.generation[id_] = self.current

    def forget(self, ids: set[MessageId]) -> None:
        """Remove deleted messages from the expected contents."""
        for id_ in ids:
            self.rows.pop(id_, None)
            self.generation.pop(id_, None)

    def matching(self, topic_filter: str) -> set[MessageId]:
        """Return the ids of the expected messages that a filter matches."""
        batches = {number: messages_of(number) for number, _ in self.rows.values()}
        return {id_ for id_, (number, index) in self.rows.items() if match(topic_filter, batches[number][index].topic)}

    # --- checking ---

    def check(self, db: ts.Database, got: list[tuple[MessageId, Message]]) -> None:
        """Compare a database after a crash with the expected contents; record whether the in-flight step applied."""
        pending, self.pending = self.pending, None
        found = dict(got)
        assert len(found) == len(got)
        missing, new = self.rows.keys() - found.keys(), found.keys() - self.rows.keys()
        assert missing <= self._may_be_gone(pending, missing)
        self.forget(missing)
        self._check_new(db, pending, sorted(new), found)
        batches = {number: messages_of(number) for number, _ in self.rows.values()}
        for id_, (number, index) in self.rows.items():
            expected, message = batches[number][index], found[id_]
            assert expected == msgspec.structs.replace(message, timestamp=None)
        markers = {shard: db.state(shard).get(MARKER) for shard in range(len(db.storage.shards))}
        assert {shard: str(number).encode() for shard, number in self.marker.items()} == {
            shard: marker for shard, marker in markers.items() if marker is not None
        }
        self._check_generations(db, pending)

    def _may_be_gone(self, pending: Step | None, missing: set[MessageId]) -> set[MessageId]:
        """Return the ids that the in-flight step may have removed; a generation is dropped whole or not at all."""
        if pending is None or not missing:
            return set()
        if pending.kind == "delete":
            return self.matching(pending.topic_filter)
        if pending.kind == "drop":
            whole = {id_ for id_, generation in self.generation.items() if generation == pending.number}
            assert whole == missing
            return whole
        return set()

    def _check_new(
        self, db: ts.Database, pending: Step | None, new: list[MessageId], found: dict[MessageId, Message]
    ) -> None:
        """Check that unacknowledged messages belong to the in-flight batch, and are a shard's whole part of it."""
        if not new:
            return
        assert pending is not None
        assert pending.kind == "store"
        messages = messages_of(pending.number)
        for shard in sorted({id_.shard for id_ in new}):
            there = [id_ for id_ in new if id_.shard == shard]
            part = [
                (index, message) for index, message in enumerate(messages) if db.shard_of(message.client_id) == shard
            ]
            assert [message for _, message in part] == [
                msgspec.structs.replace(found[id_], timestamp=None) for id_ in there
            ]
            assert there[0].position > self.highest.get(shard, 0)
            self.highest[shard], self.marker[shard] = there[-1].position, pending.number
            for id_, (index, _) in zip(there, part, strict=True):
                self.rows[id_], self.generation[id_] = (pending.number, index), self.current

    def _check_generations(self, db: ts.Database, pending: Step | None) -> None:
        """Check that an in-flight addition of a generation applied to all shards or to none."""
        current = max((info.number for info in db.generations()), default=0)
        allowed = {self.current, self.current + 1} if pending is not None and pending.kind == "add" else {self.current}
        assert current in allowed
        self.current = current


def main(arguments: list[str]) -> Any:
    """Run the job that the arguments describe, as a child process."""
    _work(msgspec.json.decode(arguments[0], type=Job))


if __name__ == "__main__":
    main(sys.argv[1:])
