"""``topicstore serve`` and ``topicstore users`` as people and scripts run them, with real clients."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import topicstore as ts
from topicstore.server.addresses import Address
from topicstore.server.introduction import introduction
from topicstore.server.readiness import notify, ready_line
from topicstore.server.settings import AuthenticationSettings, AuthorizationSettings, ListenerSettings, ServerSettings
from topicstore_conformance.faults.threads import wait_until

pytest.importorskip("rocksdict", reason='needs rocksdict: pip install "topicstore[rocksdb]"')
mqtt = pytest.importorskip("paho.mqtt.client", reason="needs paho-mqtt: pip install paho-mqtt")

PATIENCE = 60.0
"""Seconds after which a test hangs and fails; nothing is measured by it."""
GUIDE = Path(__file__).parents[2] / "guides" / "server.md"
HERE = ("--listen", "127.0.0.1:0")


def program(*arguments: str, **more: Any) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "topicstore.cli", *arguments],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        **more,
    )


@contextlib.contextmanager
def server(*arguments: str, **more: Any) -> Iterator[tuple[subprocess.Popen[str], dict[str, Any]]]:
    """Run a server that says in JSON where it listens; kill it in the end if it still runs."""
    with program("serve", *arguments, "--print-ready", **more) as process:
        try:
            assert process.stdout is not None
            line = process.stdout.readline()
            if not line:
                raise AssertionError(process.communicate(timeout=PATIENCE)[1])
            yield process, json.loads(line)
        finally:
            process.kill()


def ended(process: subprocess.Popen[str]) -> tuple[int, str, str]:
    """Return how a program ends, and what it still wrote."""
    out, err = process.communicate(timeout=PATIENCE)
    return process.returncode, out, err


def port_of(ready: dict[str, Any], scheme: str = "mqtt") -> int:
    return Address(ready[scheme][0]).port


class Client:
    """A client of paho, whose callbacks a test waits for."""

    def __init__(self, port: int, client_id: str = "", **options: Any) -> None:
        self.came: list[tuple[str, bytes]] = []
        self.changed = threading.Condition()
        self.answer: Any = None
        self.ends: list[int] = []
        self.granted = False
        transport = options.get("transport", "tcp")
        self.paho = mqtt.Client(
            mqtt.CallbackAPIVersion.VERSION2,
            client_id,
            protocol=options.get("protocol", mqtt.MQTTv5),
            transport=transport,
            clean_session=options.get("clean_session"),
        )
        if "user" in options:
            self.paho.username_pw_set(options["user"], options.get("password"))
        self.paho.on_connect = self._on_connect
        self.paho.on_disconnect = self._on_disconnect
        self.paho.on_message = self._on_message
        self.paho.on_subscribe = self._on_subscribe
        self.paho.connect("127.0.0.1", port)
        self.paho.loop_start()

    def _note(self, change: Any) -> None:
        with self.changed:
            change()
            self.changed.notify_all()

    def _on_connect(self, _: Any, __: Any, ___: Any, reason: Any, ____: Any) -> None:
        self._note(lambda: setattr(self, "answer", reason.value))

    def _on_disconnect(self, _: Any, __: Any, ___: Any, reason: Any, ____: Any) -> None:
        self._note(lambda: self.ends.append(reason.value))

    def _on_message(self, _: Any, __: Any, message: Any) -> None:
        self._note(lambda: self.came.append((message.topic, message.payload)))

    def _on_subscribe(self, *_: Any) -> None:
        self._note(lambda: setattr(self, "granted", True))

    def wait(self, condition: Any) -> None:
        with self.changed:
            assert self.changed.wait_for(condition, PATIENCE)

    def subscribe(self, topic_filter: str) -> None:
        self.wait(lambda: self.answer is not None)
        self.granted = False
        self.paho.subscribe(topic_filter, qos=1)
        self.wait(lambda: self.granted)

    def publish(self, topic: str, payload: bytes) -> None:
        self.wait(lambda: self.answer is not None)
        self.paho.publish(topic, payload, qos=1).wait_for_publish(PATIENCE)

    def close(self) -> None:
        self.paho.disconnect()
        self.paho.loop_stop()


class Kept(Client):
    """A client of MQTT 3.1.1 whose session outlives its connection."""

    def __init__(self, port: int) -> None:
        super().__init__(port, "display", protocol=mqtt.MQTTv311, clean_session=False)


def test_a_server_that_is_ended_tells_its_clients_and_keeps_their_messages(tmp_path: Path) -> None:
    """SIGTERM: DISCONNECT with 0x8B, exit code 0; a client that was away gets its message from the next run."""
    with server(str(tmp_path / "data"), *HERE) as (process, ready):
        assert {"mqtt", "ws", "http", "pid"} == set(ready)
        assert process.pid == ready["pid"]
        kept = Kept(port_of(ready))
        kept.subscribe("home/#")
        kept.close()
        client = Client(port_of(ready), "sender")
        client.publish("home/hall", b"one")
        process.send_signal(signal.SIGTERM)
        client.wait(lambda: client.ends)
        client.close()
        assert 0x8B == client.ends[0]
        code, out, _ = ended(process)
        assert (0, "") == (code, out)
    with server(str(tmp_path / "data"), *HERE) as (_, ready):
        came = Kept(port_of(ready))
        came.wait(lambda: came.came)
        assert [("home/hall", b"one")] == came.came
        came.close()


@pytest.mark.parametrize("transport", ["tcp", "websockets"])
def test_a_late_client_replays(tmp_path: Path, transport: str) -> None:
    """Over TCP and WebSocket, from the beginning, with the topic form that every client can use."""
    with server(str(tmp_path / "data"), *HERE, "--listen", "ws://127.0.0.1:0/mqtt") as (_, ready):
        port = port_of(ready, "mqtt" if transport == "tcp" else "ws")
        kept = Kept(port_of(ready))  # so that what is published is stored
        kept.subscribe("home/#")
        sender = Client(port, "sender", transport=transport)
        for number in range(3):
            sender.publish("home/hall", b"%d" % number)
        late = Client(port, "late", transport=transport)
        late.subscribe("$replay/beginning/home/+")
        late.wait(lambda: len(late.came) == 3)
        assert [("home/hall", b"%d" % number) for number in range(3)] == late.came
        for client in (kept, sender, late):
            client.close()


def test_a_person_is_told_where_and_how(tmp_path: Path) -> None:
    """Without --print-ready plain words; Ctrl-C ends it in order too."""
    with program("serve", *HERE, cwd=tmp_path) as process:
        assert process.stdout is not None
        lines = []
        for line in process.stdout:
            lines.append(line)
            if "Ctrl-C" in line:
                break
        process.send_signal(signal.SIGINT)
        assert 0 == ended(process)[0]
    text = "".join(lines)
    assert re.search(r"mqtt://127\.0\.0\.1:\d+", text)
    assert str(tmp_path / "topicstore-data") in text
    assert "survives the death of this process, not power loss" in text
    assert "mosquitto_pub" in text
    assert "paho" in text
    assert (tmp_path / "topicstore-data").is_dir()


@pytest.mark.parametrize("more", [(), ("--print-ready",)])
def test_whether_anybody_reads_what_it_says_does_not_matter(tmp_path: Path, more: tuple[str, ...]) -> None:
    """Clients are served; the log has it."""
    with program("serve", str(tmp_path / "data"), *HERE, *more) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.close()
        process.stdout = None
        assert "nobody reads it" in json.loads(process.stderr.readline())["event"]
        process.send_signal(signal.SIGTERM)
        assert 0 == ended(process)[0]


def test_a_second_server_on_the_database_is_refused(tmp_path: Path) -> None:
    """With exit code 4, and without disturbing the first."""
    with server(str(tmp_path / "data"), *HERE) as (first, _), program("serve", str(tmp_path / "data"), *HERE) as second:
        code, out, err = ended(second)
        assert (4, "") == (code, out)
        assert err.startswith("error: ")
        assert first.poll() is None


def test_what_is_wrong_is_one_line_and_a_code(tmp_path: Path) -> None:
    """Settings, arguments, an address in use, something that is no database."""
    (tmp_path / "bad.toml").write_text("[limits]\npacket_sise = '1MB'\n")
    (tmp_path / "file").touch()
    with socket.create_server(("127.0.0.1", 0)) as taken:
        busy = f"127.0.0.1:{taken.getsockname()[1]}"
        for code, reason, arguments in (
            (2, "limits has no key 'packet_sise'; is 'packet_size' meant?", ["--config", "bad.toml"]),
            (2, "'1883' is not HOST:PORT", ["--listen", "1883"]),
            (2, "neither HOST:PORT nor ws://HOST:PORT/PATH", ["--listen", "http://127.0.0.1:0"]),
            (2, f"can't listen on {busy}: ", ["data", "--listen", busy]),
            (3, "", ["file", *HERE]),
        ):
            with program("serve", *arguments, cwd=tmp_path) as process:
                found, out, err = ended(process)
                assert (code, "") == (found, out), err
                assert re.fullmatch(rf"error: .*{re.escape(reason)}.*\n", err), err


def test_users_and_rules(tmp_path: Path) -> None:
    """A user that is added while the server runs is let in, and may do what the rules say."""
    config = tmp_path / "server.toml"
    config.write_text(
        '[authentication]\nanonymous = "never"\npassword_file = "users"\n'
        '[[authorization.rules]]\npermission = "allow"\ntopics = ["%u/#"]\n'
    )

    def users(*arguments: str, password: str = "") -> str:
        done = subprocess.run(
            [sys.executable, "-m", "topicstore.cli", "users", *arguments, "--config", str(config)],
            input=password,
            capture_output=True,
            text=True,
        )
        assert 0 == done.returncode, done.stderr
        return done.stdout

    assert "added ann" in users("add", "ann", password="pw-one\n")
    with server(str(tmp_path / "data"), "--config", str(config), *HERE) as (process, ready):
        port = port_of(ready)
        for user, password, answer in (
            ("ann", "pw-one", 0),
            ("ann", "pw-none", 0x86),
            ("bob", "pw-two", 0x86),
            (None, None, 0x87),
        ):
            client = Client(port, **({} if user is None else {"user": user, "password": password}))
            client.wait(lambda client=client: client.answer is not None)
            assert answer == client.answer
            client.close()
        assert "added bob" in users("add", "bob", password="pw-two\r\n")
        assert ["ann", "bob"] == users("list").split()
        bob = Client(port, user="bob", password="pw-two")
        bob.subscribe("#")
        bob.subscribe("bob/#")
        bob.publish("ann/x", b"no")
        bob.publish("bob/x", b"yes")
        bob.wait(lambda: bob.came)
        assert [("bob/x", b"yes")] == bob.came
        users("remove", "bob")
        gone = Client(port, user="bob", password="pw-two")
        gone.wait(lambda: gone.answer is not None)
        assert 0x86 == gone.answer
        for client in (bob, gone):
            client.close()
        process.send_signal(signal.SIGTERM)
        code, _, err = ended(process)
        assert 0 == code
        records = [json.loads(line) for line in err.splitlines()]
        assert records
        assert all({"time", "level", "logger", "event"} <= set(record) for record in records)
        assert "pw-" not in err


def test_users_that_cannot_be_are_refused(tmp_path: Path) -> None:
    """Names and passwords that can't be are refused with code 2, and nothing is written."""
    for arguments, password in ((("add", ""), "x\n"), (("add", "ann"), ""), (("remove", "ann"), "")):
        done = subprocess.run(
            [sys.executable, "-m", "topicstore.cli", "users", *arguments, "--file", str(tmp_path / "users")],
            input=password,
            capture_output=True,
            text=True,
        )
        assert 2 == done.returncode
        assert done.stderr.startswith("error: ")
        assert [] == list(tmp_path.iterdir())


