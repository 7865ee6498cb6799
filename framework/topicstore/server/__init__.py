"""The MQTT server: clients of MQTT 3.1.1 and 5 on the durable sessions of a database.

``topicstore serve`` runs it; the guide to the server says how. A program embeds it with `Server`. Importing this
package imports nothing else: the object of each name is imported when the name is first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .config.load import read_settings
    from .config.model import ListenerSettings, ServerSettings, SettingsError
    from .config.units import Address
    from .listeners import ListenError
    from .running import serve
    from .server import Server

__all__ = [
    "Address",
    "ListenError",
    "ListenerSettings",
    "Server",
    "ServerSettings",
    "SettingsError",
    "read_settings",
    "serve",
]

_MODULES = {
    "Address": "config.units",
    "ListenError": "listeners",
    "ListenerSettings": "config.model",
    "Server": "server",
    "ServerSettings": "config.model",
    "SettingsError": "config.model",
    "read_settings": "config.load",
    "serve": "running",
}


if not TYPE_CHECKING:  # a type checker that sees `__getattr__` accepts any name

    def __getattr__(name: str) -> Any:
        """Import the object of a public name when the name is first used."""
        if name not in _MODULES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        found = getattr(importlib.import_module(f".{_MODULES[name]}", __name__), name)
        globals()[name] = found
        return found


def __dir__() -> list[str]:
    """Return the public names, for completion."""
    return sorted(__all__)
