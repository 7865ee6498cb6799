"""``/info``, ``/config``, ``/listeners`` and ``/scope``: the database, the server's settings, and a request's scope."""

from __future__ import annotations

from typing import Any

import msgspec
from litestar import Request, get, post

from topicstore.database import DatabaseInfo
from topicstore.server.config.show import shown
from topicstore.server.http.context import TheContext
from topicstore.server.http.guards import granted, needs
from topicstore.server.http.parameters import Page
from topicstore.server.http.tokens import Scope
from topicstore.server.listeners.peer import Scheme
from topicstore.server.reload import Reloaded

__all__ = ["ROUTES"]


class ListenerEntry(msgspec.Struct, kw_only=True):
    """A listener for MQTT clients."""

    name: str
    scheme: Scheme
    """The scheme of its URLs: plain or TLS, and with or without WebSocket."""
    addresses: list[str]
    """The bound addresses, with their ports."""


class GrantedScope(msgspec.Struct):
    """The scope that a request has."""

    scope: Scope


@get("/info", guards=[needs("read")], tags=["database"], sync_to_thread=True)
def info(context: TheContext) -> DatabaseInfo:
    """Return sizes, counts, generations and shards of the database, as `Database.info` does.

    A site of a cluster asks the others about shards that it doesn't keep. `missing` has the shards of which no site
    answers, and why.
    """
    return context.db.info()


@get("/listeners", guards=[needs("read")], tags=["configuration"], sync_to_thread=True)
def listeners(context: TheContext) -> Page[ListenerEntry]:
    """Return the listeners that accept MQTT clients, in the order of the settings, with their bound addresses."""
    return Page(
        items=[
            ListenerEntry(name=one.via.name, scheme=one.via.scheme, addresses=one.addresses)
            for one in context.mqtt.listeners
        ]
    )


@get("/scope", guards=[needs("read")], tags=["configuration"], sync_to_thread=True)
def scope(request: Request[Any, Any, Any]) -> GrantedScope:
    """Return the scope of the request's token, or of a request without a token: `read`, `write` or `admin`."""
    found = granted(request)
    assert found is not None  # noqa: S101 - the guard has refused other requests
    return GrantedScope(found)


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


ROUTES = [info, listeners, scope, config, reload]
