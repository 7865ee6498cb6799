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
import time
import urllib.request
from pathlib import Path
from typing import Any

import pytest
import topicstore as ts
from click.testing import CliRunner
from topicstore.cli import cli
from topicstore.server.config.model import (
    AuthenticationSettings,
    AuthorizationSettings,
    ListenerSettings,
    ServerSettings,
)
from topicstore.server.config.units import Address
from topicstore.server.running import banner, notify, ready_line
from topicstore_conformance.faults.threads import PATIENCE, wait_until
from topicstore_conformance.mqtt.serving import serving

pytest.importorskip("rocksdict", reason='needs rocksdict: pip install "topicstore[rocksdb]"')
pytest.importorskip("paho.mqtt.client", reason="needs paho-mqtt: pip install paho-mqtt")
from topicstore_conformance.mqtt.paho_client import PahoClient

GUIDE = Path(__file__).parents[2] / "guides" / "server.md"
COMMAND = [sys.executable, "-m", "topicstore.cli"]
HERE = ("--listen", "127.0.0.1:0")


def program(*arguments: str, **more: Any) -> subprocess.Popen[str]:
    """Start a command."""
    pipes = dict.fromkeys(("stdout", "stderr"), subprocess.PIPE)
    return subprocess.Popen([*COMMAND, *arguments], stdin=subprocess.DEVNULL, text=True, **pipes, **more)


def run(*arguments: str, given: str = "") -> tuple[int, str, str]:
    """Run a command to its end; return its exit code, stdout and stderr."""
    done = CliRunner().invoke(cli, arguments, input=given)
    return done.exit_code, done.stdout, done.stderr


