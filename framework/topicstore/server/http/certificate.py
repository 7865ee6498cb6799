"""The TLS of the HTTP interface, whose certificate can be changed while it serves."""

from __future__ import annotations

import re
import ssl

from topicstore.server.listeners import ListenError
from topicstore.server.listeners.tls import tls_context, unusable_files
from topicstore.server.settings import HttpTlsSettings, TlsSettings

__all__ = ["Certificate"]

_PEM = re.compile(rb"-----BEGIN [A-Z0-9 ]*CERTIFICATE-----.*?-----END [A-Z0-9 ]*CERTIFICATE-----\n?", re.DOTALL)


class Certificate:
    """The files of ``[http.tls]`` as they are now. Raises `ListenError` if they can't be used."""

    def __init__(self, settings: HttpTlsSettings) -> None:
        files = TlsSettings(certificate=settings.certificate, key=settings.key)
        try:
            self._now = tls_context(files, protocol="http/1.1")
            own, *_ = _PEM.findall(settings.certificate.read_bytes())
        except (OSError, ValueError) as bad:
            raise ListenError(f"http: {unusable_files(files, bad)}") from bad
        self.pem: str = own.decode()
        """The certificate itself as text, without those between it and the authority, which vouch for others too."""
        self.context = self._now
        """What listens; each connection then gets the certificate that this one has become."""
        self.context.sni_callback = self._choose

    def become(self, other: Certificate) -> None:
        """Be another certificate, for connections from now on."""
        self._now, self.pem = other._now, other.pem

    def _choose(self, connection: ssl.SSLObject, name: str | None, context: ssl.SSLContext) -> None:
        """Give a connection that begins the certificate of now; called with no name too."""
        connection.context = self._now
