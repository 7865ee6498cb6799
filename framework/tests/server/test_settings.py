"""A server's settings: valid files, and the errors that invalid ones give."""

from __future__ import annotations

import re
import socket
from pathlib import Path

import msgspec
import pytest
import topicstore as ts
from topicstore.server.cluster import cluster_of
from topicstore.server.config.load import read_settings
from topicstore.server.config.model import ListenerSettings, ServerSettings, SettingsError, TlsSettings
from topicstore.server.config.show import shown
from topicstore.server.config.units import Address, Duration, Size, is_loopback
from topicstore.server.listeners import ListenError, Reserved
from topicstore.server.reload import check_files

WHOLE = """
[durable_sessions]
batch_size = 500
heartbeat_interval = "5s"

[[durable_sessions.persistence]]
topic_filter = "sensors/#"

[zones.slow.durable_sessions]
batch_size = 10

[durable_storage.messages]
data_dir = "data"
n_shards = 2
durability = "sync"
local_write_buffer = { max_items = 500, flush_interval = "100ms" }
layout = { type = "block", level = 3 }

[listeners.plain]
listen = "127.0.0.1:1883"
zone = "slow"

[listeners.web]
listen = "[::]:8084"
protocol = "websocket"

[listeners.web.tls]
certificate = "server.pem"
key = "/etc/server.key"
client_authorities = "authority.pem"
client_certificates = "required"
user_from_certificate = true

[authentication]
anonymous = "never"
password_file = "users"

[[authorization.rules]]
permission = "allow"
topics = ["sensors/%u/#"]

[limits]
packet_size = "8MB"
connect_timeout = "1.5s"

[log]
level = "warning"
"""


def read(text: str, folder: Path) -> ServerSettings:
    path = folder / "server.toml"
    path.write_text(text)
    return read_settings(path, {})


def test_a_whole_file_is_understood(tmp_path: Path) -> None:
    """A complete file is read: paths are relative to its folder, and quantities become seconds and bytes."""
    found = read(WHOLE, tmp_path)
    storage = found.messages
    assert storage.data_dir == tmp_path / "data"
    assert (storage.n_shards, storage.durability) == (2, "sync")
    assert (storage.layout["type"], storage.layout_options) == ("block", {"level": 3})
    assert (storage.local_write_buffer.max_items, storage.local_write_buffer.flush_interval) == (500, 0.1)
    assert list(found.listeners) == ["plain", "web"]
    first, second = found.listeners.values()
    assert found.sessions_of(first.zone).batch_size == 10
    assert found.sessions_of(first.zone).heartbeat_interval == 5.0
    assert found.sessions_of(second.zone).batch_size == 500
    assert [one.topic_filter for one in found.durable_sessions.persistence] == ["sensors/#"]
    assert (first.listen.host, first.listen.port, first.tls) == ("127.0.0.1", 1883, None)
    assert (second.listen.host, second.listen.port) == ("::", 8084)
    assert second.tls is not None
    assert second.tls.certificate == tmp_path / "server.pem"
    assert second.tls.key == Path("/etc/server.key")
    assert found.authentication.password_file == tmp_path / "users"
    assert found.authorization.rules[0].topics == ("sensors/%u/#",)
    assert (found.limits.packet_size, found.limits.connect_timeout) == (8_000_000, 1.5)
    assert found.log.level == "warning"