def test_what_the_settings_name_is_stored_though_nobody_waits_for_it(tmp_path: Path) -> None:
    """A client that comes after a kill can replay that, and nothing else."""
    (tmp_path / "server.toml").write_text(
        '[durable_storage.messages]\ndata_dir = "data"\n[[durable_sessions.persistence]]\ntopic_filter = "home/#"\n'
    )
    config = ("--config", str(tmp_path / "server.toml"), *HERE)
    with server(*config) as (process, ready):
        sender = Client(port_of(ready), "sender")
        for topic in ("elsewhere", "home/hall"):
            sender.publish(topic, topic.encode())
        process.kill()
        sender.close()
    with server(*config) as (_, ready):
        late = Client(port_of(ready), "late")
        late.subscribe("$replay/beginning/#")
        late.wait(lambda: late.came)
        assert [("home/hall", b"home/hall")] == late.came
        late.close()


def test_a_changed_layout_begins_a_generation_at_the_start(tmp_path: Path) -> None:
    """The old ones stay; a further storage is made and held open, and other shards are refused."""
    config = tmp_path / "server.toml"
    arguments = ("--config", str(config), *HERE)
    config.write_text(
        '[durable_storage.messages]\ndata_dir = "data"\nn_shards = 2\n'
        'layout = { type = "wildcard_optimized", epoch_bits = 19 }\n'
        '[durable_storage.more]\ndata_dir = "more"\nlayout = { type = "skipstream" }\n'
    )
    with server(*arguments) as (process, _):
        with pytest.raises(ts.DatabaseLockedError):
            ts.open(tmp_path / "more")
        process.send_signal(signal.SIGTERM)
        assert 0 == ended(process)[0]
    with ts.open(tmp_path / "more", "r") as more:
        assert "skipstream" == more.generations()[0].layout
    config.write_text('[durable_storage.messages]\ndata_dir = "data"\nlayout = { type = "block" }\n')
    with server(*arguments) as (process, _):
        process.send_signal(signal.SIGTERM)
        assert 0 == ended(process)[0]
    with ts.open(tmp_path / "data", "r") as db:
        layouts = [(one.layout, one.options.get("epoch_bits")) for one in db.generations()]
        assert [("wildcard_optimized", 19), ("block", None)] == layouts
    config.write_text('[durable_storage.messages]\ndata_dir = "data"\nn_shards = 3\n')
    with program("serve", *arguments) as process:
        code, _, err = ended(process)
    assert 2 == code
    assert "n_shards: the database was created with 2, which can't be changed to 3" in err


