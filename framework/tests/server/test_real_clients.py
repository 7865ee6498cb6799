"""Real clients against one server: aiomqtt, gmqtt, paho, mosquitto's programs and MQTT.js."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
from topicstore_conformance.faults.threads import PATIENCE, wait_until
from topicstore_conformance.mqtt.raw_client import NEVER
from topicstore_conformance.mqtt.serving import Serving

HERE = Path(__file__).parent
both = pytest.mark.parametrize("version", [4, 5])
EACH = [(f"{qos}", b"\xc3\xa9%d" % qos, qos) for qos in (0, 1, 2)]
"""The messages that each client publishes to itself: last topic level, payload and QoS."""
PAIRS = [("b", "2"), ("a", "1"), ("b", "2"), ("水", "é")]


def need(module: str, package: str) -> None:
    if importlib.util.find_spec(module) is None:
        pytest.skip(f"needs {package}: pip install {package}")


def tool(name: str, package: str = "mosquitto-clients") -> str:
    found = shutil.which(name, path=f"{os.environ.get('PATH', '')}:/usr/sbin")
    if found is None:
        pytest.skip(f"needs {name}: apt-get install {package}")
    return found


def run(*command: object, expected: int = 0, cwd: Path | None = None) -> str:
    """Run a program and return its output."""
    done = subprocess.run([str(part) for part in command], capture_output=True, text=True, timeout=PATIENCE, cwd=cwd)
    assert done.returncode == expected, done.stdout + done.stderr
    return done.stdout


@both
def test_aiomqtt(mqtt: Serving, name: str, version: int) -> None:
    need("aiomqtt", "aiomqtt")
    import aiomqtt

    async def exchange() -> list[tuple[str, bytes, int]]:
        protocol = aiomqtt.ProtocolVersion.V5 if version == 5 else aiomqtt.ProtocolVersion.V311
        async with aiomqtt.Client("127.0.0.1", mqtt.port, protocol=protocol) as client:
            await client.subscribe(f"{name}/#", qos=2)
            for level, payload, qos in EACH:
                await client.publish(f"{name}/{level}", payload, qos=qos)
            found = []
            async for message in client.messages:
                assert isinstance(message.payload, bytes)
                found.append((str(message.topic).rpartition("/")[2], message.payload, message.qos))
                if len(found) == len(EACH):
                    break
            return found

    assert sorted(asyncio.run(exchange())) == EACH


@both
def test_gmqtt(mqtt: Serving, name: str, version: int) -> None:
    need("gmqtt", "gmqtt")
    import gmqtt
    from gmqtt.mqtt.constants import MQTTv50, MQTTv311

    async def exchange() -> list[tuple[str, bytes, int]]:
        found: list[tuple[str, bytes, int]] = []
        subscribed, all_there = asyncio.Event(), asyncio.Event()

        def received(_client: Any, topic: str, payload: bytes, qos: int, values: dict[str, Any]) -> int:
            found.append((topic.rpartition("/")[2], payload, qos))
            if version == 5:
                assert (values["content_type"], values["user_property"]) == (["text/plain"], PAIRS)
            if len(found) == len(EACH):
                all_there.set()
            return 0

        will = gmqtt.Message(f"{name}-will", b"gone", 2, True, will_delay_interval=30, content_type="text/plain")
        client = gmqtt.Client(f"{name}-gmqtt", will_message=will)
        client.on_message = received
        client.on_subscribe = lambda *_: subscribed.set()
        await client.connect("127.0.0.1", mqtt.port, version=MQTTv50 if version == 5 else MQTTv311)
        client.subscribe(f"{name}/#", qos=2)
        await asyncio.wait_for(subscribed.wait(), PATIENCE)
        for level, payload, qos in EACH:
            client.publish(f"{name}/{level}", payload, qos=qos, content_type="text/plain", user_property=PAIRS)
        await asyncio.wait_for(all_there.wait(), PATIENCE)
        await client.disconnect()
        return found

    assert sorted(asyncio.run(exchange())) == EACH


@both
def test_paho(mqtt: Serving, name: str, version: int) -> None:
    need("paho", "paho-mqtt")
    from topicstore_conformance.mqtt.paho_client import PahoClient, properties

    def prepared(client: Any) -> None:
        """Give the client a will, a user name and a password."""
        delay = properties("WILLMESSAGE", WillDelayInterval=30) if version == 5 else None
        client.will_set(f"{name}-will", b"gone", 2, True, delay)
        client.username_pw_set("user", "secret")

    values = {"ContentType": "text/plain", "ResponseTopic": "answers", "CorrelationData": b"\0\xff"}
    sent = properties("PUBLISH", PayloadFormatIndicator=1, **values) if version == 5 else None
    for pair in PAIRS if version == 5 else ():
        sent.UserProperty = pair
    with PahoClient(mqtt.port, version=version, prepared=prepared) as client:
        numbered = properties("SUBSCRIBE", SubscriptionIdentifier=7) if version == 5 else None
        assert client.subscribe(f"{name}/#", 2, values=numbered) == 2
        for level, payload, qos in EACH:
            client.publish(f"{name}/{level}", payload, qos, properties=sent)
        found = [(message.topic.rpartition("/")[2], message.payload, message.qos) for message in client.received(3)]
        assert sorted(found) == EACH
        if version == 5:
            expected = {**values, "UserProperty": PAIRS, "PayloadFormatIndicator": 1, "SubscriptionIdentifier": [7]}
            for message in client.messages:
                assert {one: getattr(message.properties, one) for one in expected} == expected


@pytest.mark.parametrize("version", ["mqttv311", "mqttv5"])
def test_mosquitto_pub_and_sub(mqtt: Serving, name: str, version: str) -> None:
    """`mosquitto_sub` keeps a session, `mosquitto_pub` publishes lines, and the session then receives them."""
    publish, subscribe = tool("mosquitto_pub"), tool("mosquitto_sub")
    common = ["-p", str(mqtt.port), "-V", version]
    kept = ["-i", f"{name}-sub", "-c", *(["-x", str(NEVER)] if version == "mqttv5" else [])]
    run(subscribe, *common, *kept, "-q", "1", "-t", f"{name}/#", "-E")
    lines = "".join(f"line {number}\n" for number in range(200))
    sent = [publish, *common, "-t", f"{name}/log", "-q", "1", "-l"]
    assert subprocess.run(sent, input=lines, text=True, timeout=PATIENCE).returncode == 0
    assert run(subscribe, *common, *kept, "-q", "1", "-t", f"{name}/#", "-C", "200") == lines


@pytest.mark.parametrize("version", ["mqttv311", "mqttv5"])
def test_mosquitto_sub_replays(mqtt: Serving, name: str, version: str) -> None:
    """`mosquitto_sub` replays by a ``$replay`` topic, and gets messages stored for another session."""
    publish, subscribe = tool("mosquitto_pub"), tool("mosquitto_sub")
    with mqtt.client() as client:
        client.connect(f"{name}-archive", keep=True)
        client.subscribe(f"{name}/#", options=1)
    common = ["-p", str(mqtt.port), "-V", version]
    for number in range(5):
        run(publish, *common, "-t", f"{name}/log", "-q", "1", "-m", str(number))
    for start in ("beginning", "-2h"):
        replayed = run(subscribe, *common, "-q", "1", "-t", f"$replay/{start}/{name}/#", "-C", "5")
        assert replayed.split() == ["0", "1", "2", "3", "4"]


@pytest.mark.parametrize("version", ["mqttv311", "mqttv50"])
def test_a_bridge_of_mosquitto(mqtt: Serving, name: str, version: str, tmp_path: Path) -> None:
    """A mosquitto bridge forwards messages in both directions.

    It first connects with an unknown protocol version, and needs an answer that reports the version as unsupported.
    """
    broker, publish, subscribe = tool("mosquitto", "mosquitto"), tool("mosquitto_pub"), tool("mosquitto_sub")
    (tmp_path / "mosquitto.conf").write_text(f"""
