"""A new server with users and TLS in two commands: `topicstore config init FILE` and `topicstore serve`."""

from __future__ import annotations

import json
import os
import re
import signal
import ssl
import stat
import subprocess
import sys
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from topicstore.cli import cli
from topicstore.server.config.load import read_settings
from topicstore.server.config.units import Address
from topicstore_conformance.faults.threads import PATIENCE, wait_until
from topicstore_conformance.mqtt.serving import Serving, serving

pytest.importorskip("rocksdict", reason='needs rocksdict: pip install "topicstore[rocksdb]"')
pytest.importorskip("cryptography", reason="needs cryptography: pip install cryptography")
pytest.importorskip("paho.mqtt.client", reason="needs paho-mqtt: pip install paho-mqtt")
from topicstore.server import SettingsError, certificate_authority
from topicstore.server.certificate_authority import Authority, checked_name, pem_of
from topicstore_conformance.mqtt.paho_client import PahoClient

FREE = {f"TOPICSTORE__{name}__LISTEN": "127.0.0.1:0" for name in ("LISTENERS__MQTTS", "HTTP")}
"""The variables with which a server takes free ports, because others may use the usual ones during the test."""
SECRET = {"ca.key", "server.key", "server.toml", "tokens", "users"}

Run = Callable[..., Result]


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    monkeypatch.chdir(tmp_path)

    def run(*arguments: str, code: int = 0) -> Result:
        result = CliRunner().invoke(cli, ["config", *arguments])
        assert result.exit_code == code, result.output
        return result

    return run


def program(*arguments: str, folder: Path) -> str:
    """Run the program in a folder, and return its output."""
    command = [sys.executable, "-m", "topicstore.cli", *arguments]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, check=True).stdout


def served(folder: Path) -> Any:
    """Run the server with the settings that ``config init`` has created, but on free ports."""
    return serving(None, "--config", "server.toml", listen=False, cwd=folder, env={**os.environ, **FREE})


def port_of(server: Serving) -> int:
    return Address(server.ready["mqtts"][0]).port


def test_two_commands_make_a_server_with_users_and_tls(tmp_path: Path) -> None:
    """Two commands create and start a server with users and TLS, and the example that they print can publish to it.

    A wrong password and a client that doesn't trust the authority are refused. Messages survive SIGKILL, and the page's
    token may read them.
    """
    httpx = pytest.importorskip("httpx")
    printed = program("config", "init", "server.toml", "--tls", "--user", "alice", "--keep", "30d", folder=tmp_path)
    (serve,) = re.findall(r"^ +topicstore (serve .*)$", printed, re.MULTILINE)
    assert "serve --config server.toml" == serve
    password, token = re.search(r"password of alice: (\S+)", printed)[1], re.search(r"token of .*: (\S+)", printed)[1]
    authority, other = str(tmp_path / "ca.pem"), tmp_path / "other.pem"
    other.write_bytes(pem_of(Authority.new("another").certificate))
    assert f"mosquitto_pub -h localhost -p 8883 --cafile {authority} -u alice -P {password} " in printed
    publish = "\n".join(
        line.strip() for line in printed.partition("with paho-mqtt:\n")[2].partition("What")[0].splitlines()
    )

    def client(port: int, password: str) -> PahoClient:
        def prepare(one: Any) -> None:
            one.tls_set(authority)
            one.username_pw_set("alice", password)

        return PahoClient(port, prepared=prepare)

    with served(tmp_path) as server:
        port = port_of(server)
        subprocess.run([sys.executable, "-W", "error", "-c", publish.replace("8883", str(port))], check=True)
        with client(port, password) as alice:
            assert 0x10 == alice.publish("home/hall", "23 degrees")  # no matching subscribers
            assert 1 == alice.subscribe("#")
        with client(port, f"{password}x") as wrong:
            assert 0x86 == wrong.answer
        with pytest.raises(ssl.SSLCertVerificationError):
            ssl.get_server_certificate(("localhost", port), ca_certs=str(other), timeout=PATIENCE)
        server.kill()
        server.start()
        assert "topicstore replay topicstore-data 'home/#'" in printed
        lines = program("replay", "topicstore-data", "home/#", folder=tmp_path).splitlines()
        assert ["22 degrees", "23 degrees"] == [json.loads(line)["payload"] for line in lines]
        at = f"http://{server.ready['http'][0]}/api/v5/topics"
        assert 401 == httpx.get(at).status_code
        assert 200 == httpx.get(at, headers={"Authorization": f"Bearer {token}"}).status_code
        assert "all other stored messages are kept for 30 days" in program("info", "topicstore-data", folder=tmp_path)


