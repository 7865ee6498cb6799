"""HTTP clients for requests to other sites of a cluster."""

from __future__ import annotations

import ssl
from collections.abc import Callable
from typing import Generic, TypeVar

import httpx

from topicstore.server.cluster import SiteTls

__all__ = ["SiteClients"]

C = TypeVar("C", httpx.Client, httpx.AsyncClient)

_POOL = httpx.Limits(max_connections=None, max_keepalive_connections=0)
"""Connections close after each request. So an idle client has nothing to close, and no request meets a connection that
the other site is closing. Callers bound the number of their requests."""


class SiteClients(Generic[C]):
    """The clients for ``http`` and ``https``; new ones after the cluster's certificates were read again. Thread-safe.

    They use no proxies of the environment and follow no redirects.
    """

    def __init__(self, tls: SiteTls, make: Callable[..., C]) -> None:
        self._tls = tls
        self._make: Callable[..., C] = make
        self._clients: dict[str, tuple[ssl.SSLContext | None, C]] = {}
        """The client for each scheme, with the TLS context that it uses. Entries are replaced as a whole."""

    def of(self, scheme: str) -> C:
        """Return the client for a scheme. Raises `ListenError` if the files of the certificates can't be read."""
        context = self._tls.context if scheme == "https" else None
        known = self._clients.get(scheme)
        if known is None or known[0] is not context:
            client = self._make(verify=context or False, limits=_POOL, trust_env=False)
            known = self._clients[scheme] = context, client
        return known[1]
