"""The files of a new server: its settings, its users, a token, and certificates of a private authority."""

from __future__ import annotations

import os
import secrets
import socket
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path

import attrs
from cryptography import x509
from msgspec.structs import replace

from topicstore.runtime.closing import Closer

from .access.passwords import PasswordFile
from .certificate_authority import Authority, Key, names_of, pem_of, read_certificate
from .config.model import (
    MESSAGES,
    AuthenticationSettings,
    AuthorizationSettings,
    DurableSessionsSettings,
    HttpSettings,
    ListenerSettings,
    Rule,
    ServerSettings,
    SettingsError,
    StorageSettings,
    TlsSettings,
)
from .config.show import chosen_file, default_file
from .config.units import Address
from .http.tokens import Tokens
from .replaced_file import ReplacedFile, create_file

__all__ = ["NewServer", "create_server", "renew"]

_AUTHORITY, _AUTHORITY_KEY = Path("ca.pem"), Path("ca.key")
_CERTIFICATE, _KEY = Path("server.pem"), Path("server.key")
_USERS, _TOKENS, _DATA = Path("users"), Path("tokens"), Path("topicstore-data")
"""The files and the database of a new server, in the directory of its settings."""
_TOKEN = "page"  # noqa: S105 - its name
"""The name of the token that a new server has."""
_LETTERS = "abcdefghijkmnopqrstuvwxyzABCDEFGHJKLMNPQRSTUVWXYZ23456789"
"""The characters of generated passwords: letters and digits, but for those that look alike."""
_LENGTH = 20
"""The characters of a generated password, which have 116 bits in all."""


@attrs.frozen(kw_only=True)
class NewServer:
    """The result of `create_server`."""

    files: Sequence[Path]
    """The files, of which the first is that of the settings."""
    passwords: Mapping[str, str] = attrs.field(repr=False)
    """The passwords, by user."""
    token: str | None = attrs.field(repr=False)
    """An admin token for the page and HTTP; None without users, because then clients on this machine need none."""
    authority: Path | None
    """The certificate by which clients know the server; None without TLS."""
    directory: Path
    """The directory of the database."""
    address: Address
    """The address at which MQTT clients connect."""
    valid_until: datetime | None
    """The end of the server certificate's validity; None without TLS."""


def create_server(
    file: Path, durable_sessions: DurableSessionsSettings, users: Sequence[str], names: Sequence[str]
) -> NewServer:
    """Create the files of a new server in the directory of ``file``, which is the settings file.

    Without users, names, or other settings than the defaults, the file has all settings with their defaults. Keys,
    users, tokens and settings are readable by the owner only. Raises `SettingsError` if one of the files exists,
    `PasswordFileError` for a name that no user can have, and `OSError`; then no file is left.

    users: users who may publish and read everything, and read the figures below ``$SYS``. If there are any, all others
           are refused, and HTTP needs a token.
    names: host names and addresses of the server's certificate; without any, the server has no TLS.
    """
    folder = file.parent
    settings = _settings(durable_sessions, tuple(dict.fromkeys(users)), tls=bool(names))
    chosen = bool(users or names) or durable_sessions != DurableSessionsSettings()
    secret = {file: (chosen_file(settings) if chosen else default_file()).encode()}
    public: dict[Path, bytes] = {}
    certificate = None
    if users:
        secret |= {folder / _USERS: b"", folder / _TOKENS: b""}
    if names:
        authority, key = Authority.new(f"topicstore authority of {socket.gethostname()}"), Key()
        certificate = authority.sign(names, key)
        public |= {folder / _AUTHORITY: pem_of(authority.certificate), folder / _CERTIFICATE: pem_of(certificate)}
        secret |= {folder / _AUTHORITY_KEY: authority.key.pem, folder / _KEY: key.pem}
    if not folder.is_dir():
        raise SettingsError(f"there is no directory {folder}")
    there = [str(path) for path in (*secret, *public) if os.path.lexists(path)]
    if there:
        raise SettingsError(f"nothing is overwritten, and {', '.join(there)} exist{'s' * (len(there) == 1)} already")
    with Closer() as closer:
        for path, content in (secret | public).items():
            _create(path, content, closer, secret=path in secret)
        passwords = {user: "".join(secrets.choice(_LETTERS) for _ in range(_LENGTH)) for user in users}
        for user, password in passwords.items():
            PasswordFile(folder / _USERS).put(user, password.encode())
        token = Tokens(folder / _TOKENS).add(_TOKEN, "admin") if users else None
    return NewServer(
        files=(*secret, *public),
        passwords=passwords,
        token=token,
        authority=folder.absolute() / _AUTHORITY if names else None,
        directory=folder / _DATA,
        address=next(iter(settings.listeners.values())).listen,
        valid_until=None if certificate is None else certificate.not_valid_after_utc,
    )


def _settings(durable_sessions: DurableSessionsSettings, users: tuple[str, ...], *, tls: bool) -> ServerSettings:
    """Return the settings of a new server, with paths relative to their file."""
    found = ServerSettings(
        durable_sessions=durable_sessions,
        durable_storage={MESSAGES: StorageSettings(data_dir=_DATA)},
        http=HttpSettings(token_file=_TOKENS if users else None),
    )
    if users:
        starred = [user for user in users if "*" in user]
        if starred:
            raise SettingsError(f"the user {starred[0]!r} would be a pattern in the access rules")
        found = replace(
            found,
            authentication=AuthenticationSettings(anonymous="never", password_file=_USERS),
            authorization=AuthorizationSettings(rules=(Rule(permission="allow", topics=("#", "$SYS/#"), users=users),)),
        )
    if tls:
        files = TlsSettings(certificate=_CERTIFICATE, key=_KEY)
        found = replace(found, listeners={"mqtts": ListenerSettings(listen=Address("0.0.0.0:8883"), tls=files)})
    return found


def _create(path: Path, content: bytes, closer: Closer, *, secret: bool) -> None:
    """Create a file that ``closer`` removes, also if an interrupt comes right after its creation."""
    ours = True

    def remove() -> None:
        if ours:
            path.unlink(missing_ok=True)

    closer.add(remove)
    try:
        create_file(path, content, secret=secret)
    except FileExistsError:
        ours = False
        raise


def renew(certificate: Path, key: Path, names: Sequence[str]) -> x509.Certificate:
    """Replace a server's certificate by a new one, for the same key and names, and for further ``names``.

    The private authority, whose files are beside the certificate, signs the new one. The file is replaced atomically,
    and keeps its owner and permissions. Raises `SettingsError`, also if the certificate is of another authority.
    """
    authority = Authority.read(certificate.with_name(_AUTHORITY.name), certificate.with_name(_AUTHORITY_KEY.name))
    before = read_certificate(certificate)
    if not authority.has_signed(before):
        raise SettingsError(
            f"{certificate} is not of the authority {certificate.with_name(_AUTHORITY.name)}: renew it where it is from"
        )
    made = authority.sign(tuple(dict.fromkeys((*names_of(before), *names))), Key.read(key))
    ReplacedFile(certificate, "certificates", SettingsError).rewrite(lambda _: pem_of(made).decode())
    return made