def test_an_empty_file_is_the_default(tmp_path: Path) -> None:
    """An empty file gives the defaults: loopback, port 1883, anonymous clients from this machine only."""
    found = read("", tmp_path)
    assert found == ServerSettings()
    assert [str(one.listen) for one in found.listeners.values()] == ["127.0.0.1:1883"]
    assert found.authentication.anonymous == "loopback"


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("n_shards", "n_shard", "durable_storage.messages has no key 'n_shard'; is 'n_shards' meant?"),
        ("batch_size = 10", "batch = 10", "zones.slow.durable_sessions has no key 'batch'; is 'batch_size' meant?"),
        ("batch_size = 10", "batch_size = 0", "zones.slow.durable_sessions.batch_size: expected int >= 1"),
        ('"slow"', '"slo"', "listeners.plain.zone: there is no [zones.slo]; zones are: slow"),
        ('data_dir = "data"', "n_sites = 3", "durable_storage.messages.n_sites: 3 sites need a section [cluster]"),
        ("messages]", "mesages]\ndurability = 3\n[durable_storage.x]", "durable_storage.mesages.durability: expected"),
        ("messages]", "mesages]\n[durable_storage.messages]", "durable_storage.mesages: a storage beside 'messages'"),
        ('type = "block"', "type = 3", "durable_storage.messages: layout.type is the name of a layout"),
        ("topics =", "topic =", "authorization.rules[0] has no key 'topic'; is 'topics' meant?"),
        ("[limits]", "[limit]", "the file has no key 'limit'; is 'limits' meant?"),
        ("[log]", "[qqq]", "the file has no key 'qqq'; it may have: durable_sessions, durable_storage"),
        ("[listeners.plain]", "[[listeners]]", "a table with a name is written [listeners.NAME]"),
        ("n_shards = 2", 'n_shards = "2"', "durable_storage.messages.n_shards: expected int"),
        ("n_shards = 2", "n_shards = 0", "durable_storage.messages.n_shards: expected int >= 1"),
        ('"sensors/#"', '"a#"', "durable_sessions.persistence[0]: filter 'a#': '#' must be alone in the last level"),
        ('"sync"', '"synch"', "durable_storage.messages.durability: invalid enum value 'synch'; it may be 'commit', "),
        ("[[authorization.rules]]", "[authorization.rules]", "a table in a list is written [[authorization.rules]]"),
        ('"8MB"', "8", "limits.packet_size: 8 has no unit: write 500kB, 8MB or 10GB"),
        ('"1.5s"', '"-1s"', "limits.connect_timeout: '-1s' is not a duration: write 30m, 12h or 1d12h"),
        ('"127.0.0.1:1883"', '"1883"', "listeners.plain.listen: '1883' is not HOST:PORT"),
        ('"server.pem"', '""', "listeners.web.tls.certificate: '' is not a path"),
        ('client_authorities = "authority.pem"', "", "listeners.web.tls: client_certificates = 'required' needs"),
        ('client_certificates = "required"', "", "listeners.web.tls: user_from_certificate needs client_certificates"),
        ('permission = "allow"', "", "authorization.rules[0]: object missing required field permission"),
        ("[durable_sessions]", "[durable_sessions", "Expected ']'"),
        ("[log]", "[log]\n[log]", "Cannot declare"),
    ],
)
def test_what_is_wrong_is_said_with_its_place(old: str, new: str, said: str, tmp_path: Path) -> None:
    """An error names the file, the key and the expected value, and suggests the nearest existing key."""
    assert old in WHOLE
    with pytest.raises(SettingsError) as caught:
        read(WHOLE.replace(old, new, 1), tmp_path)
    assert str(caught.value).startswith(str(tmp_path / "server.toml"))
    assert said in str(caught.value)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[listeners]", "listeners: expected object of length >= 1"),
        ('[limits]\npacket_size = "300MB"', "limits: packet_size is at most 268,435,460 bytes"),
        ('[limits]\nconnect_timeout = "0s"', "limits: connect_timeout is more than 0 seconds"),
        ('[limits]\nconnect_timeout = "99999d"', "limits.connect_timeout: '99999d' is longer than 4,294,967,295 s"),
        (f'[protocol]\nmax_session_expiry = "{"9" * 400}s"', "protocol.max_session_expiry: '9999"),
        ('[protocol]\nmax_keep_alive = "20h"', "protocol: max_keep_alive is 1 to 65,535 seconds"),
        ('[protocol]\nmax_keep_alive = "0s"', "protocol: max_keep_alive is 1 to 65,535 seconds"),
        (f'[protocol]\nresponse_information = "{"x" * 65_536}"', "protocol: response_information has at most 65,535"),
        (
            '[durable_storage.messages.local_write_buffer]\nflush_interval = "2h"',
            "messages.local_write_buffer: flush_interval is at most 3,600 seconds",
        ),
        ('[durable_sessions]\nidle_poll_interval = "0s"', "durable_sessions: idle_poll_interval is more than 0 and"),
        ('[durable_sessions]\nmessage_retention_period = "12000d"', "message_retention_period is less than"),
    ],
)
def test_what_clients_could_not_be_served_with_is_refused(text: str, said: str, tmp_path: Path) -> None:
    """Values with which no client could be served are refused."""
    with pytest.raises(SettingsError) as caught:
        read(text, tmp_path)
    assert said in str(caught.value)


def test_a_file_that_cannot_be_read_is_an_error(tmp_path: Path) -> None:
    """A missing file, or one that isn't UTF-8 text, is an error."""
    with pytest.raises(SettingsError, match=r"there is no file .*nothing\.toml; 'topicstore config init'"):
        read_settings(tmp_path / "nothing.toml")
    (tmp_path / "bytes.toml").write_bytes(b"\xff\xfe")
    with pytest.raises(SettingsError, match="byte order mark of UTF-16; UTF-8 is expected"):
        read_settings(tmp_path / "bytes.toml")
    (tmp_path / "bytes.toml").write_bytes(b"\xff")
    with pytest.raises(SettingsError, match="utf-8"):
        read_settings(tmp_path / "bytes.toml")


