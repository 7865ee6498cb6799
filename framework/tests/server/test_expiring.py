"""Certificates that expire soon: the logs and metrics of a running server about them."""

from __future__ import annotations

import logging
from datetime import UTC, datetime, timedelta
from pathlib import Path

import httpx
import msgspec
import pytest
import topicstore as ts
from topicstore.server.config.model import HttpSettings, HttpTlsSettings, ServerSettings
from topicstore.server.config.units import Address
from topicstore.server.listeners.tls import expiry_warnings
from topicstore_conformance.mqtt.embedded import Embedded

trustme = pytest.importorskip("trustme", reason="needs trustme: pip install trustme")
pytest.importorskip("cryptography", reason="needs cryptography: pip install cryptography")


def issue(folder: Path, days: int) -> datetime:
    """Write a certificate that is valid for some days, and its key; return its expiry time."""
    end = datetime.now(UTC).replace(microsecond=0) + timedelta(days=days)
    issued = trustme.CA().issue_cert("127.0.0.1", not_after=end)
    (folder / "server.pem").write_bytes(issued.cert_chain_pems[0].bytes())
    (folder / "server.key").write_bytes(issued.private_key_pem.bytes())
    return end


def exported(server: Embedded) -> float:
    """Return the expiry time of the ``[http]`` certificate in the metrics."""
    http = server.server.http
    assert http is not None
    (url,) = server.server.urls_of_http
    (line,) = [
        line
        for line in httpx.get(f"{url}/metrics", verify=False, trust_env=False).text.splitlines()
        if line.startswith('topicstore_certificate_end_timestamp_seconds{section="http"}')
    ]
    return float(line.split()[1])


def test_a_running_server_warns_of_a_certificate_that_expires_soon(
    tmp_path: Path, db: ts.Database, caplog: pytest.LogCaptureFixture
) -> None:
    """From two weeks before expiry, the log names the section and the day; metrics have the expiry time."""
    soon = issue(tmp_path, days=10)
    tls = HttpTlsSettings(certificate=tmp_path / "server.pem", key=tmp_path / "server.key")
    settings = ServerSettings(http=HttpSettings(listen=Address("127.0.0.1:0"), tls=tls))
    caplog.set_level(logging.WARNING, "topicstore.server.listeners.tls")
    with Embedded(db, settings) as server:
        (record,) = caplog.records
        assert f"the certificate of http expires on {soon:%Y-%m-%d}" in record.getMessage()
        assert exported(server) == soon.timestamp()
        later = issue(tmp_path, days=60)
        assert exported(server) == soon.timestamp(), "it is still in use"
        server.do(server.server.reload(msgspec.structs.replace(server.server.settings)))
        assert exported(server) == later.timestamp()
        assert [record] == caplog.records


def test_when_certificates_are_warned_of() -> None:
    """Warnings name each certificate that expires within two weeks; expired ones get a different text."""
    now = datetime(2026, 1, 31, tzinfo=UTC)
    ends = {"listeners.a": now, "http": now + timedelta(days=14), "cluster": now + timedelta(days=15)}
    assert list(expiry_warnings(ends, now)) == [
        "the certificate of listeners.a has expired on 2026-01-31: no client that checks it connects",
        "the certificate of http expires on 2026-02-14: renew it, and reload the server",
    ]
