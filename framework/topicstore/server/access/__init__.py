"""Who may connect, and what it may do then.

`Access` answers for the whole server, `Permissions` for one connection. Both know nothing of MQTT's packets: a refusal
says why, and whoever asked makes a reason code of it.
"""

from __future__ import annotations

from .access import Access, Identity, Login, Refusal
from .passwords import PasswordFile, PasswordFileError
from .permissions import Permissions

__all__ = ["Access", "Identity", "Login", "PasswordFile", "PasswordFileError", "Permissions", "Refusal"]
