"""``POST /shards/{shard}/ask``: questions of other sites of a cluster about a shard that they don't keep."""

from __future__ import annotations

import asyncio
from typing import Annotated, Any

import msgspec
from litestar import Request, Response, post
from litestar.exceptions import ClientException, PermissionDeniedException
from litestar.params import PathParameter

from topicstore.server.http.context import TheContext
from topicstore.server.http.guards import is_site, needs
from topicstore.storage.answering import answer

__all__ = ["ROUTES"]


@post("/shards/{shard:int}/ask", guards=[needs("read")], tags=["Durable storage"], status_code=200, opt={"way": "site"})
async def ask(
    context: TheContext,
    request: Request[Any, Any, Any],
    shard: Annotated[int, PathParameter(description="The number of a shard.")],
) -> Response[bytes]:
    """Answer a question of another site of the cluster about a shard that it doesn't keep.

    Question and answer are in a form of the cluster's own, so only its sites may ask.
    """
    if not is_site(request):
        raise PermissionDeniedException("only the sites of the cluster ask each other")
    question, loop = await request.body(), asyncio.get_running_loop()
    try:
        found = await loop.run_in_executor(context.threads, answer, context.db.storage, shard, question)
    except msgspec.DecodeError as bad:
        raise ClientException(f"the question is not of a known form: {bad}") from bad
    return Response(found, media_type="application/vnd.msgpack")


ROUTES = [ask]
