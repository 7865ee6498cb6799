"""``topicstore serve`` over TLS: user names from client certificates, revocation, and reloading of TLS files."""

from __future__ import annotations

import signal
import ssl
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from topicstore.server.config.units import Address
from topicstore_conformance.faults.threads import PATIENCE, wait_until
from topicstore_conformance.mqtt import wire
from topicstore_conformance.mqtt.certificates import Authority
from topicstore_conformance.mqtt.raw_client import RawClient
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


def revoked(authority: Authority, *certificates: Path) -> bytes:
    """Return an authority's certificate revocation list (CRL), as PEM."""
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization

    key = serialization.load_pem_private_key(authority.signs.private_key_pem.bytes(), None)
    issuer = x509.load_pem_x509_certificate(authority.path.read_bytes())
    now = datetime.now(UTC)
    made = x509.CertificateRevocationListBuilder().issuer_name(issuer.subject)
    made = made.last_update(now - timedelta(days=1)).next_update(now + timedelta(days=1))
    for file in certificates:
        number = x509.load_pem_x509_certificate(file.read_bytes()).serial_number
        one = x509.RevokedCertificateBuilder().serial_number(number).revocation_date(now - timedelta(hours=1)).build()
        made = made.add_revoked_certificate(one)
    return made.sign(key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM)  # type: ignore[arg-type]


def test_a_revoked_certificate_is_refused(tmp_path: Path, authority: Authority) -> None:
    """After a reload of the certificate revocation list (CRL), a client with a revoked certificate is refused.

    Other clients stay accepted. A CRL file that holds no CRL, or also a certificate, which would become trusted, is
    refused, and the old CRL stays in force.
    """
    authority.sign("server", "server")
    good, bad = authority.sign("good", "good"), authority.sign("bad", "bad")
    (tmp_path / "revoked.pem").write_bytes(revoked(authority))
    (tmp_path / "server.toml").write_text(SETTINGS.replace("user_from", 'crl_file = "revoked.pem"\nuser_from'))
    with serving(tmp_path / "data", "--config", str(tmp_path / "server.toml"), listen=False) as server:
        port = Address(server.ready["mqtts"][0]).port

        def accepted(own: tuple[Path, Path]) -> bool:
            try:
                with RawClient(port) as client:
                    client.socket = authority.trusting(own).wrap_socket(client.socket, server_hostname="127.0.0.1")
                    client.send(wire.connect("one"))
                    return client.receive() is not None
            except ssl.SSLError:
                return False

        assert accepted(good)
        assert accepted(bad)
        (tmp_path / "revoked.pem").write_bytes(revoked(authority, bad[0]))
        server.signal(signal.SIGHUP)
        wait_until(lambda: not accepted(bad), "the list to be read")
        assert accepted(good)
        for count, wrong in enumerate((authority.path.read_bytes(), b"nonsense"), 1):
            (tmp_path / "revoked.pem").write_bytes(wrong)
            server.signal(signal.SIGHUP)
            wait_until(lambda: server.log().count("can't be used") == count, "the file to be refused")  # noqa: B023
            assert [accepted(good), accepted(bad)] == [True, False]
        assert "revoked" in server.log()
        assert 0 == server.stop()