def test_a_server_that_is_ended_tells_its_clients_and_keeps_their_messages(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On SIGTERM the server sends DISCONNECT 0x8B and exits with 0; an absent client gets its message later.

    The server notifies a service manager by a socket that the environment names; a missing socket is ignored.
    """
    path = str(tmp_path / "notify")
    environment = {**os.environ, "NOTIFY_SOCKET": path}
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.bind(path)
        manager.settimeout(PATIENCE)
        with serving(tmp_path / "data", env=environment) as server:
            assert {"mqtt", "ws", "http", "pid"} == set(server.ready)
            assert b"READY=1" == manager.recv(100)
            with PahoClient(server.port, "display", version=4, clean=False) as kept:
                kept.subscribe("home/#")
            with PahoClient(server.port, "sender") as client:
                client.publish("home/hall", b"one")
                assert 0 == server.stop()
                assert 0x8B == client.ended()
            assert b"STOPPING=1" == manager.recv(100)
            server.start()
            with PahoClient(server.port, "display", version=4, clean=False) as kept:
                assert ["one"] == kept.payloads(1)
    monkeypatch.setenv("NOTIFY_SOCKET", str(tmp_path / "nobody"))
    assert not notify("READY=1")
    monkeypatch.delenv("NOTIFY_SOCKET")
    assert not notify("READY=1")


def test_a_reload_is_announced_to_the_service_manager(tmp_path: Path) -> None:
    """On SIGHUP the server sends RELOADING=1 with a later monotonic time, and READY=1 when it has read its settings."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.bind(str(tmp_path / "notify"))
        manager.settimeout(PATIENCE)
        with serving(tmp_path / "data", env={**os.environ, "NOTIFY_SOCKET": str(tmp_path / "notify")}) as server:
            assert b"READY=1" == manager.recv(100)
            before = time.monotonic_ns() // 1_000
            os.kill(server.ready["pid"], signal.SIGHUP)
            reloading = dict(line.split(b"=") for line in manager.recv(100).splitlines())
            assert b"1" == reloading[b"RELOADING"]
            assert before <= int(reloading[b"MONOTONIC_USEC"]) <= time.monotonic_ns() // 1_000
            assert b"READY=1" == manager.recv(100)


def test_the_banner_says_where_and_how_to_connect(tmp_path: Path) -> None:
    """Without ``--print-ready`` the server prints instructions in plain words; Ctrl-C stops it properly."""
    with program("serve", *HERE, cwd=tmp_path) as process:
        assert process.stdout is not None
        lines = []
        for line in process.stdout:
            lines.append(line)
            if "Ctrl-C" in line:
                break
        process.send_signal(signal.SIGINT)
        assert 0 == process.wait(PATIENCE)
    text = "".join(lines)
    assert re.search(r"mqtt://127\.0\.0\.1:\d+", text)
    for part in (str(tmp_path / "topicstore-data"), "survives the death of this process, not power loss"):
        assert part in text
    assert "mosquitto_pub" in text
    assert "paho" in text
    assert (tmp_path / "topicstore-data").is_dir()


@pytest.mark.parametrize("more", [(), ("--print-ready",)])
def test_whether_anybody_reads_what_it_says_does_not_matter(tmp_path: Path, more: tuple[str, ...]) -> None:
    """If the server's stdout isn't read, clients are served, and the log says so."""
    with program("serve", str(tmp_path / "data"), *HERE, *more) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.close()
        process.stdout = None
        assert any("nobody reads it" in json.loads(line)["event"] for line in process.stderr)
        process.send_signal(signal.SIGTERM)
        assert 0 == process.wait(PATIENCE)


def test_a_second_server_on_the_database_is_refused(tmp_path: Path) -> None:
    """A second server on the same database exits with 4, and doesn't disturb the first."""
    with serving(tmp_path / "data"):
        code, out, err = run("serve", str(tmp_path / "data"), *HERE)
        assert (4, "", "error: ") == (code, out, err[:7])


def test_what_is_wrong_is_one_line_and_a_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each invalid setting, argument, address or database gives one line on stderr and an exit code."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "bad.toml").write_text("[limits]\npacket_sise = '1MB'\n")
    (tmp_path / "file").touch()
    (tmp_path / "tls.toml").write_text(
        '[listeners.a]\nlisten = "127.0.0.1:0"\ntls = { certificate = "no.pem", key = "no.key" }\n'
    )
    with socket.create_server(("127.0.0.1", 0)) as taken:
        busy = f"127.0.0.1:{taken.getsockname()[1]}"
        for code, reason, arguments in (
            (2, "limits has no key 'packet_sise'; is 'packet_size' meant?", ["--config", "bad.toml"]),
            (2, "'1883' is not HOST:PORT", ["--listen", "1883"]),
            (2, "neither HOST:PORT nor ws://HOST:PORT/PATH", ["--listen", "http://127.0.0.1:0"]),
            (2, f"can't listen on {busy}: ", ["data", "--listen", busy]),
            (2, f"can't listen on {busy} for HTTP: ", ["data", *HERE, "--http", HERE[1], "--http", busy]),
            (2, "is for the listener mqtt@127.0.0.1:1 already", ["data", *("--listen", "127.0.0.1:1") * 2]),
            (2, "there is no TLS file", ["data", "--config", "tls.toml"]),
            (3, "", ["file", *HERE]),
        ):
            found, out, err = run("serve", *arguments)
            assert (code, "") == (found, out), err
            assert re.fullmatch(rf"error: .*{re.escape(reason)}.*\n", err), err
            assert not (tmp_path / "data").exists(), "a server that can't serve leaves no new database behind"


def test_http_is_served_on_several_addresses(tmp_path: Path) -> None:
    """HTTP is served on several addresses, given by settings or by options."""
    (tmp_path / "server.toml").write_text('[http]\nlisten = ["127.0.0.1:0", "127.0.0.2:0"]\n')
    for more in (("--config", str(tmp_path / "server.toml")), ("--http", "127.0.0.1:0", "--http", "127.0.0.2:0")):
        with serving(tmp_path / "data", *more, listen="--http" in more, cwd=tmp_path) as server:
            found = server.ready["http"]
            assert ["127.0.0.1", "127.0.0.2"] == [Address(one).host for one in found]
            for one in found:
                with urllib.request.urlopen(f"http://{one}/health/live", timeout=PATIENCE) as answer:
                    assert 200 == answer.status


def test_users_and_rules(tmp_path: Path) -> None:
    """A user added while the server runs can log in, and access rules apply to this user."""
    config = tmp_path / "server.toml"
    config.write_text(
        '[authentication]\nanonymous = "never"\npassword_file = "users"\n'
        '[[authorization.rules]]\npermission = "allow"\ntopics = ["%u/#"]\n'
    )

    def users(*arguments: str, password: str = "") -> str:
        code, out, err = run("users", *arguments, "--config", str(config), given=password)
        assert 0 == code, err
        return out

    def client(user: str | None, password: str | None) -> PahoClient:
        return PahoClient(server.port, prepared=lambda one: user and one.username_pw_set(user, password))

    assert "added ann" in users("add", "ann", password="pw-one\n")
    with serving(tmp_path / "data", "--config", str(config)) as server:
        for user, password, answer in (
            ("ann", "pw-one", 0),
            ("ann", "pw-none", 0x86),
            ("bob", "pw-two", 0x86),
            (None, None, 0x87),
        ):
            with client(user, password) as one:
                assert answer == one.answer
        assert "added bob" in users("add", "bob", password="pw-two\r\n")
        assert ["ann", "bob"] == users("list").split()
        with client("bob", "pw-two") as bob:
            assert [0x87, 1] == [bob.subscribe("#"), bob.subscribe("bob/#")]
            assert [0x87, 0] == [bob.publish("ann/x", b"no"), bob.publish("bob/x", b"yes")]
            assert ["yes"] == bob.payloads(1)
        users("remove", "bob")
        with client("bob", "pw-two") as gone:
            assert 0x86 == gone.answer
        assert 0 == server.stop()
        records = [json.loads(line) for line in server.log().splitlines()]
        assert records
        assert all({"time", "level", "logger", "event"} <= set(record) for record in records)
        assert "pw-" not in server.log()


def test_users_that_cannot_be_are_refused(tmp_path: Path) -> None:
    """Invalid user names and passwords are refused with exit code 2, and nothing is written."""
    for arguments, password in ((("add", ""), "x\n"), (("add", "ann"), ""), (("remove", "ann"), "")):
        code, _, err = run("users", *arguments, "--file", str(tmp_path / "users"), given=password)
        assert (2, "error: ") == (code, err[:7])
        assert [] == list(tmp_path.iterdir())


def test_what_the_settings_name_is_stored_though_nobody_waits_for_it(tmp_path: Path) -> None:
    """Only messages that the persistence rules select are stored, and survive a kill.

    A client then replays them over WebSocket.
    """
    (tmp_path / "server.toml").write_text(
        '[durable_storage.messages]\ndata_dir = "data"\n[[durable_sessions.persistence]]\ntopic_filter = "home/#"\n'
    )
    more = ("--config", str(tmp_path / "server.toml"), "--listen", "ws://127.0.0.1:0/mqtt")
    with serving(None, *more) as server:

        def client(name: str) -> PahoClient:
            return PahoClient(Address(server.ready["ws"][0]).port, name, transport="websockets")

        with client("sender") as sender:
            for topic in ("elsewhere", "home/hall"):
                sender.publish(topic, topic)
        server.restart()
        with client("late") as late:
            late.subscribe("$replay/beginning/#")
            assert ["home/hall"] == late.payloads(1)


def test_a_changed_layout_begins_a_generation_at_the_start(tmp_path: Path) -> None:
    """A changed layout begins a generation at the next start, and the earlier generations stay.

    An additional storage is created and held open. A changed number of shards is refused.
    """
    config = tmp_path / "server.toml"
    config.write_text(
        '[durable_storage.messages]\ndata_dir = "data"\nn_shards = 2\n'
        'layout = { type = "wildcard_optimized", epoch_bits = 19 }\n'
        '[durable_storage.more]\ndata_dir = "more"\nlayout = { type = "skipstream" }\n'
    )
    with serving(None, "--config", str(config)) as server:
        with pytest.raises(ts.DatabaseLockedError):
            ts.open(tmp_path / "more")
        assert 0 == server.stop()
        with ts.open(tmp_path / "more", "r") as more:
            assert "skipstream" == more.generations()[0].layout
        config.write_text('[durable_storage.messages]\ndata_dir = "data"\nlayout = { type = "block" }\n')
        server.start()
        assert 0 == server.stop()
    with ts.open(tmp_path / "data", "r") as db:
        layouts = [(one.layout, one.options.get("epoch_bits")) for one in db.generations()]
        assert [("wildcard_optimized", 19), ("block", None)] == layouts
    config.write_text('[durable_storage.messages]\ndata_dir = "data"\nn_shards = 3\n')
    code, _, err = run("serve", "--config", str(config), *HERE)
    assert 2 == code
    assert "n_shards: the database was created with 2, which can't be changed to 3" in err


@pytest.fixture
def settings_to_come(tmp_path: Path) -> Path:
    """A settings file that is a named pipe, for which the server waits whenever it reads its settings."""
    path = tmp_path / "settings"
    os.mkfifo(path)
    return path


SMALL = f'[listeners.m]\nlisten = "{HERE[1]}"\n[log]\nfile = "log"\n[limits]\nconnections = %d\n'


def test_sighup_while_it_starts_is_heeded_once_it_serves(tmp_path: Path, settings_to_come: Path) -> None:
    """A SIGHUP during the start reloads settings once the server serves; a SIGHUP during the stop is ignored."""
    log = tmp_path / "log"
    with program("serve", "data", "--config", str(settings_to_come), "--print-ready", cwd=tmp_path) as process:
        with settings_to_come.open("w") as settings:  # opening the pipe blocks until the server reads
            process.send_signal(signal.SIGHUP)
            settings.write(SMALL % 5)
        assert process.stdout is not None
        port = Address(json.loads(process.stdout.readline())["mqtt"][0]).port
        with settings_to_come.open("w") as settings:
            settings.write(SMALL % 1)
        wait_until(lambda: "were read again" in log.read_text(), "the reload")
        with PahoClient(port, "first") as first, PahoClient(port, "second") as second:
            assert (0, 0x97) == (first.answer, second.answer)
        # two signals are pending at the same time
        for number in (signal.SIGSTOP, signal.SIGTERM, signal.SIGHUP, signal.SIGCONT):
            process.send_signal(number)
        while process.poll() is None:
            process.send_signal(signal.SIGHUP)
            # without this pause, the kernel would handle signals only, and start no thread of the server
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(0.001)
        assert 0 == process.returncode
        assert process.stderr is not None
        assert "" == process.stderr.read()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_server_that_is_ended_while_it_starts_ends_in_order(
    tmp_path: Path, settings_to_come: Path, number: signal.Signals
) -> None:
    """A server stopped during its start never serves, creates no database and exits with 0."""
    with program("serve", "data", "--config", str(settings_to_come), "--print-ready", cwd=tmp_path) as process:
        with settings_to_come.open("w") as settings:
            process.send_signal(number)
            settings.write(SMALL % 5)
        assert ("", "") == process.communicate(timeout=PATIENCE)
        assert 0 == process.returncode
        assert not (tmp_path / "data").exists()


def test_a_pipe_that_nobody_reads_does_not_keep_it_from_ending(tmp_path: Path) -> None:
    """A full stderr pipe without a reader keeps the server neither from serving nor from stopping."""
    reads, writes = os.pipe()
    os.set_blocking(writes, False)
    with contextlib.suppress(BlockingIOError):
        while True:
            os.write(writes, bytes(512))
    os.set_blocking(writes, True)
    command = [*COMMAND, "serve", "data", *HERE, "--print-ready"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=writes, text=True, cwd=tmp_path) as process:
        assert process.stdout is not None
        port = Address(json.loads(process.stdout.readline())["mqtt"][0]).port
        for _ in range(2):
            with PahoClient(port) as client:
                assert 0 == client.answer
        process.send_signal(signal.SIGTERM)
        assert 0 == process.wait(PATIENCE)
    for end in (reads, writes):
        os.close(end)


def test_sighup_opens_the_log_anew(tmp_path: Path) -> None:
    """SIGHUP reopens the log file, as log rotation expects, although nothing is logged at this level."""
    log = tmp_path / "log"
    (tmp_path / "server.toml").write_text('[log]\nfile = "log"\nlevel = "error"\n')
    with serving(tmp_path / "data", "--config", str(tmp_path / "server.toml")) as server:
        log.rename(tmp_path / "log.1")
        server.signal(signal.SIGHUP)
        wait_until(log.exists, "the new log")


def test_sighup_reads_the_settings_again(tmp_path: Path) -> None:
    """SIGHUP reloads the settings and logs the changes; a bad or empty file changes nothing and is logged."""
    config, log = tmp_path / "server.toml", tmp_path / "log"
    config.write_text('[log]\nfile = "log"\n')
    with serving(tmp_path / "data", "--config", str(config)) as server:
        for text, event in (
            ("[limits]\nconections = 0\n", "settings and certificates stay as they were"),
            ("[limits]\nconnections = 1\n", "settings and certificates were read again"),
        ):
            config.write_text(f'[log]\nfile = "log"\n{text}')
            server.signal(signal.SIGHUP)
            wait_until(lambda event=event: event in log.read_text(), event)  # type: ignore[misc]
        lines = [json.loads(line) for line in log.read_text().splitlines()]
        [told] = [line for line in lines if "changed" in line]
        assert (["limits.connections"], []) == (told["changed"], told["needs_restart"])
        config.write_text("")
        server.signal(signal.SIGHUP)
        wait_until(lambda: "is empty" in log.read_text(), "is empty")
        with PahoClient(server.port, "first") as first, PahoClient(server.port, "second") as second:
            assert (0, 0x97) == (first.answer, second.answer)


def test_the_line_for_scripts() -> None:
    """The line for scripts lists addresses by scheme; mqtt, ws and http are always present."""
    line = json.loads(ready_line([("mqtt", ["a:1"]), ("mqtts", ["a:2"]), ("mqtt", ["a:3"])]))
    assert {"mqtt": ["a:1", "a:3"], "mqtts": ["a:2"], "ws": [], "http": [], "pid": os.getpid()} == line


def test_who_may_is_said_plainly() -> None:
    """The banner states which clients may connect, for local and for remote listeners."""

    def said(settings: ServerSettings) -> str:
        return banner(
            settings,
            Path("/d"),
            durability="sync",
            stored_by="b",
            kept=["messages published to a/# are stored"],
            stores=bool(settings.durable_sessions.persistence),
            urls=["mqtt://h:1"],
            mqtt=["h:1"],
        )

    everywhere = {"mqtt": ListenerSettings(listen=Address("0.0.0.0:1883"))}
    assert "survives power loss" in said(ServerSettings())
    assert "    Messages published to a/# are stored.\n" in said(ServerSettings())
    assert "topicstore serve --keep 30d" in said(ServerSettings())
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


def _sentences(path: Path) -> str:
    with ts.open(path, "r") as db:
        return "; ".join(db.info().kept)


def test_what_is_kept_is_said_and_true(tmp_path: Path) -> None:
    """A server without rules says that it stores nothing for good; ``--store`` and ``--keep`` add rules that stay."""
    path = tmp_path / "data"
    with serving(path) as server, PahoClient(server.port, "sender") as client:
        client.publish("a", b"1")
    said = _sentences(path)
    assert "no rule stores messages: a message is stored only if a session waits for it" in said
    assert (
        "removed once no session needs them, at the earliest after 10 minutes; "
        "all other stored messages are kept for ever" in said
    )
    with (
        serving(path, "--keep", "30d", "--keep", "debug/#=1h", "--keep", "alarms/#=infinity") as server,
        PahoClient(server.port, "sender") as client,
    ):
        client.publish("a", b"2")
    with serving(path, "--store", "sensors/#") as server, PahoClient(server.port, "sender") as client:
        client.publish("sensors/1", b"3")  # the previous run's rules stay in the database
    with ts.open(path) as db:
        assert [b"2", b"3"] == [message.payload for message in db.replay("#")]
        assert {"#", "alarms/#", "debug/#", "sensors/#"} == {rule.topic_filter for rule in db.persistence}
        limits = db.retention.settings
        assert (30 * 86_400, {"debug/#": 3_600, "alarms/#": None}) == (limits.max_age, limits.filters)
    said = _sentences(path)
    assert "all other stored messages are kept for 30 days; messages that match debug/# are kept for 1 hour" in said
    assert "messages that match alarms/# are kept for ever" in said


def test_a_server_changes_no_retention_that_was_set(tmp_path: Path) -> None:
    """An age set by `topicstore retention set --delivered` survives restarts, unless the settings have another."""
    path, config = tmp_path / "data", tmp_path / "server.toml"
    with serving(path):
        pass
    with ts.open(path) as db:
        assert 600 == db.retention.settings.delivered
        db.retention.set(delivered=None)
    with serving(path):
        pass
    with ts.open(path, "r") as db:
        assert None is db.retention.settings.delivered
    config.write_text('[durable_sessions]\ndelivered_retention_period = "1h"\n')
    with serving(path, "--config", str(config)):
        pass
    with ts.open(path, "r") as db:
        assert 3_600 == db.retention.settings.delivered


@pytest.mark.parametrize(
    ("option", "text", "wrong"),
    [
        ("--keep", "30", "'30' has no unit"),
        ("--keep", "0s", "no time for which messages could stay"),
        ("--keep", "a/#/b=1h", "a/#/b"),
        ("--store", "a/#/b", "a/#/b"),
    ],
)
def test_rules_that_are_none(tmp_path: Path, option: str, text: str, wrong: str) -> None:
    """A wrong filter or time of ``--store`` or ``--keep`` is refused, and no database is made."""
    code, _, stderr = run("serve", str(tmp_path / "data"), option, text)
    assert 2 == code
    assert wrong in stderr
    assert option in stderr
    assert not (tmp_path / "data").exists()


@pytest.mark.skipif(
    shutil.which("mosquitto_sub") is None, reason="needs mosquitto_sub: apt-get install mosquitto-clients"
)
def test_the_guides_commands_of_mosquitto_are_true(tmp_path: Path) -> None:
    """The guide's mosquitto commands work in the guide's order against one server."""
    commands = re.findall(r"^mosquitto_.*$", GUIDE.read_text(), re.MULTILINE)
    assert len(commands) >= 4
    with serving(tmp_path / "data") as server:
        for command in commands:
            name, *arguments = shlex.split(command)
            done = subprocess.run(
                [name, "-p", str(server.port), *arguments], capture_output=True, text=True, timeout=PATIENCE
            )
            assert 0 == done.returncode, (command, done.stderr)
            if "home/" in command and "-C" in arguments:
                assert "21.5\n" == done.stdout, command
