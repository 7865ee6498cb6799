"""``/retention``: limits of the messages' age and size, planned removals, and runs of retention."""

from __future__ import annotations

from typing import Any

import attrs
import msgspec
from litestar import Request, get, post, put
from litestar.params import JSONBody
from msgspec import UNSET, UnsetType

from topicstore.lifecycle.retention import RetentionReport
from topicstore.lifecycle.retention_outlook import Departure
from topicstore.lifecycle.retention_policy import RetentionSettings, WhenFull
from topicstore.server.http.context import TheContext
from topicstore.server.http.guards import is_owner, needs
from topicstore.server.http.jobs import place_below

__all__ = ["ROUTES"]


class RetentionState(msgspec.Struct, kw_only=True):
    """The limits, as documented by `RetentionSettings`, and their effects on the stored messages."""

    max_age: float | None
    rotate_every: float | None
    max_bytes: int | None
    """The quota: most bytes of stored values; null: no limit."""
    when_full: WhenFull
    archive_to: str | None
    filters: dict[str, float | None]
    delivered: float | None
    live_bytes: int
    """Bytes of the stored values."""
    generations: int
    failure: str | None
    """The error of the last background run; null if it succeeded."""
    clock_ahead: float
    """Seconds by which the clock has jumped forward, which don't count for the messages' age."""
    outlook: list[Departure]
    """Planned removals, with their times and reasons."""


class RetentionChange(msgspec.Struct, forbid_unknown_fields=True):
    """Limits to change. A field that is left out doesn't change; null or "infinity" removes a limit.

    Durations are seconds, or texts such as "30d" and "1d12h"; sizes are bytes, or texts such as "10GB".
    """

    max_age: float | str | UnsetType | None = UNSET
    rotate_every: float | str | UnsetType | None = UNSET
    max_bytes: int | str | UnsetType | None = UNSET
    when_full: WhenFull | UnsetType = UNSET
    archive_to: str | UnsetType | None = UNSET
    """A directory below ``export_dir`` of the settings."""
    filters: dict[str, float | str | None] | UnsetType = UNSET
    """By topic filter, the age limit of matching messages instead of ``max_age``; null: none. Replaces all filters."""
    delivered: float | str | UnsetType | None = UNSET
    """The age from which messages that are stored only for sessions are removed, once no session needs them."""


@get("/retention", guards=[needs("read")], tags=["retention"], sync_to_thread=True)
def retention(context: TheContext) -> RetentionState:
    """Return the limits, sizes of stored values, and planned removals with times and reasons.

    A site of a cluster asks the others about shards that it doesn't keep. If none answers, the response is 503.
    """
    retention, found = context.db.retention, context.db.generations()
    return RetentionState(
        **attrs.asdict(retention.settings),
        live_bytes=sum(one.live_bytes for one in found),
        generations=len(found),
        failure=retention.failure,
        clock_ahead=retention.clock_ahead,
        outlook=retention.outlook(),
    )


@put("/retention", guards=[needs("admin")], tags=["retention"], sync_to_thread=True)
def set_retention(
    context: TheContext, request: Request[Any, Any, Any], data: JSONBody[RetentionChange]
) -> RetentionSettings:
    """Change limits. Nothing is removed before the next run or the next stored message."""
    changed = _given(data)
    if isinstance(changed.get("archive_to"), str) and not is_owner(request):
        changed["archive_to"] = str(place_below(context.settings.export_dir, changed["archive_to"]))
    return context.db.retention.set(**changed)


@post("/retention/outlook", guards=[needs("read")], tags=["retention"], status_code=200, sync_to_thread=True)
def outlook(context: TheContext, data: JSONBody[RetentionChange]) -> list[Departure]:
    """Return the removals that would be planned with these limits, and their counts. Nothing is changed.

    The messages that filters remove are counted, which reads the topics and sizes of all messages that are old enough.
    A site of a cluster sends the request to others for the shards that it doesn't keep. If none answers, the response
    is 503.
    """
    return context.db.retention.outlook(limits=_given(data), count=True)


def _given(data: RetentionChange) -> dict[str, Any]:
    return {key: value for key, value in msgspec.structs.asdict(data).items() if not isinstance(value, UnsetType)}


@post("/retention/run", guards=[needs("admin")], tags=["retention"], status_code=200, sync_to_thread=True)
def run_retention(context: TheContext) -> RetentionReport:
    """Begin a new generation if it is due, remove generations that exceed the limits, and report why others stay.

    The response is sent after the run; `POST /jobs` with the kind `retention` doesn't wait.
    """
    return context.db.retention.run()


ROUTES = [retention, set_retention, outlook, run_retention]