def test_a_mark_and_ends_of_lines_of_windows_mean_nothing(tmp_path: Path) -> None:
    """A byte order mark and Windows line endings are ignored."""
    (tmp_path / "windows.toml").write_bytes(b"\xef\xbb\xbf[limits]\r\nconnections = 7\r\n")
    assert 7 == read_settings(tmp_path / "windows.toml").limits.connections


def test_an_empty_file_means_defaults_only_where_that_is_said(tmp_path: Path) -> None:
    """An empty file means the defaults only at the start; a running server refuses it.

    An interrupted editor may leave an empty file. A comment in the file shows that its author wants the defaults.
    """
    file = tmp_path / "server.toml"
    for text in ("", "\n \n", "\ufeff"):
        file.write_text(text, encoding="utf-8")
        assert read_settings(file) == read_settings(file, empty_ok=True)
        with pytest.raises(SettingsError, match="is empty"):
            read_settings(file, empty_ok=False)
    file.write_text("# all defaults")
    assert read_settings(file, empty_ok=False) == read_settings(file)


def test_http_has_one_address_or_several(tmp_path: Path) -> None:
    """The HTTP address may be one string or a list, which must not be empty."""
    file = tmp_path / "server.toml"
    for value, listen in (
        ('"127.0.0.1:1"', ("127.0.0.1:1",)),
        ('["127.0.0.1:1"]', ("127.0.0.1:1",)),
        ('["127.0.0.1:1", "[::1]:1"]', ("127.0.0.1:1", "[::1]:1")),
    ):
        file.write_text(f"[http]\nlisten = {value}\n")
        http = read_settings(file, {}).http
        assert http is not None
        assert listen == http.listen.all
        shown_again = shown(read_settings(file, {}))["http"]["listen"]
        assert shown_again == (list(listen) if len(listen) > 1 else listen[0])
    for value, wrong in (("[]", "has no address"), ('["127.0.0.1"]', "is not HOST:PORT")):
        file.write_text(f"[http]\nlisten = {value}\n")
        with pytest.raises(SettingsError, match=wrong):
            read_settings(file, {})


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("100ms", 0.1), ("2s", 2.0), ("5min", 300.0), ("1.5h", 5_400.0), ("1d", 86_400.0), (" 7 us ", 7e-6)],
)
def test_durations(text: str, seconds: float) -> None:
    """Durations are read as seconds, whatever the unit."""
    assert Duration.read(text) == pytest.approx(seconds)


@pytest.mark.parametrize(
    ("text", "size"), [("1B", 1), ("8kB", 8_000), ("1.5MB", 1_500_000), ("2KiB", 2_048), ("1GiB", 1 << 30)]
)
def test_sizes(text: str, size: int) -> None:
    """Sizes are read as whole numbers of bytes, whatever the unit."""
    assert Size.read(text) == size


@pytest.mark.parametrize(
    "text", ["0.4B", "0kB", "9e9B", f"{'9' * 400}B", "9_000_000_000GB", "9000000000GiB", "5", "-1B", "8m b", 5]
)
def test_what_is_no_size_is_refused(text: object) -> None:
    """A size of zero, beyond any file's size, or without a unit is refused."""
    with pytest.raises(ValueError, match=r"byte|unit"):
        Size.read(text)


@pytest.mark.parametrize("text", ["", ":1883", "a:", "a:65536", "::1:1883", "[::1]", "a b:1", "a:1\n", "a:٣", 1883])
def test_what_is_no_address_is_refused(text: object) -> None:
    """An address needs a host and a port; an IPv6 host is in brackets."""
    with pytest.raises(ValueError, match="is not HOST:PORT"):
        Address(text)  # type: ignore[arg-type]


def test_which_addresses_are_of_this_machine() -> None:
    """Loopback addresses include IPv4 loopback addresses mapped to IPv6; host names are not resolved."""
    assert all(map(is_loopback, ["127.0.0.1", "127.9.9.9", "::1", "::ffff:127.0.0.1", "localhost"]))
    assert not any(map(is_loopback, ["0.0.0.0", "::", "10.0.0.1", "::ffff:10.0.0.1", "localhost.example", ""]))


ANYWHERE = {"plain": ListenerSettings(listen=Address("0.0.0.0:0"))}
CLUSTER = '[cluster]\nurl = "s3://bucket/plant"\nsite = "hall-1"\n'


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ('site = "a b"', "cluster: the name of a site has 1 to 64 letters"),
        ('takeover_after = "1s"', "cluster: takeover_after is at least 3 times beat_interval, 1.5 s, not 1 s"),
        ('address = "host"', "cluster.address: 'host' is not HOST:PORT"),
        ('certificate = "a.pem"', "cluster: certificate and key are given together"),
        ("takeover = 3", "cluster has no key 'takeover'; is 'takeover_after' meant?"),
    ],
)
def test_what_a_cluster_can_not_have_is_named(tmp_path: Path, more: str, said: str) -> None:
    """A wrong value of ``[cluster]`` is an error that names the key and the reason."""
    text = CLUSTER.replace('site = "hall-1"', more) if more.startswith("site") else CLUSTER + more
    with pytest.raises(SettingsError, match=re.escape(said)):
        read(text, tmp_path)


