"""TLS certificates signed by a certificate authority (CA) made for a test."""

from __future__ import annotations

import ssl
from pathlib import Path
from typing import Any

import pytest

__all__ = ["Authority"]


class Authority:
    """A certificate authority that writes certificates to a folder.

    ``signs``: the `trustme.CA` to use, by default a new one.
    """

    def __init__(self, folder: Path, signs: Any = None) -> None:
        trustme = pytest.importorskip("trustme", reason="needs trustme: pip install trustme")
        self.folder, self.signs = folder, signs or trustme.CA()
        self.path = folder / "authority.pem"
        self.signs.cert_pem.write_to_path(self.path)

    def sign(self, file: str, common_name: str | None = None) -> tuple[Path, Path]:
        """Write a certificate chain for 127.0.0.1 and its private key; return their paths."""
        signed = self.signs.issue_cert("127.0.0.1", common_name=common_name)
        paths = self.folder / f"{file}.pem", self.folder / f"{file}.key"
        paths[0].write_bytes(b"".join(blob.bytes() for blob in signed.cert_chain_pems))
        signed.private_key_pem.write_to_path(paths[1])
        return paths

    def trusting(self, *own: tuple[Path, Path]) -> ssl.SSLContext:
        """Return the TLS context of a client that trusts this authority.

        ``own``: the paths of the client's certificates and keys.
        """
        context = ssl.create_default_context(cafile=str(self.path))
        for certificate, key in own:
            context.load_cert_chain(certificate, key)
        return context
