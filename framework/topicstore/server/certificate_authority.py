"""A private certificate authority, and the server certificates that it signs (RFC 5280).

Keys are on the curve P-256, in PEM (PKCS #8) without a passphrase. A certificate is valid from a day before it was
made, because some clients' clocks are behind.
"""

from __future__ import annotations

import contextlib
import ipaddress
import re
import socket
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, Self

import attrs
from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    load_pem_private_key,
)
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from .config.model import SettingsError

__all__ = ["Authority", "Key", "checked_name", "host_names", "names_of", "pem_of", "read_certificate"]

_AUTHORITY_DAYS = 3_650
_SERVER_DAYS = 825
"""The longest validity that Apple's systems accept (https://support.apple.com/en-us/103769)."""
_LONGEST_COMMON_NAME = 64
"""Most characters of a common name (RFC 5280, appendix A)."""
_LONGEST_DNS_NAME = 253
_LABEL = r"[A-Za-z0-9_]([A-Za-z0-9_-]{0,61}[A-Za-z0-9_])?"
_DNS_NAME = re.compile(rf"(\*\.)?{_LABEL}(\.{_LABEL})*")
_ELSEWHERE = ("192.0.2.1", 9)
"""An address for documentation (RFC 5737), to which nothing is sent."""


def checked_name(text: str) -> str:
    """Return a host name or an address in the form in which a certificate has it. Raises ValueError for other texts."""
    with contextlib.suppress(ValueError):
        return str(ipaddress.ip_address(text.strip("[]")))
    if len(text) > _LONGEST_DNS_NAME or _DNS_NAME.fullmatch(text) is None:
        raise ValueError(f"{text!r} is neither a host name, such as 'broker.home', nor an address")
    return text.lower()


def host_names() -> tuple[str, ...]:
    """Return the names and addresses by which clients on this machine and in its network may reach the machine.

    These are ``localhost``, the machine's name, also as mDNS has it, and the IPv4 address of the default route. No name
    server is asked.
    """
    name = socket.gethostname().rstrip(".")
    names = []
    for one in ("localhost", name, *(() if "." in name else (f"{name}.local",)), *_own_address(), "127.0.0.1", "::1"):
        with contextlib.suppress(ValueError):  # a machine's name may be invalid in certificates
            names.append(checked_name(one))
    return tuple(dict.fromkeys(names))


def _own_address() -> Iterator[str]:
    """Yield the address from which packets for other networks are sent; nothing if there is no route."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as one, contextlib.suppress(OSError):
        one.connect(_ELSEWHERE)  # connecting a UDP socket sends no packet
        yield one.getsockname()[0]


@attrs.frozen
class Key:
    """A private key."""

    private: Any = attrs.field(factory=lambda: ec.generate_private_key(ec.SECP256R1()), repr=False)
    """The key, as `cryptography` has it; by default a new one."""

    @classmethod
    def read(cls, path: Path) -> Self:
        """Read a key. Raises `SettingsError`."""
        try:
            return cls(load_pem_private_key(path.read_bytes(), None))
        except (OSError, ValueError, TypeError) as bad:
            raise SettingsError(f"the private key {path} can't be read: {bad}") from bad

    @property
    def pem(self) -> bytes:
        """The key in PEM."""
        found: bytes = self.private.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
        return found


@attrs.frozen
class Authority:
    """A certificate authority: its certificate, which clients trust, and its key."""

    certificate: x509.Certificate
    key: Key

    @classmethod
    def new(cls, name: str) -> Self:
        """Make an authority with a common name, valid for ten years."""
        key = Key()
        made = _builder(name, key, _AUTHORITY_DAYS, is_authority=True).issuer_name(_subject(name))
        return cls(made.sign(key.private, hashes.SHA256()), key)

    @classmethod
    def read(cls, certificate: Path, key: Path) -> Self:
        """Read an authority that `new` has made. Raises `SettingsError`."""
        found = cls(read_certificate(certificate), Key.read(key))
        if found.certificate.public_key() != found.key.private.public_key():
            raise SettingsError(f"{key} is not the key of {certificate}")
        return found

    def sign(self, names: Sequence[str], key: Key) -> x509.Certificate:
        """Return a certificate for a server's key and names, which are as `checked_name` returns them.

        The certificate is valid for 825 days, but not longer than the authority's. Raises `SettingsError` if the
        authority's certificate has expired.
        """
        ends = self.certificate.not_valid_after_utc
        if ends <= datetime.now(UTC):
            raise SettingsError(f"the certificate authority has expired on {ends:%Y-%m-%d}: make a new one")
        alternatives: list[x509.GeneralName] = []
        for one in names:
            try:
                alternatives.append(x509.IPAddress(ipaddress.ip_address(one)))
            except ValueError:
                alternatives.append(x509.DNSName(one))
        made = _builder(names[0], key, _SERVER_DAYS, is_authority=False, ends=ends)
        made = made.issuer_name(self.certificate.subject)
        made = made.add_extension(x509.SubjectAlternativeName(alternatives), critical=False)
        made = made.add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
        by = x509.AuthorityKeyIdentifier.from_issuer_public_key(self.key.private.public_key())
        return made.add_extension(by, critical=False).sign(self.key.private, hashes.SHA256())

    def has_signed(self, certificate: x509.Certificate) -> bool:
        """Return whether this authority has issued a certificate."""
        try:
            certificate.verify_directly_issued_by(self.certificate)
        except (ValueError, TypeError, InvalidSignature):
            return False
        return True


def _subject(name: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name[:_LONGEST_COMMON_NAME])])


def _builder(
    name: str, key: Key, days: int, *, is_authority: bool, ends: datetime | None = None
) -> x509.CertificateBuilder:
    """Return a certificate that lacks an issuer: of an authority, or of a server."""
    now = datetime.now(UTC)
    until = now + timedelta(days=days)
    path_length = 0 if is_authority else None
    usage = dict.fromkeys(
        ("content_commitment", "key_encipherment", "data_encipherment", "key_agreement", "encipher_only"), False
    )
    return (
        x509.CertificateBuilder()
        .subject_name(_subject(name))
        .public_key(key.private.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - timedelta(days=1))
        .not_valid_after(until if ends is None else min(until, ends))
        .add_extension(x509.BasicConstraints(ca=is_authority, path_length=path_length), critical=True)
        .add_extension(
            x509.KeyUsage(
                digital_signature=not is_authority,
                key_cert_sign=is_authority,
                crl_sign=is_authority,
                decipher_only=False,
                **usage,
            ),
            critical=True,
        )
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.private.public_key()), critical=False)
    )


def read_certificate(path: Path) -> x509.Certificate:
    """Return the first certificate of a PEM file. Raises `SettingsError`."""
    try:
        return x509.load_pem_x509_certificates(path.read_bytes())[0]
    except (OSError, ValueError) as bad:
        raise SettingsError(f"the certificate {path} can't be read: {bad}") from bad


def pem_of(certificate: x509.Certificate) -> bytes:
    """Return a certificate in PEM."""
    return certificate.public_bytes(Encoding.PEM)


def names_of(certificate: x509.Certificate) -> tuple[str, ...]:
    """Return the names and addresses for which a certificate is valid, in the certificate's order."""
    try:
        found = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except x509.ExtensionNotFound:
        return ()
    return tuple(str(one.value) for one in found if isinstance(one, (x509.DNSName, x509.IPAddress)))