def test_secrets_are_the_owners(run: Run, tmp_path: Path) -> None:
    """Keys, users, tokens and settings have the mode 0600; certificates may be read by all."""
    made = json.loads(run("init", "server.toml", "--tls", "--user", "alice", "--user", "bob", "--json").stdout)
    assert ["alice", "bob"] == list(made["passwords"])
    assert {"ca.pem", "server.pem"} | SECRET == set(made["files"]) == {path.name for path in tmp_path.iterdir()}
    modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in tmp_path.iterdir()}
    assert SECRET == {name for name, mode in modes.items() if mode == 0o600}
    text = "".join((tmp_path / name).read_text() for name in modes)
    assert [] == [one for one in (*made["passwords"].values(), made["token"]) if one in text]


def test_the_file_has_what_was_chosen(run: Run, tmp_path: Path) -> None:
    """The new settings file has the values given as options, and the defaults otherwise, with a comment on each."""
    run("init", "server.toml", "--tls", "--user", "alice", "--keep", "30d", "--keep", "debug/#=1h")
    found = read_settings(tmp_path / "server.toml", {})
    assert "30d" == str(found.durable_sessions.message_retention_period)
    rules = [
        (one.topic_filter, None if one.keep is None else str(one.keep)) for one in found.durable_sessions.persistence
    ]
    assert [("#", None), ("debug/#", "1h")] == rules
    assert ["0.0.0.0:8883"] == [one.listen for one in found.listeners.values() if one.tls is not None]
    assert ("never", tmp_path / "users") == (found.authentication.anonymous, found.authentication.password_file)
    assert [(("alice",), ("#", "$SYS/#"))] == [(one.users, one.topics) for one in found.authorization.rules]
    lines = (tmp_path / "server.toml").read_text().splitlines()
    assert [] == [line for above, line in pairwise(lines) if re.match(r"#?\w+ = ", line) and above[:2] != "# "]
    run("init", "default.toml")
    assert read_settings(None, {}) == read_settings(tmp_path / "default.toml", {})
    run("init", "kept.toml", "--keep", "1d")
    kept = read_settings(tmp_path / "kept.toml", {})
    assert (["127.0.0.1:1883"], "loopback") == (
        [one.listen for one in kept.listeners.values()],
        kept.authentication.anonymous,
    )


@pytest.mark.parametrize("there", ["server.toml", "users", "ca.key", "server.pem"])
def test_nothing_is_overwritten(there: str, run: Run, tmp_path: Path) -> None:
    """If one of the files exists, even as a dangling link, the command changes nothing, and names the file."""
    (tmp_path / there).symlink_to("nowhere")
    refusal = run("init", "server.toml", "--tls", "--user", "alice", code=2).stderr
    assert f"error: nothing is overwritten, and {there} exists already\n" == refusal
    assert [there] == [path.name for path in tmp_path.iterdir()]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--user", "alice"], "these options need a FILE"),
        (["server.toml", "--tls"], "--tls opens the server to other machines, which needs --user"),
        (
            ["server.toml", "--user", "a", "--host", "b"],
            "--host names the server in its certificate",
        ),
        (["server.toml", "--tls", "--user", "a", "--host", "b c"], "'b c' is neither a host name, such as"),
        (["server.toml", "--user", "a*"], "the user 'a*' would be a pattern in the access rules"),
        (["server.toml", "--user", " a"], "' a' is no user name"),
        (["server.toml", "--keep", "30"], "'--keep'"),
        (["none/server.toml", "--user", "a"], "there is no directory none"),
    ],
)
def test_what_cannot_be_made_leaves_nothing(arguments: list[str], said: str, run: Run, tmp_path: Path) -> None:
    """Wrong options and names are refused with the reason, and no file is left."""
    assert said in " ".join(run("init", *arguments, code=2).stderr.split())
    assert [] == list(tmp_path.iterdir())


def test_names_in_certificates() -> None:
    """Host names are in lower case, also with a wildcard; addresses of both kinds are written as usual."""
    given = ["Broker.Home", "*.home", "192.0.2.7", "[2001:DB8::1]"]
    assert ["broker.home", "*.home", "192.0.2.7", "2001:db8::1"] == list(map(checked_name, given))
    for wrong in ("", "a..b", "-a", "a" * 64, ".".join(["a" * 63] * 4), "bücher.example", "a:1"):
        with pytest.raises(ValueError, match="is neither a host name"):
            checked_name(wrong)


