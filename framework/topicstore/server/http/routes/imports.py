"""``/imports``: the progress of imports, and rows that are stored atomically with it.

``topicstore import`` uses these routes. Its progress is stored in the state of each shard, and committed together with
the rows (`topicstore.cli.files.progress`).
"""

from __future__ import annotations

from typing import Any

import msgspec
from litestar import Request, get, post
from litestar.params import MsgPackBody

from topicstore.contract.columns import to_iterable
from topicstore.contract.errors import InvalidArgumentError
from topicstore.contract.state import StateWrite
from topicstore.pubsub.publishing import store_retaining
from topicstore.server.http.context import TheContext
from topicstore.server.http.formats.media_types import ARROW
from topicstore.server.http.formats.read import UNPACKED, read
from topicstore.server.http.guards import is_owner, needs
from topicstore.server.reserved_topics import check_published

__all__ = ["ROUTES"]

_KEYS = b"import/"
"""The prefix of the state keys of imports; the routes access no other keys."""


class Marker(msgspec.Struct):
    """The progress of an import in one shard."""

    shard: int
    key: bytes
    value: bytes


class Marked(msgspec.Struct, forbid_unknown_fields=True):
    """Rows of an import, with its progress."""

    rows: bytes
    """The rows in Arrow's IPC stream format."""
    markers: list[Marker]
    """The progress that is committed together with the rows."""
    stored: list[bool] | None = None
    """With ``retained``: by row, whether to store it; rows that were stored before are skipped. None: all rows."""
    retained: list[bool] | None = None
    """By row, whether a message with the retain flag becomes its topic's retained message. None: no row does."""


class Stored(msgspec.Struct):
    """The result of storing rows."""

    count: int
    lifted: int
    """Number of messages that arrived late, and were stored at the next position."""


@get("/imports", guards=[needs("write")], tags=["imports"], sync_to_thread=True)
def imports(context: TheContext) -> list[Marker]:
    """Return the progress of each import in each shard; keys and values are base64."""
    db = context.db
    return [
        Marker(shard, key, value) for shard in range(db.manifest.shards) for key, value in db.state(shard).scan(_KEYS)
    ]


@post("/imports", guards=[needs("write")], tags=["imports"], status_code=200, sync_to_thread=True)
def store_rows(context: TheContext, request: Request[Any, Any, Any], data: MsgPackBody[Marked]) -> Stored:
    """Store rows of an import together with its progress, in one write for each shard."""
    db = context.db
    db.storage.check_may_write()
    batch = read(data.rows, ARROW, UNPACKED * context.settings.body_size)
    if not is_owner(request):
        check_published(to_iterable(batch.topics))
    state: dict[int, list[StateWrite]] = {}
    for marker in data.markers:
        if not marker.key.startswith(_KEYS) or not 0 <= marker.shard < db.manifest.shards:
            raise InvalidArgumentError(f"{marker.key!r} is not the key of an import, or there is no such shard")
        state.setdefault(marker.shard, []).append(StateWrite(marker.key, marker.value))
    if data.retained is None:
        result = db.store(batch, state=state)
    else:
        stored = data.stored if data.stored is not None else [True] * len(batch)
        if not len(batch) == len(stored) == len(data.retained):
            raise InvalidArgumentError("stored and retained have an entry for each row")
        result = store_retaining(db.storage, batch, state, stored=stored, retained=data.retained)
    return Stored(result.count, result.lifted)


ROUTES = [imports, store_rows]
