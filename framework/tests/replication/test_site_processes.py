"""Sites in processes of their own, of which owners are killed, or stopped and woken, while all of them write."""

from __future__ import annotations

import contextlib
import json
import random
import signal
import subprocess
import sys
import threading
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import topicstore as ts
from topicstore_conformance.faults.threads import wait_until
from topicstore_conformance.replication.history import Operation, violations

PROGRAM = Path(__file__).with_name("site_process.py")
TAKEOVER_AFTER = 0.4
NAMES = "abc"


class SiteProcess:
    """A site in a process, and the operations that it has printed."""

    def __init__(self, root: Path, name: str, run: int) -> None:
        self.name = name
        self.operations: list[Operation] = []
        self.ready = False
        command = [sys.executable, PROGRAM, root, name, str(run), str(TAKEOVER_AFTER)]
        self.errors = (root / f"{name}-{run}.txt").open("w+")
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=self.errors, text=True)
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            with contextlib.suppress(json.JSONDecodeError):  # the process was killed within the line
                found: dict[str, Any] = json.loads(line)
                if "ready" in found:
                    self.ready = True
                else:
                    self.operations.append(Operation(**{**found, "numbers": tuple(found["numbers"])}))

    @property
    def stored(self) -> int:
        """The number of acknowledged stores."""
        return sum(one.kind == "store" and one.outcome == "stored" for one in list(self.operations))

    def says_nothing(self) -> str:
        """Return what the process has written to its standard error."""
        self.errors.seek(0)
        return self.errors.read()

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()
        self._reader.join()
        assert self.process.stdout is not None
        self.process.stdout.close()
        self.errors.close()


class Processes:
    """Sites of one cluster in processes."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.all: list[SiteProcess] = []
        self.running: dict[str, SiteProcess] = {}

    def start(self, name: str) -> None:
        site = SiteProcess(self.root, name, len(self.all))
        self.all.append(site)
        wait_until(lambda: site.ready or site.process.poll() is not None, f"site {name}")
        assert site.ready, site.says_nothing()
        self.running[name] = site

    def kill(self, name: str) -> None:
        self.running.pop(name).kill()

    def progress(self, why: str) -> None:
        """Return when the running sites have acknowledged further stores."""
        before = sum(site.stored for site in self.all)
        wait_until(lambda: sum(site.stored for site in self.all) >= before + 20, why)

    def check(self) -> None:
        """Kill all sites, and check that no result of their operations violates an invariant."""
        for name in [*self.running]:
            self.kill(name)
        cluster = ts.Cluster(
            (self.root / "log").as_uri(), beat_interval=0.05, takeover_after=TAKEOVER_AFTER, replication_factor=None
        )
        with ts.open(self.root / "last", cluster=cluster, site="last") as db:
            stored = [int(message.payload) for message in db.replay("#")]
            reader = db.replay_arrow("#", ids=True).read_all()
            positions: dict[int, list[int]] = {}
            for shard, position in zip(reader["shard"].to_pylist(), reader["position"].to_pylist(), strict=True):
                positions.setdefault(shard, []).append(position)
        operations = [operation for site in self.all for operation in site.operations]
        assert [] == violations(operations, stored, positions)
        assert len(stored) >= 100


@pytest.fixture
def processes(tmp_path: Path) -> Iterator[Processes]:
    found = Processes(tmp_path)
    yield found
    for name in [*found.running]:
        found.kill(name)


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(1, 20))])
def test_owners_that_are_killed_or_stopped_lose_nothing(processes: Processes, seed: int) -> None:
    """With owners killed, and stopped and woken, what was acknowledged is there once, in order, and in every replay."""
    chance = random.Random(seed)
    for name in NAMES:
        processes.start(name)
    for number in range(4):
        processes.progress("stores of all sites")
        name = chance.choice(sorted(processes.running))
        if number % 2:
            processes.running[name].process.send_signal(signal.SIGSTOP)
            processes.progress("stores while a site is stopped")
            processes.running[name].process.send_signal(signal.SIGCONT)
        else:
            processes.kill(name)
            processes.progress("stores after a site was killed")
            processes.start(name)
    processes.progress("stores in the end")
    processes.check()


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(5))
def test_owners_that_are_killed_while_shards_move_lose_nothing(processes: Processes, seed: int) -> None:
    """With owners killed, and stopped and woken, while an administrator moves shards, nothing acknowledged is lost."""
    chance = random.Random(seed)
    cluster = ts.Cluster(
        (processes.root / "log").as_uri(),
        beat_interval=TAKEOVER_AFTER / 4,
        takeover_after=TAKEOVER_AFTER,
        poll_interval=TAKEOVER_AFTER / 4,
        replication_factor=None,
        log_retention=0,
    )
    for name in NAMES:
        processes.start(name)
    with warnings.catch_warnings(action="ignore"), ts.open(processes.root / "d", cluster=cluster, site="d") as admin:
        assert admin.cluster is not None
        for _ in range(6):
            shard = chance.choice([None, 0, 1])
            admin.cluster.set_replicas(shard, chance.sample([*processes.running], chance.randrange(1, 3)))
            name = chance.choice(sorted(processes.running))
            if chance.random() < 0.5:
                processes.running[name].process.send_signal(signal.SIGSTOP)
                admin.cluster.set_replicas(None, [one for one in processes.running if one != name])
                processes.progress("stores while a site is stopped")
                processes.running[name].process.send_signal(signal.SIGCONT)
            else:
                processes.kill(name)
                admin.cluster.set_replicas(None, [*processes.running])
                processes.progress("stores after a site was killed")
                processes.start(name)
        admin.cluster.set_replicas(None, [])
        processes.progress("stores in the end")
    processes.check()
