"""``/config``: the settings with which the server runs, and reading them again."""

from __future__ import annotations

from typing import Any

from litestar import get, post

from topicstore.server.configuration.shown import shown
from topicstore.server.http.context import TheContext
from topicstore.server.http.guards import needs
from topicstore.server.reloading import Reloaded

__all__ = ["ROUTES"]


@get("/config", guards=[needs("admin")], tags=["configuration"], sync_to_thread=True)
def config(context: TheContext) -> dict[str, Any]:
    """Return the settings in force, table by table as the file has them, with all defaults; secrets are `***`."""
    return shown(context.mqtt.settings)


@post("/config/reload", status_code=200, guards=[needs("admin")], tags=["configuration"], sync_to_thread=True)
def reload(context: TheContext) -> Reloaded:
    """Read the file of settings, the environment and the certificates again, as SIGHUP does.

    Says which settings have changed, which were taken out but are kept in the database as they were, and which need a
    restart. If anything in the file can't be used, the answer is 400 and says where and why, and nothing changes.
    """
    return context.mqtt.reread_soon().result()


ROUTES = [config, reload]
