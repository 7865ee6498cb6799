"""Ceilings for the numbers of functions and files on the main paths, and of modules in each package.

A ceiling may only be lowered. A test fails above it, and also more than `SLACK` below it, so that a change that
shortens a path must lower the ceiling. Comprehensions are not counted, because Python 3.12 inlines them.
"""

from __future__ import annotations

import gc
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import topicstore as ts
from topicstore_conformance.mqtt.embedded import Embedded

ROOT = Path(__file__).parents[2]
FRAMEWORK = ROOT / "framework" / "topicstore"
PRODUCT = tuple(f"{ROOT / place}/" for place in ("framework/topicstore", "backends", "layouts"))
SLACK = 5
COMPREHENSIONS = ("<listcomp>", "<setcomp>", "<dictcomp>", "<genexpr>")
NOT_BETWEEN = ("database.py", "runtime/", "contract/")
"""Beginnings of the paths of files that don't count as between `Database` and the layout."""

PATHS = {
    "store": (111, 31, 32),
    "store sync": (124, 33, 41),
    "replay": (153, 36, 35),
    "read": (111, 31, 17),
    "publish": (118, 39, 60),
    "deliver": (155, 38, 129),
    "open": (265, 75, 140),
}
"""For each path: numbers of named functions, of their files, and of those functions between `Database` and layout."""
MQTT = (338, 72)
"""Named functions and their files, from an MQTT PUBLISH at QoS 1 to its PUBACK and to the socket of one subscriber.

Whether three functions of `server/mqtt/store_thread.py` are among them depends on the timing of the threads.
"""
CONNECT = (420, 85)
"""Named functions and their files, from a CONNECT with a SUBSCRIBE to their answers, for a durable session.

Two functions that look for ``$SYS`` messages run after the SUBACK, so the timing decides whether they are counted.
"""
CALLS = {"store of 1,000": 192, "store of 1": 140, "publish to PUBACK": 386}
"""Calls of Python functions for a batch or a message. Each resumption of a generator counts as a call."""
MODULES = {"": 5, "runtime": 9, "shard": 17, "storage": 36, "sessions": 39, "pubsub": 16, "server": 97}
"""Modules of each package and its subpackages, without `__init__`; for the root, without subpackages."""

Called = frozenset[tuple[str, str]]


class Trace:
    """A trace of the product's functions that are called in threads with `note` as their profile function."""

    def __init__(self) -> None:
        self._called: set[tuple[str, str]] = set()

    def note(self, frame: FrameType, event: str, _: Any) -> None:
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(PRODUCT) and not code.co_qualname.endswith(COMPREHENSIONS):
            self._called.add((code.co_filename.removeprefix(f"{ROOT}/"), code.co_qualname))

    def taken(self) -> Called:
        """Return the functions that were called since the last call of `taken`."""
        called, self._called = self._called, set()
        return frozenset(called)


def called(call: Callable[[], object]) -> Called:
    """Return the functions that a call passes through in this thread.

    The garbage collector is disabled meanwhile, because it would call destructors of objects of earlier tests.
    """
    trace, profile, collecting = Trace(), sys.getprofile(), gc.isenabled()
    gc.disable()
    sys.setprofile(trace.note)
    try:
        call()
    finally:
        sys.setprofile(profile)
        if collecting:
            gc.enable()
    return trace.taken()


def messages(count: int) -> list[ts.Message]:
    """Return messages for all shards, with QoS 0 and 1."""
    return [ts.Message(f"a/{i % 7}/b", b"x%d" % i, f"c{i % 5}", qos=i % 2) for i in range(count)]


def paths(directory: Path) -> Iterator[tuple[str, Called]]:
    """Run each path; yield its name and the functions that it passes through."""
    with ts.open(directory / "sync", shards=4, durability="sync") as db:
        db.store(messages(1_000))
        yield "store sync", called(lambda: db.store(messages(1_000)))
    with ts.open(directory / "commit", shards=4) as db:
        db.store(messages(1_000))
        yield "store", called(lambda: db.store(messages(1_000)))
        db.add_generation()
        db.store(messages(1_000))
        list(db.replay("a/+/b"))
        yield "replay", called(lambda: list(db.replay("a/+/b")))
        cursor = db.read(db.cursor(db.streams("#")[0], "#"), 10).cursor
        yield "read", called(lambda: db.read(cursor, 10))
        session = db.sessions.open("me")
        session.subscribe("a/#")
        one = [ts.Message("a/1/b", b"hello", "publisher", qos=1)]
        for _ in range(3):
            db.publish(one)
            for packets in (dict(db.sessions.deliver()).get(session, ()),):
                session.puback(*(packet.packet_id for packet in packets))
        yield "publish", called(lambda: db.publish(one))
        yield "deliver", called(db.sessions.deliver)
    opened: list[ts.Database] = []
    yield "open", called(lambda: opened.append(ts.open(directory / "commit")))
    opened[0].close()


