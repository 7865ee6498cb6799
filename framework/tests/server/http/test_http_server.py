"""The life cycle of the HTTP interface: starting, failing to start, reloading its certificate, stopping."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import topicstore as ts
import topicstore.server.server as server_module
from topicstore.server import Address, Server, ServerSettings
from topicstore.server.config.model import HttpSettings, HttpTlsSettings, ListenerSettings
from topicstore.server.databases import check_database
from topicstore.server.http.discovery import find_server
from topicstore.server.http.http_server import HttpServer
from topicstore.server.listeners import ListenError
from topicstore.server.resource_limits import Descriptors
from topicstore.storage.directory.staging import staging_name
from topicstore_conformance.faults.threads import PATIENCE, begin, wait_until
from topicstore_conformance.mqtt.certificates import Authority
from topicstore_conformance.mqtt.embedded import Embedded

trustme = pytest.importorskip("trustme", reason="needs trustme: pip install trustme")
LOOPBACK = Address("127.0.0.1:0")


@pytest.fixture
def db(tmp_path: Path) -> Iterator[ts.Database]:
    """A database for one test."""
    with ts.open(tmp_path / "own", backend="memory") as db:
        yield db


def http_server(db: ts.Database, settings: HttpSettings) -> HttpServer:
    """Return an HTTP interface and its MQTT server, neither of which is started."""
    return HttpServer(db, settings, Server(db), Descriptors.of(ServerSettings(http=settings), [db]))


@contextlib.contextmanager
def running(db: ts.Database, tls: HttpTlsSettings | None = None) -> Iterator[HttpServer]:
    """Run an HTTP server in a context."""
    server = http_server(db, HttpSettings(listen=LOOPBACK, tls=tls))
    server.start()
    yield server
    server.stop()


def get(server: HttpServer, path: str = "/health/live") -> httpx.Response:
    return httpx.get(f"{server.scheme}://{server.addresses[0]}{path}", trust_env=False)


def threads() -> list[str]:
    return sorted(one.name for one in threading.enumerate() if one.name.startswith("topicstore-http"))


def test_it_serves_from_start_to_stop_and_leaves_nothing(db: ts.Database) -> None:
    http_server(db, HttpSettings(listen=LOOPBACK)).stop()  # a server that was never started
    server = http_server(db, HttpSettings(listen=LOOPBACK))
    server.start()
    assert get(server).status_code == 200
    server.stop()
    server.stop()
    assert [] == threads()
    with pytest.raises(httpx.ConnectError):
        get(server)
    with pytest.raises(ListenError, match="was stopped"):
        server.start()
    server.reload()


def test_a_file_that_cannot_be_written_is_reported_and_nothing_is_left(tmp_path: Path) -> None:
    """If ``server.json`` can't be written, the last step of starting fails, and no thread or file is left.

    The failed interface can't be started again.
    """
    with ts.open(tmp_path / "db", backend="rocksdb") as db:
        (tmp_path / "db" / "server.json").mkdir()
        server = http_server(db, HttpSettings(listen=LOOPBACK))
        with pytest.raises(OSError, match=r"by which commands find this server can't be written: Is a.*server\.json"):
            server.start()
        assert [] == threads()
        assert not (tmp_path / "db" / "server.json.new").exists()
        (tmp_path / "db" / "server.json").rmdir()
        with pytest.raises(ListenError, match="make another one"):
            server.start()
        with running(db) as again:
            assert get(again).status_code == 200


def test_a_job_that_was_begun_while_it_could_not_start_is_cancelled(tmp_path: Path) -> None:
    """A job that a client started before the interface failed to start is cancelled.

    The interface serves before the last step of starting.
    """
    with ts.open(tmp_path / "db", backend="rocksdb") as db:
        (tmp_path / "db" / "server.json").mkdir()
        server = http_server(db, HttpSettings(listen=LOOPBACK))
        job = server.context.jobs.start("verify", {}, lambda one: one.tell(int(one.cancelled.wait())))
        with pytest.raises(OSError, match=r"server\.json"):
            server.start()
        ended = server.context.jobs.find(job.id)
        assert ended is not None
        assert ended.state == "cancelled"


def test_an_mqtt_server_ends_if_http_cannot_begin(db: ts.Database) -> None:
    """If the HTTP interface can't start, the MQTT server closes everything that it had opened."""

    async def serve(settings: ServerSettings) -> None:
        async with Server(db, settings):
            pytest.fail("it served")

    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        settings = ServerSettings(
            listeners={"only": ListenerSettings(listen=LOOPBACK)}, http=HttpSettings(listen=Address(address))
        )
        with pytest.raises(ListenError, match=f"{address} for HTTP: Address already in use"):
            asyncio.run(serve(settings))
    assert [] == threads()