def test_sighup_reads_the_settings_again(tmp_path: Path) -> None:
    """What it changed is in the log; a bad file changes nothing, and is in the log too."""
    config, log = tmp_path / "server.toml", tmp_path / "log"
    config.write_text('[log]\nfile = "log"\n')
    with server(str(tmp_path / "data"), "--config", str(config), *HERE) as (process, ready):
        for text, event in (
            ("[limits]\nconections = 0\n", "settings and certificates stay as they were"),
            ("[limits]\nconnections = 1\n", "settings and certificates were read again"),
        ):
            config.write_text(f'[log]\nfile = "log"\n{text}')
            process.send_signal(signal.SIGHUP)
            wait_until(lambda event=event: event in log.read_text(), event)  # type: ignore[misc]
        lines = [json.loads(line) for line in log.read_text().splitlines()]
        [told] = [line for line in lines if "changed" in line]
        assert (["limits.connections"], []) == (told["changed"], told["needs_restart"])
        first = Client(port_of(ready), "first")
        first.wait(lambda: first.answer is not None)
        second = Client(port_of(ready), "second")
        second.wait(lambda: second.answer is not None)
        assert (0, 0x97) == (first.answer, second.answer)
        first.close()
        second.close()


@pytest.mark.skipif(not hasattr(socket, "AF_UNIX"), reason="needs Unix sockets")
def test_a_service_manager_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the socket that it names; one that isn't there doesn't matter."""
    path = tmp_path / "notify"
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.bind(str(path))
        environment = {**os.environ, "NOTIFY_SOCKET": str(path)}
        with server(str(tmp_path / "data"), *HERE, env=environment) as (process, _):
            manager.settimeout(PATIENCE)
            assert b"READY=1" == manager.recv(100)
            process.send_signal(signal.SIGTERM)
            assert b"STOPPING=1" == manager.recv(100)
            assert 0 == ended(process)[0]
    monkeypatch.setenv("NOTIFY_SOCKET", str(tmp_path / "nobody"))
    assert not notify("READY=1")
    monkeypatch.delenv("NOTIFY_SOCKET")
    assert not notify("READY=1")


def test_the_line_for_scripts() -> None:
    """Addresses by scheme; mqtt, ws and http are always there, so that scripts needn't ask."""
    line = json.loads(ready_line([("mqtt", ["a:1"]), ("mqtts", ["a:2"]), ("mqtt", ["a:3"])]))
    assert {"mqtt": ["a:1", "a:3"], "mqtts": ["a:2"], "ws": [], "http": [], "pid": os.getpid()} == line


