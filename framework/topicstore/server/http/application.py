"""The ASGI application: its routes, guards and error handlers."""

from __future__ import annotations

from litestar import Litestar, Router
from litestar.datastructures import State
from litestar.di import Provide
from litestar.types import ASGIApp

from .context import Context
from .document import Document, document_settings
from .guards import takes_way
from .middleware import DecodedRequest, RequestChecks, decoding_names
from .parameters import known_parameters
from .problems import HANDLERS
from .routes import (
    access,
    config,
    ds,
    generations,
    health,
    info,
    jobs,
    metrics,
    page,
    persistence,
    queues,
    retained,
    retention,
    sessions,
    sql,
    tail,
    topics,
)
from .routes import (
    messages as replay,
)

__all__ = ["PREFIX", "application"]

PREFIX = "/api/v5"
"""The path prefix of the API."""


def application(context: Context) -> ASGIApp:
    """Return the application for one server."""
    made = Litestar(
        [
            Router(
                PREFIX,
                route_handlers=[
                    *info.ROUTES,
                    *metrics.ROUTES,
                    *config.ROUTES,
                    *access.ROUTES,
                    *ds.ROUTES,
                    *replay.ROUTES,
                    *tail.ROUTES,
                    *topics.ROUTES,
                    *sessions.ROUTES,
                    *retained.ROUTES,
                    *queues.ROUTES,
                    *persistence.ROUTES,
                    *generations.ROUTES,
                    *retention.ROUTES,
                    *jobs.ROUTES,
                    *sql.ROUTES,
                ],
            ),
            *health.OUTSIDE,
            *metrics.OUTSIDE,
            *page.OUTSIDE,
        ],
        dependencies={"context": Provide(lambda: context, sync_to_thread=False)},
        exception_handlers=HANDLERS,
        guards=[takes_way],
        logging_config=None,
        middleware=[decoding_names],
        openapi_config=document_settings(),
        request_class=DecodedRequest,
        request_max_body_size=context.settings.body_size,
        state=State({"context": context}),
    )
    made.state.document = Document(made)
    made.state.parameters = known_parameters(made)
    return RequestChecks(made, context.stopping)