def test_a_request_that_runs_ends_before_the_server(db: ts.Database, monkeypatch: pytest.MonkeyPatch) -> None:
    server = http_server(db, HttpSettings(listen=LOOPBACK))
    server.start()
    asked, go_on = threading.Event(), threading.Event()
    info = ts.Database.info

    def slow(this: ts.Database) -> object:
        asked.set()
        go_on.wait()
        return info(this)

    monkeypatch.setattr(ts.Database, "info", slow)
    answers: list[int] = []
    client = threading.Thread(target=lambda: answers.append(get(server, "/api/v5/info").status_code))
    client.start()
    asked.wait()
    stopping = [threading.Thread(target=server.stop) for _ in range(2)]
    for one in stopping:
        one.start()
    server.context.stopping.wait()
    go_on.set()
    for one in (*stopping, client):
        one.join()
    assert [200] == answers
    assert [] == threads()


@pytest.mark.slow
def test_a_fault_while_those_who_wait_are_woken_leaves_nothing_open(db: ts.Database) -> None:
    """An error while waiting requests are woken is raised only after everything has ended.

    MQTT clients get a DISCONNECT, and no HTTP thread remains.
    """

    def fail() -> None:
        raise RuntimeError("a fault")

    with Embedded(db, ServerSettings(http=HttpSettings(listen=LOOPBACK))) as embedded, embedded.client() as client:
        client.connect("client")
        http = embedded.server.http
        assert http is not None
        http.context.on_stop.append(fail)
        with pytest.raises(RuntimeError, match="a fault"):
            embedded.do(embedded.server.drain())
        last = client.ended()
        assert last.kind == "DISCONNECT"
        assert [] == threads()


