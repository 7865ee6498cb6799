"""``/persistence``: the rules that store published messages even if no session subscribes to them."""

from __future__ import annotations

from typing import Annotated

import msgspec
from litestar import delete, get, post
from litestar.exceptions import NotFoundException
from litestar.params import JSONBody, QueryParameter

from topicstore.pubsub.persistence_rules import PersistenceRule
from topicstore.server.http.context import TheContext
from topicstore.server.http.guards import needs
from topicstore.server.http.parameters import Page

__all__ = ["ROUTES"]


class NewRule(msgspec.Struct, forbid_unknown_fields=True):
    """A rule to add, with the fields of `PersistenceRule`."""

    topic_filter: str = "#"
    client_id: str | None = None
    least_qos: int = 0


@get("/persistence", guards=[needs("read")], tags=["persistence"], sync_to_thread=True)
def rules(context: TheContext) -> Page[PersistenceRule]:
    """Return the rules, sorted by filter."""
    return Page(items=list(context.db.persistence))


@post("/persistence", guards=[needs("admin")], tags=["persistence"], sync_to_thread=True)
def add_rule(context: TheContext, data: JSONBody[NewRule]) -> PersistenceRule:
    """Add a rule that stores matching messages from now on. No effect if the rule exists."""
    return context.db.persistence.add(data.topic_filter, client_id=data.client_id, least_qos=data.least_qos)


@delete("/persistence", guards=[needs("admin")], tags=["persistence"], status_code=200, sync_to_thread=True)
def remove_rule(
    context: TheContext,
    topic_filter: Annotated[str, QueryParameter(description="The rule's topic filter.")],
    client_id: Annotated[str | None, QueryParameter(description="The rule's client id, if it has one.")] = None,
    least_qos: Annotated[int, QueryParameter(description="The least QoS of the rule's messages.")] = 0,
) -> PersistenceRule:
    """Remove a rule. Messages that the rule has stored are kept."""
    rule = PersistenceRule(topic_filter, client_id=client_id, least_qos=least_qos)
    if not context.db.persistence.remove(rule):
        raise NotFoundException(f"there is no such rule: {rule}")
    return rule


ROUTES = [rules, add_rule, remove_rule]