def test_who_may_is_said_plainly() -> None:
    """What a server off this machine grants is not what one on it does."""

    def said(settings: ServerSettings) -> str:
        return introduction(
            settings, Path("/d"), durability="sync", stored_by="b", persisted=["a/#"], urls=["mqtt://h:1"], mqtt=["h:1"]
        )

    everywhere = {"mqtt": ListenerSettings(listen=Address("0.0.0.0:1883"))}
    assert "survives power loss" in said(ServerSettings())
    assert "what is published to a/# in /d" in said(ServerSettings())
    assert "Nobody else can connect." in said(ServerSettings())
    assert "Others may do nothing until" in said(ServerSettings(listeners=everywhere))
    closed = ServerSettings(listeners=everywhere, authentication=AuthenticationSettings(anonymous="never"))
    assert "Every client needs a password or a certificate" in said(closed)
    assert "-u USER -P PASSWORD -i display" in said(closed)
    assert "'password': 'PASSWORD'}" in said(closed)
    assert "PASSWORD" not in said(ServerSettings())
    denied = ServerSettings(authorization=AuthorizationSettings(unlisted="deny"))
    assert "everything" not in said(denied)
    assert "what they may do, the section [authorization] says" in said(denied)


@pytest.mark.skipif(
    shutil.which("mosquitto_sub") is None, reason="needs mosquitto_sub: apt-get install mosquitto-clients"
)
def test_the_guides_commands_of_mosquitto_are_true(tmp_path: Path) -> None:
    """Each command of the guide, in its order, against one server; a subscriber ends when it has what it waits for."""
    commands = re.findall(r"^mosquitto_.*$", GUIDE.read_text(), re.MULTILINE)
    assert len(commands) >= 4
    with server(str(tmp_path / "data"), *HERE) as (_, ready):
        for command in commands:
            name, *arguments = shlex.split(command)
            done = subprocess.run(
                [name, "-p", str(port_of(ready)), *arguments], capture_output=True, text=True, timeout=PATIENCE
            )
            assert 0 == done.returncode, (command, done.stderr)
            if "home/" in command and "-C" in arguments:
                assert "21.5\n" == done.stdout, command
