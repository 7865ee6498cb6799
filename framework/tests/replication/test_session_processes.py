"""Client sessions in a cluster whose sites are separate processes, which are killed, or paused and resumed."""

from __future__ import annotations

import json
import random
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from topicstore.storage.shard_map import ShardMap
from topicstore_conformance.faults.threads import wait_until
from topicstore_conformance.replication.site_processes import disturb

PROGRAM = Path(__file__).with_name("session_process.py")
TAKEOVER_AFTER = 0.4
PATIENCE = 2.0
"""Seconds after which a client leaves a site that doesn't answer, for another one."""
NAMES = "abc"
NUMBERS = count(1)


class SiteProcess:
    """A site in a process, and the answers that it has printed."""

    def __init__(self, root: Path, name: str, run: int, *more: str) -> None:
        self.ready = threading.Event()
        self.gone = threading.Event()
        self._errors = (root / f"{name}-{run}.txt").open("w+")
        self._answers: dict[int, Any] = {}
        self._changed = threading.Condition()
        self.process = subprocess.Popen(
            [sys.executable, PROGRAM, root, name, str(TAKEOVER_AFTER), *more],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
            bufsize=1,
        )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if not line.endswith("\n"):  # killed while writing this line
                break
            number, outcome, value = json.loads(line)
            if outcome == "ready":
                self.ready.set()
            with self._changed:
                if number in self._answers:  # otherwise the client no longer waits
                    self._answers[number] = outcome, value
                    self._changed.notify_all()
        self.gone.set()
        with self._changed:
            self._changed.notify_all()

    def ask(self, do: str, **how: Any) -> tuple[str, Any]:
        """Return the outcome and value of a call.

        Without an answer the outcome is "silent", and the call may still run.
        """
        number, stdin = next(NUMBERS), self.process.stdin
        assert stdin is not None
        with self._changed:
            self._answers[number] = None
            try:
                stdin.write(json.dumps({"number": number, "do": do, **how}) + "\n")
            except (OSError, ValueError):
                self.gone.set()
            self._changed.wait_for(lambda: self._answers[number] or self.gone.is_set(), PATIENCE)
            return self._answers.pop(number) or ("silent", None)

    def said(self) -> str:
        """Return what the process has written to its standard error."""
        self._errors.seek(0)
        return self._errors.read()

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()
        self._reader.join()
        for file in (self.process.stdin, self.process.stdout, self._errors):
            assert file is not None
            try:
                file.close()
            except BrokenPipeError:  # unsent data for the dead process
                continue


class Client:
    """An MQTT client that publishes numbers, and receives those of all clients; its state survives reconnections.

    It behaves as the standard demands: it repeats unacknowledged packets with the same packet id, and delivers a
    message of QoS 2 once (MQTT 5, section 4.3.3).
    """

    def __init__(
        self, name: str, sites: dict[str, SiteProcess], qos: int, seed: int, filters: dict[str, int] | None = None
    ) -> None:
        self.name = name
        self.qos = qos
        self._filters = {f"q{qos}/#": qos} if filters is None else filters
        self.topics = 3
        """The number of topics to which it publishes in turn."""
        self.connections = 0
        self.sent = 0
        """The number of published messages that were acknowledged: those with the numbers below it."""
        self.received: list[tuple[str, int]] = []
        """The messages that were delivered: publisher and number."""
        self._sites = sites
        self._chance = random.Random(f"{name}/{seed}")
        self._connection: tuple[SiteProcess, int] | None = None
        self._unreleased: set[int] = set()
        """The packet ids of QoS 2 that were received, and whose PUBREL has not come."""
        self.subscribed = False
        self._releasing = False
        """Whether the last message was received by the site, and its PUBREL is to be sent."""
        self.publishing = False
        self.stopping = threading.Event()
        self.failure: BaseException | None = None
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def stop(self) -> None:
        self.stopping.set()
        self._thread.join()

    def _run(self) -> None:
        try:
            while not self.stopping.is_set():
                if self._connected():
                    self._receive()
                    self._publish()
        except BaseException as error:  # noqa: BLE001 - the test raises it
            self.failure = error

    def _ask(self, do: str, **how: Any) -> Any:
        """Return the value of a call by this connection; None if it has ended, because it failed."""
        if self._connection is None:
            return None
        site, number = self._connection
        outcome, value = site.ask(do, connection=number, **how)
        if outcome != "done":
            self._connection = None
            return None
        return (value,)

    def _connected(self) -> bool:
        while self._connection is None and not self.stopping.is_set():
            site = self._chance.choice(list(self._sites.values()) or [None])
            if site is not None and not site.gone.is_set():
                self._connection = site, next(NUMBERS)
                self.connections += 1
                filters = {} if self.subscribed else self._filters
                if self._ask("open", client=self.name, filters=filters) is not None:
                    self.subscribed = True
                else:
                    self.stopping.wait(TAKEOVER_AFTER / 20)  # not a wait for an event, but a retry after a pause
        return self._connection is not None

    def _receive(self) -> None:
        found = self._ask("deliver")
        if not found:
            return
        puback, pubrec, pubcomp = [], [], []
        for kind, packet_id, *message in found[0]:
            if kind == "pubrel":
                self._unreleased.discard(packet_id)
                pubcomp.append(packet_id)
                continue
            qos, payload = message
            if qos == 1:
                puback.append(packet_id)
            else:
                pubrec.append(packet_id)
            if qos == 1 or packet_id not in self._unreleased:
                publisher, number = payload.split()
                self.received.append((publisher, int(number)))
            if qos == 2:
                self._unreleased.add(packet_id)
        self._ask("acknowledge", puback=puback, pubrec=pubrec, pubcomp=pubcomp)

    def _publish(self) -> None:
        if not (self.publishing or self._releasing):
            return
        packet_id = self.sent % 10 + 1
        if not self._releasing:
            payload, topic = f"{self.name} {self.sent}", f"q{self.qos}/{self.sent % self.topics}"
            if self._ask("publish", topic=topic, payload=payload, qos=self.qos, packet_id=packet_id) is None:
                return
            self._releasing = True
        if self.qos == 1 or self._ask("pubrel", packet_id=packet_id) is not None:
            self._releasing = False
            self.sent += 1


