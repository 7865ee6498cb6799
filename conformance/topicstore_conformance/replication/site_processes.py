"""Sites of a cluster in processes of their own, which run `site_program`, and a check of their operations."""

from __future__ import annotations

import contextlib
import json
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol

import topicstore as ts

from topicstore_conformance.faults.threads import wait_until

from .history import Operation, violations
from .site_program import quick_cluster

__all__ = ["TAKEOVER_AFTER", "Processes", "RunningSites", "SiteProcess", "disturb"]

PROGRAM = Path(__file__).with_name("site_program.py")
TAKEOVER_AFTER = 0.4
"""Seconds of silence after which a site of these processes is replaced."""


class SiteProcess:
    """A site in a process, and the operations that it has printed."""

    def __init__(self, root: Path, name: str, run: int) -> None:
        self.name = name
        self.operations: list[Operation] = []
        self.ready = False
        command = [sys.executable, str(PROGRAM), str(root), name, str(run), str(TAKEOVER_AFTER)]
        self.errors = (root / f"{name}-{run}.txt").open("w+")
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=self.errors, text=True)
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            with contextlib.suppress(json.JSONDecodeError):  # the process was killed while it wrote this line
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
        """Kill the process, and read what it has printed to the end."""
        self.process.kill()
        self.process.wait()
        self._reader.join()
        assert self.process.stdout is not None
        self.process.stdout.close()
        self.errors.close()


class Processes:
    """The sites of one cluster, each in a process of its own."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.all: list[SiteProcess] = []
        self.running: dict[str, SiteProcess] = {}

    def start(self, name: str) -> None:
        """Start a site, and return when it is open."""
        site = SiteProcess(self.root, name, len(self.all))
        self.all.append(site)
        wait_until(lambda: site.ready or site.process.poll() is not None, f"site {name}")
        assert site.ready, site.says_nothing()
        self.running[name] = site

    def kill(self, name: str) -> None:
        """Kill a running site."""
        self.running.pop(name).kill()

    def progress(self, why: str) -> None:
        """Return when the running sites have acknowledged further stores."""
        before = sum(site.stored for site in self.all)
        wait_until(lambda: sum(site.stored for site in self.all) >= before + 20, why)

    def check(self) -> None:
        """Kill all sites, and check that no result of their operations violates an invariant."""
        for name in [*self.running]:
            self.kill(name)
        with ts.open(self.root / "last", cluster=quick_cluster(self.root, TAKEOVER_AFTER), site="last") as db:
            stored = [int(message.payload) for message in db.replay("#")]
            reader = db.replay_arrow("#", ids=True).read_all()
            positions: dict[int, list[int]] = {}
            for shard, position in zip(reader["shard"].to_pylist(), reader["position"].to_pylist(), strict=True):
                positions.setdefault(shard, []).append(position)
        operations = [operation for site in self.all for operation in site.operations]
        assert [] == violations(operations, stored, positions)
        assert len(stored) >= 100


class RunningSites(Protocol):
    """The interface of sites that run in processes, under load."""

    @property
    def running(self) -> Mapping[str, Any]:
        """The running sites by name, each with its ``process``."""

    def start(self, name: str) -> None:
        """Start a site, and return when it is open."""

    def kill(self, name: str) -> None:
        """Kill a running site."""

    def progress(self, why: str) -> None:
        """Return when the load has made progress."""


def disturb(sites: RunningSites, name: str, *, stop: bool, meanwhile: Callable[[], object] = lambda: None) -> None:
    """Suspend or kill a site; continue it or start it again after the others have made progress.

    ``meanwhile`` is called before that progress.
    """
    process = sites.running[name].process
    if stop:
        process.send_signal(signal.SIGSTOP)
    else:
        sites.kill(name)
    meanwhile()
    sites.progress(f"progress while site {name} is stopped or killed")
    if stop:
        process.send_signal(signal.SIGCONT)
    else:
        sites.start(name)
