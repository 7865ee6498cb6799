"""``/sql``: SQL queries over the messages."""

from __future__ import annotations

from itertools import islice
from typing import Any

import msgspec
import pyarrow as pa
from litestar import Request, Response, post
from litestar.exceptions import PermissionDeniedException
from litestar.params import JSONBody

from topicstore.server.http.context import TheContext
from topicstore.server.http.formats.response_bodies import ARROW, JSON, chosen
from topicstore.server.http.guards import is_owner, needs
from topicstore.server.http.parameters import Limit

__all__ = ["ROUTES"]

_PRODUCES = (JSON, ARROW)


class Statement(msgspec.Struct, forbid_unknown_fields=True):
    """A query, and the values of its parameters."""

    statement: str
    parameters: list[Any] = []


class Rows(msgspec.Struct):
    """The result of a query: bytes as text, or in hexadecimal after 0x; times as ISO 8601, in UTC."""

    columns: list[str]
    types: list[str]
    """The Arrow type of each column."""
    rows: list[list[Any]]
    more: bool
    """Whether the result has more rows than ``limit``."""


@post(
    "/sql",
    guards=[needs("admin")],
    tags=["database"],
    status_code=200,
    opt={"produces": _PRODUCES, "way": "heavy"},
    sync_to_thread=True,
)
def sql(
    context: TheContext, request: Request[Any, Any, Any], data: JSONBody[Statement], limit: Limit = 10_000
) -> Rows | Response[bytes]:
    """Run a read-only query over the messages of all shards, as documented by `Database.sql`.

    The response is JSON or, by ``Accept``, Arrow's IPC stream format, which ignores ``limit`` and has all rows.

    A query can read every file that the server can, so the settings must allow SQL (`[http] sql = true`).
    """
    if not context.settings.sql and not is_owner(request):
        raise PermissionDeniedException("this server runs no SQL: its settings have to allow it, [http] sql = true")
    from topicstore.sql import values  # imported late, because most servers run no SQL

    media_type = chosen(request, _PRODUCES)
    found = context.db.sql(data.statement, data.parameters)
    if media_type == ARROW:
        return Response(_stream_of(found), media_type=ARROW)
    return Rows(
        found.column_names,
        list(map(str, found.schema.types)),
        list(islice(values.rows(found), limit)),
        more=found.num_rows > limit,
    )


def _stream_of(table: pa.Table) -> bytes:
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)
    return sink.getvalue().to_pybytes()  # type: ignore[no-any-return]


ROUTES = [sql]
