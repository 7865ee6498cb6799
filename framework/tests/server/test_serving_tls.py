"""``topicstore serve`` over TLS: client certificates as user names, and new certificates while it serves."""

from __future__ import annotations

import signal
import ssl
from pathlib import Path

import pytest
from topicstore.server.config.units import Address
from topicstore_conformance.faults.threads import PATIENCE, wait_until
from topicstore_conformance.mqtt.certificates import Authority
from topicstore_conformance.mqtt.serving import serving

pytest.importorskip("rocksdict", reason='needs rocksdict: pip install "topicstore[rocksdb]"')
pytest.importorskip("paho.mqtt.client", reason="needs paho-mqtt: pip install paho-mqtt")
from topicstore_conformance.mqtt.paho_client import PahoClient

SETTINGS = """
[listeners.mqtts]
listen = "127.0.0.1:0"
[listeners.mqtts.tls]
certificate = "server.pem"
key = "server.key"
client_authorities = "authority.pem"
client_certificates = "required"
user_from_certificate = true

[[authorization.rules]]
permission = "allow"
topics = ["devices/%u"]
"""


def test_the_name_in_a_certificate_is_the_users_and_new_ones_are_read_by_sighup(
    tmp_path: Path, authority: Authority
) -> None:
    """The name in a client certificate is the user name, and SIGHUP loads new server certificates.

    Connections stay open during SIGHUP. A wrong file is logged, and changes nothing.
    """

    def shown() -> str:
        return ssl.get_server_certificate(("127.0.0.1", port), timeout=PATIENCE)

    def written() -> str:
        return (tmp_path / "server.pem").read_text()

    authority.sign("server", "before")
    authority.sign("device", "bus-7")
    (tmp_path / "server.toml").write_text(SETTINGS)
    files = [str(tmp_path / name) for name in ("authority.pem", "device.pem", "device.key")]
    with serving(tmp_path / "data", "--config", str(tmp_path / "server.toml"), listen=False) as server:
        port = Address(server.ready["mqtts"][0]).port
        with PahoClient(port, "bus", prepared=lambda one: one.tls_set(*files)) as client:
            assert [1, 0x87] == [client.subscribe("devices/bus-7"), client.subscribe("devices/bus-8")]
            assert written() == shown()
            authority.sign("server", "after")
            server.signal(signal.SIGHUP)
            wait_until(lambda: written() == shown(), "the new certificate to be shown")
            (tmp_path / "server.key").write_text("nonsense")
            server.signal(signal.SIGHUP)
            wait_until(lambda: "can't be used" in server.log(), "the wrong key to be logged")
            assert written() == shown()
            assert 1 == client.subscribe("devices/bus-7")
        assert 0 == server.stop()
