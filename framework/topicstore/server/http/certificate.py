"""The TLS certificate of the HTTP interface, which can be replaced while the server runs."""

from __future__ import annotations

import re
import ssl

from topicstore.server.listeners import ListenError
from topicstore.server.listeners.tls import tls_context, unusable_files
from topicstore.server.settings import HttpTlsSettings, TlsSettings

__all__ = ["Certificate"]

_PEM = re.compile(rb"-----BEGIN [A-Z0-9 ]*CERTIFICATE-----.*?-----END [A-Z0-9 ]*CERTIFICATE-----\n?", re.DOTALL)


class Certificate:
    """The certificate and key of ``[http.tls]``, read from their files. Raises `ListenError` if they can't be used."""

    def __init__(self, settings: HttpTlsSettings) -> None:
        files = TlsSettings(certificate=settings.certificate, key=settings.key)
        try:
            self._now = tls_context(files, protocol="http/1.1")
            own, *_ = _PEM.findall(settings.certificate.read_bytes())
        except (OSError, ValueError) as bad:
            raise ListenError(f"http: {unusable_files(files, bad)}") from bad
        self.pem: str = own.decode()
        """The certificate as PEM, without intermediate certificates, because those also sign other certificates."""
        self.context = self._now
        """The context for the listening socket; each new connection uses the current certificate."""
        self.context.sni_callback = self._choose

    def become(self, other: Certificate) -> None:
        """Use another certificate for new connections."""
        self._now, self.pem = other._now, other.pem

    def _choose(self, connection: ssl.SSLObject, name: str | None, context: ssl.SSLContext) -> None:
        """Set the current certificate for a new connection; also called without SNI."""
        connection.context = self._now