user root
listener 0 socket
allow_anonymous true
connection {name}
address 127.0.0.1:{mqtt.port}
bridge_protocol_version {version}
topic # both 1 here/ {name}/
restart_timeout 1
notifications false
""")
    with mqtt.client() as client:
        client.connect()
        client.publish(f"{name}/theirs", b"1", retain=True)
        client.subscribe(f"{name}/ours", options=1)
        with subprocess.Popen([broker, "-c", "mosquitto.conf"], cwd=tmp_path, stderr=subprocess.DEVNULL) as bridge:
            try:
                wait_until((tmp_path / "socket").is_socket, "the bridge's own clients can connect")
                common = ["--unix", "socket", "-q", "1"]
                run(publish, *common, "-t", "here/ours", "-m", "2", cwd=tmp_path)
                assert client.expect("PUBLISH").payload == b"2"
                assert run(subscribe, *common, "-t", "here/theirs", "-C", "1", cwd=tmp_path) == "1\n"
            finally:
                bridge.kill()


@both
@pytest.mark.parametrize("scheme", ["mqtt", "ws"])
def test_mqtt_js(mqtt: Serving, name: str, version: int, scheme: str) -> None:
    """MQTT.js exchanges messages over TCP and over WebSocket."""
    node = shutil.which("node")
    if node is None:
        pytest.skip("needs node: apt-get install nodejs npm")
    folder = HERE / "mqtt_js"
    if not (folder / "node_modules").is_dir():
        pytest.skip("needs MQTT.js, by: npm install --prefix framework/tests/server/mqtt_js")
    url = f"mqtt://127.0.0.1:{mqtt.port}" if scheme == "mqtt" else f"ws://{mqtt.ready['ws'][0]}/mqtt"
    answer = json.loads(run(node, folder / "exchange.mjs", url, version, name))
    assert answer["granted"] == 2
    found = sorted((topic.rpartition("/")[2], payload.encode(), qos) for topic, payload, qos in answer["found"])
    assert found == EACH