def check(name: str, counts: tuple[int, ...], ceilings: tuple[int, ...], shown: Called = frozenset()) -> None:
    """Fail if a count is above its ceiling, or more than `SLACK` below it."""
    listed = "\n".join(sorted(f"{file}: {function}" for file, function in shown))
    assert all(count <= ceiling for count, ceiling in zip(counts, ceilings, strict=True)), (
        f"{name} grew to {counts}, above {ceilings}:\n{listed}"
    )
    assert all(count >= ceiling - SLACK for count, ceiling in zip(counts, ceilings, strict=True)), (
        f"{name} shrank to {counts}: lower its ceilings {ceilings}"
    )


def test_the_paths_of_a_database_do_not_grow(tmp_path: Path) -> None:
    """Storing, replaying, reading, publishing, delivering and opening call at most the recorded number of functions."""
    for name, functions in paths(tmp_path):
        between = [
            file
            for file, _ in functions
            if file.startswith("framework/") and not file.removeprefix("framework/topicstore/").startswith(NOT_BETWEEN)
        ]
        check(name, (len(functions), len({file for file, _ in functions}), len(between)), PATHS[name], functions)


def test_the_path_of_an_mqtt_message_does_not_grow(tmp_path: Path) -> None:
    """An MQTT PUBLISH at QoS 1 calls at most the recorded number of functions, in all threads of a server.

    Only functions that are called for each of 98 messages count, and no functions that are called only by timers or on
    busy cores.
    """
    trace = Trace()
    threading.setprofile(trace.note)
    try:
        with (
            ts.open(tmp_path / "db", durability="sync") as db,
            Embedded(db) as served,
            served.client("subscriber", keep=True) as subscriber,
            served.client("publisher") as publisher,
        ):
            subscriber.subscribe("a/#", options=1)
            rounds = []
            for _ in range(100):
                publisher.publish("a/b", b"x", 1)
                packet = subscriber.expect("PUBLISH")
                rounds.append(trace.taken())
                subscriber.acknowledge(packet)
    finally:
        threading.setprofile(None)
    functions = frozenset.intersection(*rounds[2:])
    check("MQTT", (len(functions), len({file for file, _ in functions})), MQTT, functions)


def test_the_path_of_an_mqtt_connect_does_not_grow(tmp_path: Path) -> None:
    """A client that connects and subscribes calls at most the recorded number of functions, in all threads."""
    trace = Trace()
    threading.setprofile(trace.note)
    try:
        with ts.open(tmp_path / "db") as db, Embedded(db) as served, ExitStack() as clients:
            rounds = []
            for number in range(30):
                client = clients.enter_context(served.client(f"client-{number}", keep=True))
                client.subscribe(f"device/{number}/#", options=1)
                rounds.append(trace.taken())
    finally:
        threading.setprofile(None)
    functions = frozenset.intersection(*rounds[2:])
    check("connect", (len(functions), len({file for file, _ in functions})), CONNECT, functions)


def calls(work: Callable[[], object], repeat: int = 20) -> int:
    """Return the least number of calls of Python functions in this thread, over some calls of ``work``."""
    found = []
    for _ in range(repeat):
        counted = [0]

        def note(frame: FrameType, event: str, _: Any, counted: list[int] = counted) -> None:
            counted[0] += event == "call" and not frame.f_code.co_qualname.endswith(COMPREHENSIONS)

        profile = sys.getprofile()
        sys.setprofile(note)
        try:
            work()
        finally:
            sys.setprofile(profile)
        found.append(counted[0])
    return min(found)


def test_a_message_takes_no_more_calls(tmp_path: Path) -> None:
    """Storing a batch, storing one message, and publishing until the PUBACK make no more calls than recorded."""
    with ts.open(tmp_path / "db") as db:
        session = db.sessions.open("me")
        session.subscribe("b/#")
        batches = [messages(1_000) for _ in range(20)]
        one = [ts.Message("b/1", b"hello", "publisher", qos=1)]

        def publish() -> None:
            db.publish(one)
            for to, packets in db.sessions.deliver():
                to.puback(*[packet.packet_id for packet in packets])

        found = {
            "store of 1,000": calls(lambda: db.store(batches.pop()), 20),
            "store of 1": calls(lambda: db.store(messages(1))),
            "publish to PUBACK": calls(publish),
        }
    for name, count in found.items():
        assert count <= CALLS[name], f"{name} grew to {count} calls, above {CALLS[name]}"
        assert count >= CALLS[name] * 0.97, f"{name} shrank to {count} calls: lower its ceiling {CALLS[name]}"


@pytest.mark.parametrize("package", MODULES)
def test_packages_do_not_grow(package: str) -> None:
    """Each package has at most the recorded number of modules."""
    folder = FRAMEWORK / package
    files = folder.rglob("*.py") if package else folder.glob("*.py")
    check(package, (sum(not file.stem.startswith("__") for file in files),), (MODULES[package],))