def test_settings_that_are_read_again_while_it_ends_hold_up_nothing(
    db: ts.Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A reload during a stop doesn't deadlock.

    The request waits for the reload, the stop waits for the request, and the reload waits for neither.
    """
    checking, go_on = threading.Event(), threading.Event()

    def check(*arguments: Any) -> None:
        checking.set()
        go_on.wait()
        check_database(*arguments)

    monkeypatch.setattr(server_module, "check_database", check)
    http = HttpSettings(listen=LOOPBACK)
    with Embedded(db, ServerSettings(http=http), read=lambda: ServerSettings(http=http)) as embedded:
        (url,) = embedded.server.urls_of_http
        asked = begin(lambda: httpx.post(f"{url}/api/v5/config/reload", timeout=None, trust_env=False))
        checking.wait()
        ending = embedded.begin(embedded.server.drain())
        wait_until(lambda: refused(int(url.rpartition(":")[2])), "the server to accept nobody any more")
        go_on.set()
        ending.result(PATIENCE)
        assert asked.result(PATIENCE).status_code == 400
    assert [] == threads()


def refused(port: int) -> bool:
    """Return whether no socket listens on a port."""
    try:
        socket.create_connection(("127.0.0.1", port)).close()
    except ConnectionRefusedError:
        return True
    return False


def test_while_it_stops_it_says_so_and_begins_nothing(db: ts.Database) -> None:
    server = http_server(db, HttpSettings(listen=LOOPBACK))
    woken = threading.Event()
    server.context.on_stop.append(woken.set)
    server.start()
    server.begin_stop()
    server.begin_stop()
    assert woken.is_set()
    assert get(server).status_code == 200
    ready = get(server, "/health/ready")
    assert (503, ["the server is stopping"]) == (ready.status_code, ready.json()["reasons"])
    refused = get(server, "/api/v5/info")
    assert (503, "close") == (refused.status_code, refused.headers["connection"])
    assert "stopping" in refused.json()["detail"]
    server.stop()


# --- TLS ---


def issue(authority: Authority) -> HttpTlsSettings:
    """Write a new certificate for this host, and its key."""
    certificate, key = authority.sign("server")
    return HttpTlsSettings(certificate=certificate, key=key)


def seen(server: HttpServer, authority: Authority) -> bytes | None:
    """Return the certificate that the server presents to a client that trusts the authority."""
    host, _, port = server.addresses[0].rpartition(":")
    with (
        socket.create_connection((host, int(port))) as plain,
        authority.trusting().wrap_socket(plain, server_hostname=host) as connection,
    ):
        return connection.getpeercert(binary_form=True)


def test_a_new_certificate_is_used_after_a_reload_and_a_bad_one_is_not(tmp_path: Path, authority: Authority) -> None:
    tls = issue(authority)
    with ts.open(tmp_path / "db", backend="rocksdb") as db:
        server = http_server(db, HttpSettings(listen=LOOPBACK, tls=tls))
        server.start()
        first = seen(server, authority)
        issue(authority)
        assert seen(server, authority) == first, "not before it is told to"
        server.reload()
        second = seen(server, authority)
        assert second != first
        tls.certificate.write_text("nonsense")
        with pytest.raises(ListenError, match=r"server\.pem"):
            server.reload()
        assert seen(server, authority) == second
        before = (tmp_path / "db" / "server.json").read_bytes()
        issue(authority)
        (tmp_path / "db" / "server.json.new").mkdir()
        with pytest.raises(OSError, match=r"server\.json"):
            server.reload()
        (tmp_path / "db" / "server.json.new").rmdir()
        assert seen(server, authority) == second, "it is the address that commands read"
        assert (tmp_path / "db" / "server.json").read_bytes() == before
        found = find_server(tmp_path / "db")
        assert found is not None
        assert found.url.startswith("https://")
        assert httpx.get(f"{found.url}/health/live", verify=found.trust(), trust_env=False).status_code == 200
        server.stop()


@pytest.mark.parametrize("between", [None, trustme.CA().create_child_ca()])
def test_only_this_servers_certificate_is_trusted_by_who_found_it(
    tmp_path: Path, db: ts.Database, between: trustme.CA | None
) -> None:
    """A command that finds a server through its directory trusts only that server's certificate.

    Other certificates of the same authority are rejected. The file may also have intermediate certificates and
    comments.
    """
    (tmp_path / "other").mkdir()
    tls, others = issue(Authority(tmp_path, between)), issue(Authority(tmp_path / "other", between))
    tls.certificate.write_bytes("# für uns\n".encode("latin-1") + tls.certificate.read_bytes())
    assert tls.certificate.read_bytes().count(b"BEGIN CERTIFICATE") == (1 if between is None else 2)
    with ts.open(tmp_path / "db", backend="rocksdb") as found_db, running(found_db, tls), running(db, others) as other:
        found = find_server(tmp_path / "db")
        assert found is not None
        assert httpx.get(f"{found.url}/health/live", verify=found.trust(), trust_env=False).status_code == 200
        with pytest.raises(httpx.ConnectError, match="CERTIFICATE_VERIFY_FAILED"):
            httpx.get(f"https://{other.addresses[0]}/health/live", verify=found.trust(), trust_env=False)


def test_old_versions_of_tls_and_plain_text_are_refused(db: ts.Database, authority: Authority) -> None:
    old = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    authority.signs.configure_trust(old)
    with pytest.warns(DeprecationWarning, match="TLSv1_1"):
        old.minimum_version = old.maximum_version = ssl.TLSVersion.TLSv1_1
    with running(db, issue(authority)) as server:
        host, _, port = server.addresses[0].rpartition(":")
        with socket.create_connection((host, int(port))) as plain, pytest.raises(ssl.SSLError):
            old.wrap_socket(plain, server_hostname=host)
        with pytest.raises(httpx.HTTPError):
            httpx.get(f"http://{server.addresses[0]}/health/live", trust_env=False)


def with_passphrase(tls: HttpTlsSettings) -> None:
    from cryptography.hazmat.primitives import serialization

    key = serialization.load_pem_private_key(tls.key.read_bytes(), None)
    secret = serialization.BestAvailableEncryption(b"secret")
    form = serialization.PrivateFormat.PKCS8
    tls.key.write_bytes(key.private_bytes(serialization.Encoding.PEM, form, secret))


@pytest.mark.parametrize(
    ("spoil", "says"),
    [
        (lambda tls: tls.certificate.unlink(), "there is no TLS file"),
        (lambda tls: tls.key.write_text("nonsense"), "PEM is expected"),
        (lambda tls: tls.key.write_bytes(trustme.CA().issue_cert("a").private_key_pem.bytes()), "own key"),
        (with_passphrase, "has a passphrase"),
    ],
)
def test_a_certificate_that_cannot_be_used_is_reported_and_nothing_is_left(
    db: ts.Database, authority: Authority, spoil: object, says: str
) -> None:
    tls = issue(authority)
    spoil(tls)  # type: ignore[operator]
    server = http_server(db, HttpSettings(listen=LOOPBACK, tls=tls))
    with pytest.raises(ListenError, match=says):
        server.start()
    assert [] == threads()


def test_a_start_removes_what_killed_checkpoints_have_left(db: ts.Database, tmp_path: Path) -> None:
    """A start removes directories that killed checkpoints left in the export directory and below it."""
    left = tmp_path / "exports" / "daily" / staging_name()
    left.mkdir(parents=True)
    server = http_server(db, HttpSettings(listen=LOOPBACK, export_dir=tmp_path / "exports"))
    server.start()
    try:
        assert not left.exists()
    finally:
        server.stop()
