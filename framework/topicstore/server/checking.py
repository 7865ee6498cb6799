"""Checks that the plugins and files which settings name exist and can be read: passwords, access plugins, TLS."""

from __future__ import annotations

from .access.access import Access
from .listeners import read_tls
from .settings import ServerSettings

__all__ = ["check_files"]


def check_files(settings: ServerSettings) -> None:
    """Load the access plugins, and read the password and TLS files that settings name, as a start does.

    Raises `SettingsError`, `PasswordFileError` and `ListenError`.
    """
    Access(settings.authentication, settings.authorization).close()
    for name, one in settings.listeners.items():
        read_tls(name, one)
    if settings.http is not None and settings.http.tls is not None:
        from .http.certificate import Certificate

        Certificate(settings.http.tls)
