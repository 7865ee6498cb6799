"""``/config``: the settings in force, and reloading them."""

from __future__ import annotations

from typing import Any

from litestar import get, post

from topicstore.server.config.show import shown
from topicstore.server.http.context import TheContext
from topicstore.server.http.guards import needs
from topicstore.server.reload import Reloaded

__all__ = ["ROUTES"]


@get("/config", guards=[needs("admin")], tags=["configuration"], sync_to_thread=True)
def config(context: TheContext) -> dict[str, Any]:
    """Return the settings in force, with all defaults, structured as the settings file; secrets are `***`."""
    return shown(context.mqtt.settings)


@post("/config/reload", status_code=200, guards=[needs("admin")], tags=["configuration"], sync_to_thread=True)
def reload(context: TheContext) -> Reloaded:
    """Read the settings file, the environment and the certificates again, as SIGHUP does.

    The response lists the settings that have changed, those that were removed but are kept in the database, and those
    that need a restart. If a setting is invalid, the response is 400 with the place and the reason, and nothing
    changes.
    """
    return context.mqtt.reread_soon().result()


ROUTES = [config, reload]
