"""The report in a real browser, in wide and narrow windows, light and dark, checked for defects of its layout."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from topicstore_conformance.conditions.browser import MEASURES, SIZES, Open, need_browser, windows

pytest.importorskip("altair", reason='needs altair: pip install "topicstore[bench]"')
pytest.importorskip("vl_convert", reason='needs vl-convert-python: pip install "topicstore[bench]"')
need_browser()

from playwright.sync_api import Page  # noqa: E402 - after the check that it is installed
from topicstore_benchmarks.report.page import write_report  # noqa: E402


@pytest.fixture(scope="module")
def report(wide_run: Path) -> Path:
    return write_report(wide_run)


@pytest.fixture(scope="module")
def chromium(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Open]:
    """A function that opens windows, each with a new profile."""
    with windows(lambda: tmp_path_factory.mktemp("profile")) as opened:
        yield opened


@pytest.fixture(scope="module", params=SIZES, ids=str)
def page(request: pytest.FixtureRequest, chromium: Open, report: Path) -> Page:
    """The report in a window of a given width and color scheme, with all details opened.

    The fixture fails if the page logs something or requests another file.
    """
    page = chromium(*request.param).new_page()
    said: list[str] = []
    page.on("console", lambda message: said.append(message.text))
    page.on("pageerror", lambda error: said.append(str(error)))
    page.on("request", lambda request: said.append(request.url) if request.url != report.as_uri() else None)
    page.goto(report.as_uri())
    page.evaluate(MEASURES)
    page.evaluate("document.querySelectorAll('details').forEach(one => { one.open = true; })")
    assert [] == said
    return page


def test_it_is_as_wide_as_the_window(page: Page) -> None:
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")


def test_no_text_is_cut_and_none_overlap(page: Page) -> None:
    assert [] == page.evaluate("measures.cut()")
    assert [] == page.evaluate("measures.overlapping()")
    assert [] == page.evaluate("measures.colliding()")


def test_text_and_marks_stand_out(page: Page) -> None:
    """Text has a contrast of at least 4.5, and chart marks of at least 3, as WCAG 2.2 requires."""
    assert [] == page.evaluate("measures.faintTexts(4.5)")
    assert [] == page.evaluate("measures.faintMarks(3)")


def test_the_verdict_is_seen_whole(page: Page) -> None:
    """No table of the verdict has to be scrolled sideways, also on a phone."""
    tables = "[...document.querySelectorAll('#verdict .scrolls')].map((one) => one.scrollWidth - one.clientWidth)"
    assert {0} == set(page.evaluate(tables))


def test_charts_are_seen_whole(page: Page) -> None:
    """No chart has to be scrolled sideways, and as many of a criterion stand side by side as the page has room for."""
    figures = page.evaluate(
        "[...document.querySelectorAll('figure')].map((one) => [one.scrollWidth, one.clientWidth,"
        " [...one.querySelectorAll('svg')].map((svg) => svg.getBoundingClientRect().top)])"
    )
    assert figures
    for needed, width, tops in figures:
        assert needed <= width
        assert min(len(tops), width // 297) <= tops.count(tops[0])