class World:
    """Sites in processes, and their clients: one of each QoS in each shard.

    delivered: the age in seconds at which messages stored only for sessions are removed; None: they are kept.
    """

    def __init__(self, root: Path, seed: int, delivered: float | None = None) -> None:
        self._root = root
        self._more = [] if delivered is None else [str(delivered)]
        self._runs = count()
        self.running: dict[str, SiteProcess] = {}
        self.stopped: SiteProcess | None = None
        for name in NAMES:
            self.start(name)
        shard_of = ShardMap(2).of
        names = {
            (shard, qos): next(f"c{n}q{qos}" for n in count() if shard_of(f"c{n}q{qos}") == shard)
            for shard in (0, 1)
            for qos in (1, 2)
        }
        self.clients = [Client(name, self.running, qos, seed) for (_, qos), name in names.items()]
        self.until(lambda: all(client.subscribed for client in self.clients), "the subscriptions")
        for client in self.clients:
            client.publishing = True

    def start(self, name: str) -> None:
        site = SiteProcess(self._root, name, next(self._runs), *self._more)
        wait_until(lambda: site.ready.is_set() or site.gone.is_set(), f"site {name}")
        assert site.ready.is_set(), site.said()
        self.running[name] = site

    def kill(self, name: str) -> None:
        self.running.pop(name).kill()

    def progress(self, why: str, by: int = 5) -> None:
        """Return when each client has published and received further messages."""
        before = [(client.sent, len(client.received)) for client in self.clients]
        self.until(
            lambda: all(
                client.sent >= sent + by and len(client.received) >= received + by
                for client, (sent, received) in zip(self.clients, before, strict=True)
            ),
            why,
        )

    def until(self, condition: Callable[[], bool], why: str) -> None:
        wait_until(lambda: condition() or any(client.failure for client in self.clients), why)
        for client in self.clients:
            if client.failure is not None:
                raise client.failure

    def deliver(self) -> None:
        """Deliver the remaining messages to the clients, which stay connected."""
        for client in self.clients:
            client.publishing = False
        self.until(lambda: not any(client._releasing for client in self.clients), "the last acknowledgements")
        for qos in (1, 2):
            some = [client for client in self.clients if client.qos == qos]
            expected = {(client.name, number) for client in some for number in range(client.sent)}
            self.until(partial(has_all, some, expected), f"all messages at QoS {qos}")

    def check(self) -> None:
        """Disconnect the clients, and check the messages that each has received."""
        for client in self.clients:
            client.stop()
            for publisher in {publisher for publisher, _ in client.received}:
                numbers = [number for one, number in client.received if one == publisher]
                assert sorted(set(numbers)) == list(dict.fromkeys(numbers)), f"order at {client.name}: {numbers}"
            if client.qos == 2:
                twice = [one for one, times in Counter(client.received).items() if times > 1]
                assert [] == twice, f"twice at {client.name}"

    def end(self) -> None:
        for client in self.clients:
            client.stopping.set()
        for name in [*self.running]:
            self.kill(name)
        for client in self.clients:
            client.stop()


def has_all(clients: Iterable[Client], expected: set[tuple[str, int]]) -> bool:
    return all(expected <= {*client.received} for client in clients)


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(1, 20))])
def test_sessions_lose_nothing_and_get_nothing_twice(tmp_path: Path, seed: int) -> None:
    """With sites killed, paused and resumed, clients receive every acknowledged message: QoS 2 once, in order."""
    chance, world = random.Random(seed), World(tmp_path, seed)
    try:
        for number in range(2 if seed == 0 else 6):
            world.progress("messages at all clients")
            name = chance.choice(sorted(world.running))
            disturb(world, name, stop=bool(number % 2))
        world.progress("messages in the end")
        world.deliver()
        world.check()
    finally:
        world.end()


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(1, 20))])
def test_what_only_sessions_needed_goes_and_nothing_before(tmp_path: Path, seed: int) -> None:
    """Clients get every message while sites are killed and paused, and delivered messages are removed.

    In the end no message is left.
    """
    chance, world = random.Random(seed), World(tmp_path, seed, delivered=0.1)
    try:
        for number in range(2 if seed == 0 else 6):
            world.progress("messages at all clients")
            disturb(world, chance.choice(sorted(world.running)), stop=bool(number % 2))
        world.progress("messages in the end")
        world.deliver()
        site = next(iter(world.running.values()))
        # Clients stay connected: if a client's shard moves now, the client must reconnect before it can acknowledge.
        world.until(lambda: site.ask("stored") == ("done", 0), "the removal of all messages")
        world.check()
    finally:
        world.end()


@pytest.fixture(autouse=True)
def no_threads_left() -> Iterator[None]:
    """Check that all clients of a test have ended."""
    before = threading.active_count()
    yield
    assert threading.active_count() <= before
