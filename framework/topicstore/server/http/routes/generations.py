"""``/generations``: partitions of the database by time; only the current partition is written."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

import msgspec
from litestar import delete, get, post
from litestar.params import JSONBody, PathParameter

import topicstore as ts
from topicstore.server.http.context import TheContext
from topicstore.server.http.guards import needs
from topicstore.server.http.parameters import Page

__all__ = ["ROUTES"]

_Number = Annotated[int, PathParameter(description="The generation's number.")]


class Generation(msgspec.Struct, kw_only=True):
    """A generation of all shards, as in `Database.generations`. Times are microseconds since the epoch."""

    number: int
    layout: str
    options: dict[str, Any]
    created: int
    sealed: int | None
    messages: int
    live_bytes: int
    archived: str | None
    """The export to which the generation was archived; None if it is in the database."""
    missing: Mapping[int, str]
    """The shards that are not included, and for each the reason why no site of the cluster that keeps it answered."""


class NewGeneration(msgspec.Struct, forbid_unknown_fields=True):
    """A generation to begin."""

    layout: str | None = None
    """The layout; by default the layout of the current generation."""
    options: dict[str, Any] | None = None
    """The layout's options; by default those of the last generation with this layout."""


class Dropped(msgspec.Struct):
    """The result of dropping a generation."""

    generation: int
    dropped: bool
    """False if the generation was dropped before."""


@get("/generations", guards=[needs("read")], tags=["generations"], sync_to_thread=True)
def generations(context: TheContext) -> Page[Generation]:
    """Return the live generations, the oldest first.

    A site of a cluster asks the others about shards that it doesn't keep.
    """
    return Page(items=_generations(context.db))


@post("/generations", guards=[needs("admin")], tags=["generations"], sync_to_thread=True)
def add_generation(context: TheContext, data: JSONBody[NewGeneration]) -> Generation:
    """Seal the current generation and begin a new one, optionally with another layout. Stored messages don't change."""
    number = context.db.add_generation(data.layout, data.options)
    return next(one for one in _generations(context.db) if one.number == number)


@delete(
    "/generations/{number:int}", guards=[needs("admin")], tags=["generations"], status_code=200, sync_to_thread=True
)
def drop_generation(context: TheContext, number: _Number) -> Dropped:
    """Permanently drop a sealed generation with all its messages. The files of an archived generation are kept."""
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
            missing=one.missing,
        )
        for one in db.generations()
    ]


ROUTES = [generations, add_generation, drop_generation]
