"""Tests of the bridges with real brokers: all messages are stored, and kills lose none."""

# ruff: noqa: D103, S101, S603 - a test asserts, and starts the program beside it
from __future__ import annotations

import importlib.util
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import topicstore as ts
from topicstore_conformance.faults.threads import wait_until

HERE = Path(__file__).parent
BRIDGES = ["paho", "aiomqtt"]
NEEDS = {"paho": ["paho-mqtt"], "aiomqtt": ["paho-mqtt", "aiomqtt"]}
AMQTT = """
import asyncio, sys
from amqtt.broker import Broker

async def main():
    listener = {"type": "tcp", "bind": f"127.0.0.1:{sys.argv[1]}"}
    anonymous = {"amqtt.plugins.authentication.AnonymousAuthPlugin": {"allow_anonymous": True}}
    await Broker({"listeners": {"default": listener}, "plugins": anonymous}).start()
    await asyncio.Event().wait()

asyncio.run(main())
"""
MOSQUITTO = """
listener {port} 127.0.0.1
allow_anonymous true
max_inflight_messages 1000
max_queued_messages 0
"""


def need(*packages: str) -> None:
    for package in packages:
        if importlib.util.find_spec(package.partition("-")[0]) is None:
            pytest.skip(f"needs {package}: pip install {package}")


@contextmanager
def running(command: list[str | Path]) -> Iterator[subprocess.Popen[bytes]]:
    """Start a program, and kill it at the end."""
    with subprocess.Popen(command) as process:
        try:
            yield process
        finally:
            process.kill()


@contextmanager
def broker(command: list[str | Path], port: int) -> Iterator[int]:
    def answers() -> bool:
        with socket.socket() as client:
            return client.connect_ex(("127.0.0.1", port)) == 0

    with running(command):
        wait_until(answers, "the broker answers")
        yield port


def free_port() -> int:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return int(taken.getsockname()[1])


@pytest.fixture
def mosquitto(tmp_path: Path) -> Iterator[int]:
    program, port = shutil.which("mosquitto") or shutil.which("/usr/sbin/mosquitto"), free_port()
    if program is None:
        pytest.skip("needs mosquitto: apt-get install mosquitto")
    (tmp_path / "mosquitto.conf").write_text(MOSQUITTO.format(port=port))
    with broker([program, "-c", tmp_path / "mosquitto.conf"], port):
        yield port


@pytest.fixture
def amqtt() -> Iterator[int]:
    need("amqtt")
    port = free_port()
    with broker([sys.executable, "-W", "ignore", "-c", AMQTT, str(port)], port):
        yield port


class Publisher:
    """A publisher of numbers, which also reads the stored ones."""

    def __init__(self, port: int, path: Path) -> None:
        import paho.mqtt.client as mqtt

        ts.open(path, "x", durability="sync").close()  # so that it can be read before the bridge has begun
        self.path = path
        self.sent = 0
        self.client = mqtt.Client(mqtt.CallbackAPIVersion.VERSION2, "publisher")
        self.client.connect("127.0.0.1", port)
        self.client.loop_start()

    def publish(self, count: int) -> None:
        """Publish the next ``count`` numbers, and return when the broker has acknowledged them."""
        numbers = range(self.sent, self.sent + count)
        self.sent += count
        for waiting in [self.client.publish("home/hall", str(number), qos=1) for number in numbers]:
            waiting.wait_for_publish()

    def stored(self) -> list[int]:
        """Return the stored numbers without duplicates, in the order of their first occurrence."""
        with ts.open(self.path, "r") as db:
            return list(dict.fromkeys(int(message.payload) for message in db.replay("home/#")))

    def arrives(self) -> bool:
        """Publish a number, and return whether any is stored: the broker drops messages until the bridge subscribes."""
        self.publish(1)
        return bool(self.stored())

    def close(self) -> None:
        """Disconnect from the broker."""
        self.client.disconnect()
        self.client.loop_stop()


def bridge(which: str, path: Path, port: int) -> list[str | Path]:
    return [sys.executable, HERE / f"with_{which}.py", path, "127.0.0.1", str(port), "home/#"]


@pytest.mark.parametrize("which", BRIDGES)
@pytest.mark.parametrize("broker_name", ["amqtt", "mosquitto"])
def test_what_the_broker_sends_is_stored(
    broker_name: str, which: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    need(*NEEDS[which])
    port: int = request.getfixturevalue(broker_name)
    publisher = Publisher(port, tmp_path / "db")
    with running(bridge(which, tmp_path / "db", port)):
        wait_until(publisher.arrives, "the bridge has begun")
        first = publisher.sent
        publisher.publish(200)
        expected = list(range(first, publisher.sent))
        wait_until(lambda: publisher.stored()[-200:] == expected, "all is stored, in order")
    publisher.close()


@pytest.mark.parametrize("which", BRIDGES)
def test_kills_lose_nothing(which: str, mosquitto: int, tmp_path: Path) -> None:
    """No message is lost when a bridge is killed, because the broker redelivers unacknowledged messages."""
    need(*NEEDS[which])
    publisher = Publisher(mosquitto, tmp_path / "db")
    with running(bridge(which, tmp_path / "db", mosquitto)):
        wait_until(publisher.arrives, "the bridge has begun")
    first = publisher.sent
    for _ in range(3):
        before = len(publisher.stored())
        with running(bridge(which, tmp_path / "db", mosquitto)):
            publisher.publish(500)
            wait_until(lambda before=before: len(publisher.stored()) > before, "some of it is stored")  # type: ignore[misc]
    with running(bridge(which, tmp_path / "db", mosquitto)):
        wait_until(lambda: len([one for one in publisher.stored() if one >= first]) == 1_500, "all is stored")
    assert list(range(first, publisher.sent)) == [one for one in publisher.stored() if one >= first]
    publisher.close()
