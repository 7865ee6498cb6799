"""``/retention``: how long messages stay and how many bytes of them, what goes when, and a run of it."""

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
from topicstore.server.http.export_places import place_below
from topicstore.server.http.guards import is_owner, needs

__all__ = ["ROUTES"]


class RetentionState(msgspec.Struct, kw_only=True):
    """The limits, as `RetentionSettings` documents them, and what they mean for what is stored now."""

    max_age: float | None
    rotate_every: float | None
    max_bytes: int | None
    """The quota: how many bytes of values may be stored."""
    when_full: WhenFull
    archive_to: str | None
    filters: dict[str, float | None]
    live_bytes: int
    """Bytes of values that are stored."""
    generations: int
    failure: str | None
    """Why the last run in the background failed."""
    clock_ahead: float
    """Seconds by which the clock has jumped ahead, which don't count as passed."""
    outlook: list[Departure]
    """What will be removed when, and why."""


class RetentionChange(msgspec.Struct, forbid_unknown_fields=True):
    """Limits to change: what is left out stays as it is, null removes a limit. Times are in seconds."""

    max_age: float | UnsetType | None = UNSET
    rotate_every: float | UnsetType | None = UNSET
    max_bytes: int | UnsetType | None = UNSET
    when_full: WhenFull | UnsetType = UNSET
    archive_to: str | UnsetType | None = UNSET
    """A directory below ``export_dir`` of the settings."""
    filters: dict[str, float | None] | UnsetType = UNSET
    """How long what matches a filter stays instead of ``max_age``; null: for ever. Replaces all filters before."""


@get("/retention", guards=[needs("read")], tags=["retention"], sync_to_thread=True)
def retention(context: TheContext) -> RetentionState:
    """Return the limits, what is stored, and what of it will be removed when and why."""
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
    """Change limits. Nothing is removed before the next run, or the next message that is stored."""
    changed: dict[str, Any] = {
        key: value for key, value in msgspec.structs.asdict(data).items() if not isinstance(value, UnsetType)
    }
    if isinstance(changed.get("archive_to"), str) and not is_owner(request):
        changed["archive_to"] = str(place_below(context.settings.export_dir, changed["archive_to"]))
    return context.db.retention.set(**changed)


@post("/retention/run", guards=[needs("admin")], tags=["retention"], status_code=200, sync_to_thread=True)
def run_retention(context: TheContext) -> RetentionReport:
    """Begin a new generation if it is time, remove what exceeds the limits, and say why the rest stays.

    It returns when that is done; `POST /jobs` with the kind `retention` doesn't wait.
    """
    return context.db.retention.run()


ROUTES = [retention, set_retention, run_retention]
