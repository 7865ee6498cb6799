"""``/generations``: partitions of the database in time; only the current one is written."""

from __future__ import annotations

from typing import Any

import msgspec
from litestar import delete, get, post
from litestar.params import FromPath, JSONBody

import topicstore as ts
from topicstore.server.http.context import TheContext
from topicstore.server.http.guards import needs
from topicstore.server.http.pages import Page

__all__ = ["ROUTES"]


class Generation(msgspec.Struct, kw_only=True):
    """A generation over all shards, as `Database.generations` describes it. Times are microseconds since the epoch."""

    number: int
    layout: str
    options: dict[str, Any]
    created: int
    sealed: int | None
    messages: int
    live_bytes: int
    archived: str | None
    """The export in which it lies; None if it is in the database itself."""


class NewGeneration(msgspec.Struct, forbid_unknown_fields=True):
    """A generation to begin."""

    layout: str | None = None
    """By default that of the current one."""
    options: dict[str, Any] | None = None
    """By default those of the last generation with this layout."""


class Dropped(msgspec.Struct):
    """What became of a generation."""

    generation: int
    dropped: bool
    """False if it was dropped before."""


@get("/generations", guards=[needs("read")], tags=["generations"], sync_to_thread=True)
def generations(context: TheContext) -> Page[Generation]:
    """Return the live generations, the oldest first."""
    return Page(items=_generations(context.db))


@post("/generations", guards=[needs("admin")], tags=["generations"], sync_to_thread=True)
def add_generation(context: TheContext, data: JSONBody[NewGeneration]) -> Generation:
    """Seal the current generation and begin another, maybe with another layout. Stored messages stay as they are."""
    number = context.db.add_generation(data.layout, data.options)
    return next(one for one in _generations(context.db) if one.number == number)


@delete(
    "/generations/{number:int}", guards=[needs("admin")], tags=["generations"], status_code=200, sync_to_thread=True
)
def drop_generation(context: TheContext, number: FromPath[int]) -> Dropped:
    """Drop a sealed generation with all its messages, for good. The files of an archived one stay."""
    return Dropped(number, context.db.drop_generation(number))


def _generations(db: ts.Database) -> list[Generation]:
    archived = {one.generation: str(one.path) for one in db.archives}
    return [
        Generation(
            number=one.number,
            layout=one.layout,
            options=one.options,
            created=one.created,
            sealed=one.sealed,
            messages=one.messages,
            live_bytes=one.live_bytes,
            archived=archived.get(one.number),
        )
        for one in db.generations()
    ]


ROUTES = [generations, add_generation, drop_generation]