def test_a_certificate_is_renewed(tmp_path: Path) -> None:
    """`config certificate --renew` makes a certificate for the same names and for others, with the same key.

    A running server shows it after SIGHUP, and clients that trust the authority trust it.
    """

    def shown() -> str:
        return ssl.get_server_certificate(("localhost", port), ca_certs=str(tmp_path / "ca.pem"), timeout=PATIENCE)

    made = json.loads(
        program(
            "config",
            "init",
            "server.toml",
            "--tls",
            "--user",
            "alice",
            "--host",
            "broker.home",
            "--json",
            folder=tmp_path,
        )
    )
    before, key = (tmp_path / "server.pem").read_text(), (tmp_path / "server.key").read_bytes()
    with served(tmp_path) as server:
        port = port_of(server)
        assert before == shown()
        renewed = program(
            *("config", "certificate", "--config", "server.toml", "--renew", "--host", "mqtt.home", "--json"),
            folder=tmp_path,
        )
        assert [[*made["names"], "mqtt.home"]] == [one["names"] for one in json.loads(renewed)["certificates"]]
        after = (tmp_path / "server.pem").read_text()
        assert before != after
        assert key == (tmp_path / "server.key").read_bytes()
        server.signal(signal.SIGHUP)
        wait_until(lambda: after == shown(), "the new certificate to be shown")
        assert 0 == server.stop()
    said = program("config", "certificate", "--config", "server.toml", folder=tmp_path)
    assert said.startswith("server.pem: valid until ")
    assert said.endswith("mqtt.home\n")
    assert said in program("config", "check", "--config", "server.toml", folder=tmp_path)


def test_a_certificate_of_another_authority_is_not_renewed(run: Run, tmp_path: Path) -> None:
    """Without the authority's key, or for a certificate of another authority, the renewal is refused.

    It is also refused if the settings name no certificate.
    """
    run("init", "server.toml", "--tls", "--user", "alice")
    before = (tmp_path / "server.pem").read_bytes()
    key = (tmp_path / "ca.key").rename(tmp_path / "elsewhere")
    assert "ca.key can't be read" in run("certificate", "--config", "server.toml", "--renew", code=2).stderr
    another = Authority.new("another")
    (tmp_path / "ca.key").write_bytes(another.key.pem)
    refusal = run("certificate", "--config", "server.toml", "--renew", code=2).stderr
    assert "ca.key is not the key of ca.pem" in refusal
    (tmp_path / "ca.pem").write_bytes(pem_of(another.certificate))
    refusal = run("certificate", "--config", "server.toml", "--renew", code=2).stderr
    assert "server.pem is not of the authority ca.pem: renew it where it is from" in refusal
    assert before == (tmp_path / "server.pem").read_bytes()
    assert key.exists()
    assert "the settings name no certificate" in run("certificate", code=2).stderr


def test_an_authority_that_has_expired_signs_nothing(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A certificate is valid no longer than its authority, which signs none once it has expired."""
    monkeypatch.setattr(certificate_authority, "_AUTHORITY_DAYS", 10)
    made = json.loads(run("init", "server.toml", "--tls", "--user", "alice", "--json").stdout)
    left = datetime.fromisoformat(made["valid_until"]) - datetime.now(UTC)
    assert timedelta(days=9) < left <= timedelta(days=10)
    monkeypatch.setattr(certificate_authority, "_AUTHORITY_DAYS", 0)
    expired = Authority.new("expired")
    with pytest.raises(SettingsError, match="the certificate authority has expired on"):
        expired.sign(["localhost"], expired.key)
    (tmp_path / "server.pem").write_bytes(pem_of(expired.certificate))
    (tmp_path / "server.key").write_bytes(expired.key.pem)
    for command in ("check", "certificate"):
        assert "server.pem: INVALID since " in run(command, "--config", "server.toml").stdout


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root")
def test_files_that_root_makes_are_of_the_directorys_owner(run: Run, tmp_path: Path) -> None:
    """Files that root makes in the directory of a server's user belong to that user, who can read them."""
    nobody = 65_534
    os.chown(tmp_path, nobody, nobody)
    run("init", "server.toml", "--tls", "--user", "alice")
    run("certificate", "--config", "server.toml", "--renew")
    assert {(nobody, nobody)} == {(found.st_uid, found.st_gid) for found in map(Path.stat, tmp_path.iterdir())}
