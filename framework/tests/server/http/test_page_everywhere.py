"""The page in windows of three widths, light and dark, in two time zones, on many topics and on none."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product

import pytest
import topicstore as ts
from topicstore.server import Server
from topicstore_conformance.conditions.browser import MEASURES, Open, need_browser
from topicstore_conformance.mqtt.embedded import serving_http

need_browser()
pytest.importorskip("plotly", reason='needs plotly: pip install "topicstore[server]"')

pytestmark = pytest.mark.slow

_VIEWS = {
    "now": "#figures dd",
    "topics": "#topic-summary:not(:empty)",
    "replay": "#rows-summary:not(:empty)",
    "replay?filter=site/7/%2B/state&start=978307200000000": "#rows-summary:not(:empty)",
    "sessions": "#sessions-summary:not(:empty)",
    "retained": "#retained-summary:not(:empty)",
    "storage": "#all-generations tbody tr",
    "publish": "#publish-form button:enabled",
}
"""The views, each with a selector of an element that shows that its data has come."""
_WINDOWS = [
    (width, scheme, zone)
    for width, (scheme, zone) in product((1440, 768, 390), (("light", "America/Los_Angeles"), ("dark", "Asia/Tokyo")))
]


@pytest.fixture(scope="module", params=[100_000, 0], ids="{:,} topics".format)
def server(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server on a database with a number of topics, of which each has one message."""
    topics: int = request.param
    with ts.open(tmp_path_factory.mktemp("everywhere") / "db", backend="memory") as db:
        db.store(
            [ts.Message(f"site/{n % 100}/device-{n}/state", b'{"ts": 1764400000, "v": %d}' % n) for n in range(topics)]
        )
        if topics:
            for number in range(150):
                session = db.sessions.open(f"client-{number}", expiry_interval=None)
                session.subscribe("site/1/+/state", start=0 if number % 2 else None)
                session.disconnect()
            db.publish([ts.Message(f"retained/{n}", b"word " * 40, "hub", 1, retain=True) for n in range(150)])
        with serving_http(db) as server:
            yield server


@pytest.mark.parametrize("window", _WINDOWS, ids=str)
def test_no_text_overlaps_and_no_view_complains(window: tuple[int, str, str], chromium: Open, server: Server) -> None:
    """In no view is a text cut, overlapped or faint, the page too wide, a request refused, or an error reported."""
    width, scheme, zone = window
    page, said = chromium(width, scheme, timezone_id=zone).new_page(), list[str]()
    page.on("console", lambda message: said.append(message.text))
    page.on("pageerror", lambda error: said.append(str(error)))
    page.on("response", lambda one: said.append(f"{one.status} {one.url}") if one.status >= 400 else None)
    found = {}
    for view, ready in _VIEWS.items():
        page.goto(f"{server.urls_of_http[0]}/#{view}")
        page.locator(ready).first.wait_for()
        for plot in page.locator(".plot:visible").all():
            plot.locator("svg.main-svg").first.wait_for()
        page.evaluate(MEASURES)
        for measure in ("cut()", "overlapping()", "colliding()", "faintTexts(4.5)"):
            found[view, measure] = page.evaluate(f"measures.{measure}")
        found[view, "width"] = page.evaluate("document.documentElement.scrollWidth > innerWidth") or []
        found[view, "trouble"] = page.locator("#trouble:visible").all_inner_texts()
    page.close()

    assert {} == {where: texts for where, texts in found.items() if texts}
    assert [] == said
