"""The TLS context of a listener, from certificate files that can be replaced while the server runs, and expire."""

from __future__ import annotations

import asyncio
import logging
import re
import ssl
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime, timedelta
from pathlib import Path

from topicstore.server.config.model import HttpTlsSettings, ServerSettings, SettingsError, TlsSettings

from .reserving import ListenError

__all__ = [
    "Certificate",
    "Expiry",
    "certificate_files",
    "expiry_warnings",
    "read_ends",
    "refuse_passphrase",
    "tls_context",
    "unusable_files",
]

_log = logging.getLogger(__name__)

_VERIFY = {"ignored": ssl.CERT_NONE, "optional": ssl.CERT_OPTIONAL, "required": ssl.CERT_REQUIRED}
_VERSIONS = {"1.2": ssl.TLSVersion.TLSv1_2, "1.3": ssl.TLSVersion.TLSv1_3}


def tls_context(settings: TlsSettings, *, protocol: str) -> ssl.SSLContext:
    """Read the files, and return a listener's TLS context; ``protocol`` is the ALPN name of the application protocol.

    Raises OSError, also if a file is invalid or the key doesn't match the certificate (`ssl.SSLError`).
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = _VERSIONS[settings.minimum_version]
    context.load_cert_chain(settings.certificate, settings.key, password=refuse_passphrase)
    context.verify_mode = _VERIFY[settings.client_certificates]
    if settings.client_authorities is not None:
        context.load_verify_locations(settings.client_authorities)
    if settings.crl_file is not None:
        _load_revoked(context, settings.crl_file)
    context.set_alpn_protocols([protocol])
    return context


def _load_revoked(context: ssl.SSLContext, file: Path) -> None:
    """Read lists of revoked certificates. A certificate in the file is an error, because it would be trusted."""
    before = context.cert_store_stats()
    context.load_verify_locations(file)
    after = context.cert_store_stats()
    if after["crl"] == before["crl"] or after["x509"] != before["x509"]:
        raise ssl.SSLError(f"{file} has no list of revoked certificates, or has certificates, too")
    context.verify_flags |= ssl.VERIFY_CRL_CHECK_LEAF


def unusable_files(settings: TlsSettings, bad: Exception) -> str:
    """Return an error text after reading TLS files failed; OpenSSL doesn't report which file caused the error."""
    named = (settings.certificate, settings.key, settings.client_authorities, settings.crl_file)
    files = [path for path in named if path is not None]
    missing = [str(path) for path in files if _is_missing(path)]
    if missing:
        return f"there is no TLS file {' and no '.join(missing)}"
    hint = "; PEM is expected, and the certificate's own key" if isinstance(bad, (ssl.SSLError, UnicodeError)) else ""
    return f"the TLS files {', '.join(map(str, files))} can't be used: {bad}{hint}"


def _is_missing(path: Path) -> bool:
    try:
        path.stat()
    except FileNotFoundError:
        return True
    except OSError:  # reported when the file was read
        return False
    return False


def refuse_passphrase() -> str:
    """Refuse a key with a passphrase, for which OpenSSL would prompt on the terminal."""
    raise ssl.SSLError("the private key has a passphrase; a server can't ask for it")


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


_SOON = timedelta(days=14)
"""The time before expiry from which a certificate is logged; programs such as certbot renew 30 days before."""
_DAY = 86_400.0


def certificate_files(settings: ServerSettings) -> dict[str, tuple[Path, Path]]:
    """Return the certificates that settings name, each with its key, by section such as ``http``."""
    found = {f"listeners.{name}": one.tls for name, one in settings.listeners.items()}
    http, cluster = settings.http, settings.cluster
    files = {name: (one.certificate, one.key) for name, one in found.items() if one is not None}
    if http is not None and http.tls is not None:
        files["http"] = (http.tls.certificate, http.tls.key)
    if cluster is not None and cluster.certificate is not None and cluster.key is not None:
        files["cluster"] = (cluster.certificate, cluster.key)
    return files


def read_ends(settings: ServerSettings) -> dict[str, datetime]:
    """Return the end of validity of the certificates that settings name, by section.

    A certificate that OpenSSL accepts, but this function can't parse, is logged and omitted.
    """
    files = certificate_files(settings)
    if not files:
        return {}
    from topicstore.server.certificate_authority import read_certificate  # imported late: it imports a large library

    ends: dict[str, datetime] = {}
    for section, (path, _) in files.items():
        try:
            ends[section] = read_certificate(path).not_valid_after_utc
        except SettingsError as bad:
            _log.warning("nothing watches when the certificate of %s expires: %s", section, bad)
    return ends


def expiry_warnings(ends: Mapping[str, datetime], now: datetime) -> Iterator[str]:
    """Yield a sentence for each certificate that has expired, or expires within two weeks."""
    for section, end in ends.items():
        if end <= now:
            yield f"the certificate of {section} has expired on {end:%Y-%m-%d}: no client that checks it connects"
        elif end - now <= _SOON:
            yield f"the certificate of {section} expires on {end:%Y-%m-%d}: renew it, and reload the server"


class Expiry:
    """Logs the certificates in use that expire soon, once when they are loaded and then daily. Used in the event loop.

    ``ends`` may be read in any thread.
    """

    def __init__(self) -> None:
        self.ends: Mapping[str, datetime] = {}
        """The end of validity of the certificates in use, by section."""
        self._next: asyncio.TimerHandle | None = None

    def use(self, ends: Mapping[str, datetime]) -> None:
        """Replace the watched certificates. Those that expire soon are logged now, and then daily until `stop`."""
        self.stop()
        self.ends = ends
        for sentence in expiry_warnings(ends, datetime.now(UTC)):
            _log.warning("%s", sentence)
        if ends:
            self._next = asyncio.get_running_loop().call_later(_DAY, self.use, ends)

    def stop(self) -> None:
        """Log no more."""
        if self._next is not None:
            self._next.cancel()
            self._next = None
