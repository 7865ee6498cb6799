"""The server as a site of a cluster: its settings for `topicstore.open`, and connections to other sites.

The settings have the addresses that other sites use, and the files with which they trust each other's certificates.
"""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
import socket
import ssl
import tomllib
from typing import Any
from urllib.parse import urlsplit

from topicstore.contract.errors import InvalidArgumentError
from topicstore.files.text import read_text
from topicstore.replication.settings import Cluster
from topicstore.replication.site import Site

from .config.model import ClusterSettings, ServerSettings, SettingsError
from .config.units import written_address
from .listeners.reserving import ListenError, Place, Reserved
from .listeners.tls import refuse_passphrase

__all__ = ["SiteTls", "cluster_of", "http_token", "mqtt_key"]


def cluster_of(settings: ServerSettings, reserved: Reserved) -> Cluster | None:
    """Return the cluster that the settings describe, for `topicstore.open`; None if the server is alone.

    ``reserved`` has the bound sockets of all listeners. Raises `SettingsError`.
    """
    cluster = settings.cluster
    if cluster is None:
        return None
    messages = settings.messages
    try:
        return cluster.cluster(
            _options(cluster),
            address=_address(settings, cluster, reserved),
            http_address=_http_address(settings, cluster, reserved),
            n_sites=messages.n_sites,
            replication_factor=messages.replication_factor,
        )
    except InvalidArgumentError as bad:
        raise SettingsError(f"cluster: {bad}") from bad


def _options(cluster: ClusterSettings) -> dict[str, Any]:
    """Return the log store's options: those of the settings, and in place of the same keys those of the file."""
    if cluster.options_file is None:
        return cluster.options
    try:
        found = tomllib.loads(read_text(cluster.options_file))
    except (OSError, ValueError) as bad:
        raise SettingsError(f"cluster.options_file: {cluster.options_file}: {bad}") from bad
    for key, value in cluster.options.items():
        there = found.setdefault(key, value)
        if isinstance(there, dict) and isinstance(value, dict):
            found[key] = {**value, **there}
    return found


def _address(settings: ServerSettings, cluster: ClusterSettings, reserved: Reserved) -> str:
    """Return the address at which other sites reach this one: that of the settings, or of the first listener."""
    if cluster.address is not None:
        return str(cluster.address)  # `Cluster` takes a plain string
    for name, listener in settings.listeners.items():
        if listener.protocol == "mqtt" and (listener.tls is not None) == cluster.tls and not listener.proxies:
            return _reachable(reserved.places(name))
    raise SettingsError(
        "cluster.address: it is missing: other sites reach this one at a listener for MQTT over TCP, and none of the "
        f"listeners is one {'with TLS and without proxies' if cluster.tls else 'without TLS and proxies'}"
    )


def _http_address(settings: ServerSettings, cluster: ClusterSettings, reserved: Reserved) -> str:
    """Return the URL of this site's HTTP interface: that of the settings, or of the first address; empty without any.

    Raises `SettingsError`.
    """
    if cluster.http_address is not None:
        parts = urlsplit(cluster.http_address)
        if parts.scheme not in ("http", "https") or not parts.hostname or parts.path.strip("/"):
            raise SettingsError(
                f"cluster.http_address: {cluster.http_address!r} is no URL without a path, such as http://host:18083"
            )
        return cluster.http_address.rstrip("/")
    if settings.http is None:
        return ""
    scheme = "http" if settings.http.tls is None else "https"
    return f"{scheme}://{_reachable(reserved.places(None))}"


def http_token(site: Site) -> str:
    """Return the token with which the sites of a cluster forward requests to each other."""
    return hmac.digest(site.token, b"http", hashlib.sha256).hex()


def mqtt_key(site: Site) -> bytes:
    """Return the key with which the sites of a cluster sign the headers of clients' connections that they pass on."""
    return hmac.digest(site.token, b"mqtt", hashlib.sha256)


class SiteTls:
    """TLS of the connections to other sites, from files that can be replaced while the server runs. Thread-safe."""

    def __init__(self, settings: ClusterSettings | None) -> None:
        """Read the files that the settings name. Raises `ListenError`."""
        self._settings = settings
        self._context: ssl.SSLContext | None = None
        if settings is not None and (settings.tls or settings.ca_file or settings.certificate):
            self._context = self.read()

    def read(self) -> ssl.SSLContext:
        """Read the files again; `use` applies the result. Raises `ListenError`."""
        files = self._settings
        try:
            context = ssl.create_default_context(cafile=None if files is None else files.ca_file)
            if files is not None and files.certificate is not None:
                context.load_cert_chain(files.certificate, files.key, password=refuse_passphrase)
        except (OSError, ValueError) as bad:  # OpenSSL doesn't report which file caused the error
            named = () if files is None else (files.ca_file, files.certificate, files.key)
            raise ListenError(f"cluster: {' and '.join(str(one) for one in named if one)}: {bad}") from bad
        return context

    def use(self, context: ssl.SSLContext) -> None:
        """Use a context for new connections."""
        self._context = context

    @property
    def context(self) -> ssl.SSLContext:
        """The context of connections over TLS, which checks certificates and the names of hosts."""
        if self._context is None:
            self._context = self.read()
        return self._context

    @property
    def for_mqtt(self) -> ssl.SSLContext | None:
        """The context of connections for MQTT clients; None if the settings want none."""
        return self.context if self._settings is not None and self._settings.tls else None


def _reachable(places: list[Place]) -> str:
    """Return the first of some bound addresses, with the machine's name in place of a wildcard address."""
    host, port = places[0].at[:2]
    if ipaddress.ip_address(host.partition("%")[0]).is_unspecified:
        host = socket.getfqdn()
    return written_address((host, port))
