"""``topicstore serve`` over TLS: certificates that say who a client is, and new ones while it serves."""

from __future__ import annotations

import datetime as dt
import ipaddress
import json
import signal
import ssl
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from topicstore.server.addresses import Address

pytest.importorskip("rocksdict", reason='needs rocksdict: pip install "topicstore[rocksdb]"')
pytest.importorskip("cryptography", reason="needs cryptography: pip install cryptography")
mqtt = pytest.importorskip("paho.mqtt.client", reason="needs paho-mqtt: pip install paho-mqtt")
from cryptography import x509  # noqa: E402 - after the question whether it is there
from cryptography.hazmat.primitives import hashes, serialization  # noqa: E402
from cryptography.hazmat.primitives.asymmetric import ec  # noqa: E402

PATIENCE = 60.0
"""Seconds after which a test hangs and fails; nothing is measured by it."""

SETTINGS = """
[listeners.mqtts]
listen = "127.0.0.1:0"
[listeners.mqtts.tls]
certificate = "server.pem"
key = "server.key"
client_authorities = "device.pem"
client_certificates = "required"
user_from_certificate = true

[[authorization.rules]]
permission = "allow"
topics = ["devices/%u"]
"""


def self_signed(path: Path, common_name: str) -> None:
    """Write a certificate that is its own authority, and its key beside it."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, common_name)])
    now = dt.datetime.now(dt.UTC)
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - dt.timedelta(days=1))
        .not_valid_after(now + dt.timedelta(days=1))
        .add_extension(x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]), critical=False)
        .sign(key, hashes.SHA256())
    )
    path.write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
    path.with_suffix(".key").write_bytes(
        key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    )


@pytest.fixture
def server(tmp_path: Path) -> Iterator[tuple[subprocess.Popen[bytes], int]]:
    self_signed(tmp_path / "server.pem", "before")
    self_signed(tmp_path / "device.pem", "bus-7")
    (tmp_path / "server.toml").write_text(SETTINGS)
    command = [sys.executable, "-m", "topicstore.cli", "serve", "data", "--config", "server.toml", "--print-ready"]
    with (
        (tmp_path / "log").open("wb") as log,
        subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=log) as process,
    ):
        try:
            assert process.stdout is not None
            yield process, Address(json.loads(process.stdout.readline())["mqtts"][0]).port
        finally:
            process.kill()


def certificate(port: int) -> bytes:
    """Return the certificate that the server shows now."""
    return ssl.get_server_certificate(("127.0.0.1", port), timeout=PATIENCE).encode()


def test_the_name_in_a_certificate_is_the_users_and_new_ones_are_read_by_sighup(
    server: tuple[subprocess.Popen[bytes], int], tmp_path: Path
) -> None:
    """A client keeps its connection over that; a wrong file is logged, and changes nothing."""
    process, port = server
    connected, granted = threading.Event(), list[int]()
    answered = threading.Semaphore(0)
    client = mqtt.Client(mqtt.CallbackAPIVersion.VERSION2, "bus", protocol=mqtt.MQTTv5)
    client.tls_set(str(tmp_path / "server.pem"), str(tmp_path / "device.pem"), str(tmp_path / "device.key"))
    client.on_connect = lambda *_: connected.set()

    def on_subscribe(_: Any, __: Any, ___: Any, reasons: Any, ____: Any) -> None:
        granted.extend(reason.value for reason in reasons)
        answered.release()

    client.on_subscribe = on_subscribe
    ends: list[int] = []
    client.on_disconnect = lambda _, __, ___, reason, ____: ends.append(reason.value)
    client.connect("127.0.0.1", port)
    client.loop_start()
    try:
        assert connected.wait(PATIENCE)
        client.subscribe([("devices/bus-7", 1), ("devices/bus-8", 1)])
        assert answered.acquire(timeout=PATIENCE)
        assert [1, 0x87] == granted

        before = certificate(port)
        assert (tmp_path / "server.pem").read_bytes() == before
        self_signed(tmp_path / "server.pem", "after")
        process.send_signal(signal.SIGHUP)
        until = time.monotonic() + PATIENCE
        while certificate(port) == before:
            assert time.monotonic() < until
        assert (tmp_path / "server.pem").read_bytes() == certificate(port)

        (tmp_path / "server.key").write_text("nonsense")
        process.send_signal(signal.SIGHUP)
        while b"can't be used" not in (tmp_path / "log").read_bytes():
            assert time.monotonic() < until
        assert (tmp_path / "server.pem").read_bytes() == certificate(port)

        client.subscribe("devices/bus-7", 1)
        assert answered.acquire(timeout=PATIENCE)
        assert [] == ends
    finally:
        client.disconnect()
        client.loop_stop()
    process.send_signal(signal.SIGTERM)
    assert 0 == process.wait(PATIENCE)
