"""``/metrics`` for Prometheus, and ``/figures`` for the charts of the web page."""

from __future__ import annotations

from typing import Annotated

from litestar import Response, get
from litestar.params import HeaderParameter

from topicstore.server.http.context import TheContext
from topicstore.server.http.guards import needs
from topicstore.server.metrics.recent import Figures

__all__ = ["OUTSIDE", "ROUTES"]

_KINDS = ("text/plain", "application/openmetrics-text")


@get(
    "/metrics", guards=[needs("read")], tags=["metrics"], opt={"produces": _KINDS, "way": "health"}, sync_to_thread=True
)
def metrics(
    context: TheContext,
    accept: Annotated[
        str, HeaderParameter(name="Accept", description="The media types of the text formats, the preferred one first.")
    ] = "",
) -> Response[bytes]:
    """Return metrics for Prometheus, as OpenMetrics if the request accepts it, else in Prometheus' text format."""
    text, kind = context.metrics.text(accept)
    return Response(text, media_type=kind)


@get("/figures", guards=[needs("read")], tags=["metrics"], opt={"way": "health"}, sync_to_thread=True)
def figures(context: TheContext) -> Figures:
    """Return totals, and columns with a sample for each of the last 300 seconds: rates, lag, clients, disk."""
    return context.metrics.recent.figures()


ROUTES = [figures]
OUTSIDE = [metrics]
"""Routes outside of the API's path prefix."""
