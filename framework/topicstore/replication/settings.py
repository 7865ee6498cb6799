"""`Cluster`, the settings of one site of a cluster."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import attrs

from topicstore.contract.arguments import check_count
from topicstore.contract.errors import InvalidArgumentError

__all__ = ["Cluster", "check_site"]

_SITE = re.compile(r"[A-Za-z0-9_=-][A-Za-z0-9._=-]{0,63}")
_BEATS = 3
"""The least number of heartbeat intervals in the time after which an unresponsive owner is replaced."""


@attrs.frozen
class Cluster:
    """A cluster, which shares a database through a log store, and one site's settings for it.

    url:                the log store: ``file:///path``, or a bucket such as ``s3://bucket/prefix``.
    options:            options of the log store, such as ``{"config": {"endpoint": …}}``.
    address:            the address of this site, which errors on other sites name.
    http_address:       the URL of this site's HTTP interface, such as ``http://host:18083``, to which the servers of
                        other sites forward requests.
    n_sites:            the number of sites that must have joined before anything is stored. Once they have, sites may
                        leave.
    replication_factor: the number of sites that keep each shard; None for all. With up to three sites, all keep every
                        shard. Give all sites the same number: each applies its own when it moves shards.
    beat_interval:      seconds between two heartbeats of this site.
    takeover_after:     seconds without a heartbeat of an owner after which this site takes over its shards; at least
                        three times ``beat_interval``.
    poll_interval:      seconds between two requests for the next entry of a shard that another site owns.
    flush_interval:     seconds that a change waits for others, which are then written to the log with it, in one
                        request. This saves requests of a store that charges for them. 0: no change waits.
    store_timeout:      seconds that a call, and each step of an opening, waits for the log store; more than
                        ``flush_interval``.
    log_retention:      seconds for which the log is kept for an unresponsive replica. A replica that comes back later
                        is copied from a snapshot.

    Raises `InvalidArgumentError`.
    """

    url: str
    options: Mapping[str, Any] = attrs.field(factory=dict, repr=False, kw_only=True)
    address: str = attrs.field(default="", kw_only=True)
    http_address: str = attrs.field(default="", kw_only=True)
    n_sites: int = attrs.field(default=1, kw_only=True)
    replication_factor: int | None = attrs.field(default=3, kw_only=True)
    beat_interval: float = attrs.field(default=0.5, kw_only=True)
    takeover_after: float = attrs.field(default=2.0, kw_only=True)
    poll_interval: float = attrs.field(default=1.0, kw_only=True)
    flush_interval: float = attrs.field(default=0.0, kw_only=True)
    store_timeout: float = attrs.field(default=30.0, kw_only=True)
    log_retention: float = attrs.field(default=3_600.0, kw_only=True)

    def __attrs_post_init__(self) -> None:
        if not isinstance(self.url, str):
            raise InvalidArgumentError(f"a cluster is named by the URL of its log store, not by {self.url!r}")
        check_count("n_sites", self.n_sites)
        if self.replication_factor is not None:
            check_count("replication_factor", self.replication_factor)
        for name in ("beat_interval", "takeover_after", "poll_interval", "store_timeout"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < float("inf"):
                raise InvalidArgumentError(f"{name} is seconds above 0, not {value!r}")
        for name in ("flush_interval", "log_retention"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value < float("inf"):
                raise InvalidArgumentError(f"{name} is seconds from 0, not {value!r}")
        if self.flush_interval >= self.store_timeout:
            raise InvalidArgumentError(
                f"flush_interval is less than store_timeout, {self.store_timeout:g} s, not {self.flush_interval:g} s"
            )
        if self.takeover_after < _BEATS * self.beat_interval:
            raise InvalidArgumentError(
                f"takeover_after is at least {_BEATS} times beat_interval, {_BEATS * self.beat_interval:g} s, not "
                f"{self.takeover_after:g} s: otherwise a late heartbeat would cost a working owner its shards"
            )


def check_site(name: object) -> str:
    """Return the name of a site. Raises `InvalidArgumentError` for a name that can't be part of an object's name."""
    if not isinstance(name, str) or not _SITE.fullmatch(name):
        raise InvalidArgumentError(
            f"the name of a site has 1 to 64 letters, digits and ._=-, and does not begin with a dot, not {name!r}"
        )
    return name
