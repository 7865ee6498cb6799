"""The test suite for brokers finds a broker's faults, and demands nothing that the standard leaves open."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from click.testing import CliRunner
from topicstore.cli import cli
from topicstore_conformance.conditions.directories import quick_directory
from topicstore_conformance.conditions.ports import hold_port
from topicstore_conformance.conditions.skipping import need
from topicstore_conformance.faults.threads import wait_until
from topicstore_conformance.mqtt.raw_client import RawClient
from topicstore_conformance.mqtt.serving import serving
from topicstore_conformance.runner.running import Plan, Run, run_all

MOSQUITTO = shutil.which("mosquitto") or shutil.which("/usr/sbin/mosquitto")
AMQTT = """
import asyncio, sys
from amqtt.broker import Broker

async def main(port):
    listener = {"type": "tcp", "bind": f"127.0.0.1:{port}"}
    anonymous = {"amqtt.plugins.authentication.AnonymousAuthPlugin": {"allow_anonymous": True}}
    await Broker({"listeners": {"default": listener}, "plugins": anonymous}).start()
    await asyncio.Event().wait()

asyncio.run(main(int(sys.argv[1])))
"""


def kit(port: int) -> Run:
    (run,) = run_all([Plan(suite="broker", broker=f"127.0.0.1:{port}", mode="full")])
    return run


def statements(run: Run, outcome: str) -> set[str]:
    return {number for test in run.of(outcome) for number in test.statements}


@contextmanager
def running(*command: str, port: int) -> Iterator[None]:
    """Run a broker as a process during a ``with`` block."""
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)

    def listens() -> bool:
        assert process.poll() is None, "the broker has ended"
        try:
            RawClient(port).close()
        except OSError:
            return False
        return True

    try:
        wait_until(listens, "the broker to listen")
        yield
    finally:
        process.kill()
        process.wait()


def test_a_broker_that_is_not_there() -> None:
    """If nothing listens at the address, no case is tried, and the run says so."""
    held, port = hold_port()
    with held:
        run = kit(port)
    assert (False, ()) == (run.kept, run.outcomes)
    assert run.failure.startswith(f"its first step failed: connect to 127.0.0.1:{port}: ConnectionRefusedError")


@pytest.mark.parametrize("address", ["localhost", ":1883", "localhost:mqtt"])
def test_what_is_no_address_is_refused(address: str) -> None:
    """An argument that isn't a host and a port is refused before anything is tried."""
    result = CliRunner().invoke(cli, ["conformance", "mqtt", address])
    assert result.exit_code == 2
    assert "HOST:PORT" in result.stderr


@pytest.mark.slow
def test_this_server_keeps_all_statements() -> None:
    """No test of the suite fails against this package's server, and only tests that don't apply are skipped."""
    need("rocksdb")
    with quick_directory() as directory, serving(Path(directory) / "db") as server:
        run = kit(server.port)
    assert [] == [(test.test, test.reason) for test in run.of("failed")]
    assert {"MQTT 3.1.1 has no shared subscriptions", "a broker may publish QoS 2 messages when they are released"} == {
        test.reason for test in run.of("skipped")
    }
    assert run.kept


@pytest.mark.slow
def test_a_broker_that_breaks_statements() -> None:
    """The suite finds amqtt's known faults in QoS, DISCONNECT and take-over, and skips its tests of MQTT 5."""
    pytest.importorskip("amqtt", reason="needs amqtt: pip install amqtt")
    held, port = hold_port()
    with held, running(sys.executable, "-c", AMQTT, str(port), port=port):
        run = kit(port)
    assert {"3.8.4-8", "3.14.4-2", "3.1.0-1"} <= statements(run, "failed")
    assert {"3.12.4-1", "4.6.0-4"} <= statements(run, "passed") - statements(run, "failed")
    assert "the broker accepts no client of MQTT 5" in {test.reason for test in run.of("skipped")}


@pytest.mark.slow
@pytest.mark.skipif(MOSQUITTO is None, reason="needs mosquitto: apt-get install mosquitto")
def test_a_broker_of_others_keeps_most(tmp_path: Path) -> None:
    """Mosquitto fails at most a tenth of the cases."""
    held, port = hold_port()
    settings = tmp_path / "mosquitto.conf"
    settings.write_text(f"listener {port} 127.0.0.1\nallow_anonymous true\n")
    with held, running(str(MOSQUITTO), "-c", str(settings), port=port):
        run = kit(port)
    assert len(run.of("failed")) <= len(run.outcomes) // 10, [(test.test, test.reason) for test in run.of("failed")]
