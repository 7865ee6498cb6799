"""Test of the whole example: a late dashboard gets all readings, and each request is inspected once."""

# ruff: noqa: D103, S101, S603 - a test asserts, and starts the programs beside it
from __future__ import annotations

import importlib.util
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
from topicstore_conformance.faults.threads import PATIENCE, wait_until

HERE = Path(__file__).parent
MACHINES, READINGS = 5, 60
WORKERS = ("ann", "bob", "eve")


@contextmanager
def running(output: Path, program: str, *arguments: object) -> Iterator[subprocess.Popen[bytes]]:
    """Start a program whose output goes to a file, and kill the program at the end."""
    command = [sys.executable, str(HERE / program), *map(str, arguments)]
    with output.open("wb") as printed, subprocess.Popen(command, stdout=printed) as process:
        try:
            yield process
        finally:
            process.kill()


def run(program: str, *arguments: object) -> list[str]:
    command = [sys.executable, str(HERE / program), *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=PATIENCE)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


@contextmanager
def gateway(directory: Path) -> Iterator[tuple[subprocess.Popen[bytes], int]]:
    said = directory / "gateway"
    with running(said, "gateway.py", directory / "db", 0) as process:
        wait_until(lambda: said.read_text().endswith("\n") or process.poll() is not None, "the gateway serves")
        yield process, int(said.read_text().rpartition(":")[2])


def test_the_example(tmp_path: Path) -> None:
    for module, package in (("paho", "paho-mqtt"), ("ohmqtt", "ohmqtt"), ("rocksdict", "rocksdict")):
        if importlib.util.find_spec(module) is None:
            pytest.skip(f"needs {package}: pip install {package}")
    with gateway(tmp_path) as (process, port), ExitStack() as workers:
        for name in WORKERS:
            workers.enter_context(running(tmp_path / name, "worker.py", port, name))
        wait_until(
            lambda: all((tmp_path / name).read_text() == f"{name} is ready\n" for name in WORKERS), "all are ready"
        )
        (told,) = run("devices.py", port, MACHINES, READINGS)
        hot = int(told.removeprefix(f"{MACHINES * READINGS} readings of {MACHINES} machines, ").split()[0])
        assert hot > len(WORKERS)

        def inspected() -> list[str]:
            texts = [(tmp_path / name).read_text().splitlines()[1:] for name in WORKERS]
            return sorted(line.partition(" ")[2] for text in texts for line in text)

        wait_until(lambda: len(inspected()) >= hot, "all requests are done")
        before = run("dashboard.py", port, MACHINES * READINGS)
        assert [line.split(",")[0] for line in before] == [
            f"press-{n:02}: {READINGS} readings" for n in range(MACHINES)
        ]
        assert len(inspected()) == hot
        process.kill()
        process.wait()
    with gateway(tmp_path) as (process, port):
        assert run("dashboard.py", port, MACHINES * READINGS) == before
        process.terminate()
        assert process.wait(PATIENCE) == 0