def test_a_cluster_has_its_options_from_the_settings_and_from_a_file(tmp_path: Path) -> None:
    """Options of ``options_file`` take precedence, and secrets of the settings are not shown."""
    (tmp_path / "keys.toml").write_text('[config]\nsecret_access_key = "of the file"\nregion = "eu"\n')
    text = (
        CLUSTER
        + 'options_file = "keys.toml"\naddress = "host:1883"\nbeat_interval = "100ms"\n'
        + '[cluster.options]\ntimeout = 3\n[cluster.options.config]\nregion = "us"\nsecret_access_key = "hidden"\n'
        + 'endpoint = "http://minio"\n'
        + "[durable_storage.messages]\nn_sites = 3\nreplication_factor = 5\n"
    )
    settings = read(text, tmp_path)
    with Reserved(msgspec.structs.replace(settings, listeners=ANYWHERE)) as reserved:
        cluster = cluster_of(settings, reserved)
    assert cluster is not None
    config = {"region": "eu", "secret_access_key": "of the file", "endpoint": "http://minio"}
    assert {"timeout": 3, "config": config} == cluster.options
    assert ("host:1883", 3, 5, 0.1) == (
        cluster.address,
        cluster.n_sites,
        cluster.replication_factor,
        cluster.beat_interval,
    )
    assert "***" == shown(settings)["cluster"]["options"]["config"]["secret_access_key"]


def test_a_server_enters_its_cluster_with_the_address_of_its_settings(tmp_path: Path) -> None:
    """The address of the settings is the one that other sites see."""
    text = f'[cluster]\nurl = "{(tmp_path / "log").as_uri()}"\nsite = "hall-1"\naddress = "host:1883"\n'
    settings = read(text, tmp_path)
    with Reserved(msgspec.structs.replace(settings, listeners=ANYWHERE)) as reserved:
        cluster = cluster_of(settings, reserved)
    with ts.open(tmp_path / "db", cluster=cluster, site="hall-1") as db:
        assert db.cluster is not None
        assert ["host:1883"] == [one.address for one in db.cluster.info().sites]


def test_a_server_without_an_address_for_its_cluster_has_that_of_its_first_plain_listener(tmp_path: Path) -> None:
    """The default of ``cluster.address`` has the bound port, and the machine's name for a wildcard address."""
    settings = msgspec.structs.replace(read(CLUSTER, tmp_path), listeners=ANYWHERE)
    with Reserved(settings) as reserved:
        port = reserved.places("plain")[0].port
        cluster = cluster_of(settings, reserved)
    assert cluster is not None
    assert f"{socket.getfqdn()}:{port}" == cluster.address
    web = {"web": ListenerSettings(listen=Address("127.0.0.1:0"), protocol="websocket")}
    settings = msgspec.structs.replace(settings, listeners=web)
    with Reserved(settings) as reserved, pytest.raises(SettingsError, match="address: it is missing"):
        cluster_of(settings, reserved)


def test_a_server_whose_sites_use_tls_has_the_address_of_its_first_listener_with_tls(tmp_path: Path) -> None:
    """With ``cluster.tls``, ``cluster.address`` defaults to that of a TLS listener; without one, it must be set."""
    files = TlsSettings(certificate=tmp_path / "server.pem", key=tmp_path / "server.key")
    secure = ListenerSettings(listen=Address("127.0.0.1:0"), tls=files)
    settings = read(f"{CLUSTER}tls = true\n", tmp_path)
    settings = msgspec.structs.replace(settings, listeners={**ANYWHERE, "secure": secure})
    with Reserved(settings) as reserved:
        port = reserved.places("secure")[0].port
        cluster = cluster_of(settings, reserved)
    assert cluster is not None
    assert f"127.0.0.1:{port}" == cluster.address
    settings = msgspec.structs.replace(settings, listeners=ANYWHERE)
    with Reserved(settings) as reserved, pytest.raises(SettingsError, match="with TLS and without proxies"):
        cluster_of(settings, reserved)


def test_tls_files_of_a_cluster_that_can_not_be_used_are_named(tmp_path: Path) -> None:
    """A start and a reload name the files with which other sites can't be reached."""
    (wrong := tmp_path / "wrong.pem").write_text("nonsense")
    settings = read(f'{CLUSTER}ca_file = "{wrong}"\n', tmp_path)
    with pytest.raises(ListenError, match=f"cluster: {re.escape(str(wrong))}: "):
        check_files(settings)
    with pytest.raises(ListenError, match="No such file"):
        check_files(read(f'{CLUSTER}certificate = "none.pem"\nkey = "none.key"\n', tmp_path))
