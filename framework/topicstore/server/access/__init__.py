"""Authentication and authorization of clients.

`Access` decides for the whole server, `Permissions` for one connection. Both are independent of MQTT's packets: a
refusal has a cause, which the caller translates to a reason code.
"""

from __future__ import annotations

from .access import Access, Identity, Login, Refusal
from .passwords import PasswordFile, PasswordFileError
from .permissions import Permissions

__all__ = ["Access", "Identity", "Login", "PasswordFile", "PasswordFileError", "Permissions", "Refusal"]
