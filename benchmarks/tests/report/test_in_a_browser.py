"""The page in a real browser, wide and narrow, light and dark: what a person would stumble over is measured."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import attrs
import pytest
from topicstore_conformance.conditions.browser import MEASURES, SIZES, Open, need_browser, windows

pytest.importorskip("altair", reason='needs altair: pip install "topicstore[bench]"')
pytest.importorskip("vl_convert", reason='needs vl-convert-python: pip install "topicstore[bench]"')
need_browser()

from playwright.sync_api import BrowserContext, Page  # noqa: E402 - after the question whether it is there
from topicstore_benchmarks.report.page import write_report  # noqa: E402


@pytest.fixture(scope="module")
def report(wide_run: Path) -> Path:
    return write_report(wide_run)


@pytest.fixture(scope="module")
def chromium(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Open]:
    """Opens windows, each with a profile of its own."""
    with windows(lambda: tmp_path_factory.mktemp("profile")) as opened:
        yield opened


@attrs.frozen
class Opened:
    """The report in a window, and what it ``said``: on its console, in errors, and asking a network."""

    page: Page
    said: list[str]

    @classmethod
    def of(cls, context: BrowserContext, report: Path) -> Opened:
        page, said = context.new_page(), []
        page.on("console", lambda message: said.append(message.text))
        page.on("pageerror", lambda error: said.append(str(error)))
        page.on("request", lambda request: said.append(request.url) if request.url != report.as_uri() else None)
        page.goto(report.as_uri())
        page.evaluate(MEASURES)
        return cls(page, said)

    def see_all(self) -> Page:
        """Open what is closed, and scroll to every plot, so that it is drawn."""
        self.page.evaluate("document.querySelectorAll('details').forEach(one => { one.open = true; })")
        for plot in self.page.query_selector_all(".plot"):
            if plot.is_visible():
                plot.scroll_into_view_if_needed()
        self.page.wait_for_function("measures.drawn()")
        return self.page


@pytest.fixture(scope="module", params=SIZES, ids=str)
def seen(request: pytest.FixtureRequest, chromium: Open, report: Path) -> Opened:
    """The report in a window of some width and scheme, seen to its end. Tests leave it as it is."""
    opened = Opened.of(chromium(*request.param), report)
    opened.see_all()
    return opened


@pytest.fixture(scope="module")
def context(chromium: Open) -> BrowserContext:
    return chromium(1440, "light")


@pytest.fixture
def page(context: BrowserContext, report: Path) -> Iterator[Page]:
    """The report, just opened, to do something with."""
    opened = Opened.of(context, report)
    yield opened.page
    opened.page.close()
    assert [] == opened.said


def test_it_needs_no_network_and_says_nothing_on_the_console(seen: Opened) -> None:
    assert [] == seen.said
    assert seen.page.locator(".plot svg").count() >= 30


def test_it_is_as_wide_as_the_window(seen: Opened) -> None:
    assert seen.page.evaluate("document.documentElement.scrollWidth <= innerWidth")


def test_no_text_is_cut(seen: Opened) -> None:
    assert [] == seen.page.evaluate("measures.cut()")


def test_no_texts_overlap_in_plots(seen: Opened) -> None:
    assert [] == seen.page.evaluate("measures.overlapping()")


def test_text_and_marks_stand_out(seen: Opened) -> None:
    """WCAG 2.2: 4.5 for text, 3 for what figures are read from."""
    assert [] == seen.page.evaluate("measures.faintTexts(4.5)")
    assert [] == seen.page.evaluate("measures.faintMarks(3)")


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_a_mark_says_its_figures(page: Page, scheme: str) -> None:
    page.evaluate(f"document.documentElement.dataset.theme = {scheme!r}")
    page.locator(".plot").first.scroll_into_view_if_needed()
    page.locator("svg .mark-symbol path").first.hover()
    page.wait_for_selector("#vg-tooltip-element.visible")

    assert re.search(r"contender:?\s+block on rocksdb", page.inner_text("#vg-tooltip-element"))
    assert [] == page.evaluate("measures.faintTexts(4.5)")


def test_the_other_scheme_can_be_chosen(page: Page) -> None:
    before = page.evaluate("getComputedStyle(document.body).backgroundColor")

    page.click("#theme")
    assert before != page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert [] == page.evaluate("measures.faintTexts(4.5)")


def test_the_other_durability_can_be_chosen(context: BrowserContext, report: Path) -> None:
    opened = Opened.of(context, report)
    opened.page.check("input[name=durability][value=sync]")
    page = opened.see_all()

    assert {"sync"} == set(_texts(page, ".of-durability:not([hidden])", "one.dataset.durability"))
    assert [] == page.evaluate("[...measures.overlapping(), ...measures.cut()]")


def test_plots_follow_the_width_of_the_window(context: BrowserContext, report: Path) -> None:
    opened = Opened.of(context, report)
    opened.see_all()
    for width in (390, 1440):
        opened.page.set_viewport_size({"width": width, "height": 900})
        opened.see_all()

        assert opened.page.evaluate("document.documentElement.scrollWidth <= innerWidth")
        assert [] == opened.page.evaluate("[...measures.overlapping(), ...measures.cut()]")


def test_the_table_sorts_by_number_and_says_so(page: Page) -> None:
    medians = "#figure-table tbody td:nth-child(3)"
    page.click("#figure-table th[data-column=median] button")
    falling = _texts(page, medians)
    page.click("#figure-table th[data-column=median] button")
    rising = _texts(page, medians)

    assert "ascending" == page.get_attribute("#figure-table th[data-column=median]", "aria-sort")
    assert 1 == page.locator("#figure-table th[aria-sort=ascending]").count()
    assert rising[0] != falling[0]
    assert sorted(map(_number, rising)) == [_number(text) for text in rising]
    assert sorted(map(_number, falling), reverse=True) == [_number(text) for text in falling]


def test_the_table_can_be_filtered(page: Page) -> None:
    page.fill("#figure-choices [name=contender]", "sqlite")
    page.select_option("#figure-choices [name=phase]", "store")

    assert {"SQLite"} == set(_texts(page, "#figure-table tbody th"))
    assert {"store"} == set(_texts(page, "#figure-table tbody td:nth-child(2)"))
    assert page.inner_text("#figure-count").startswith("6 of 6 shown")


def test_all_of_the_table_can_be_shown(page: Page) -> None:
    page.select_option("#figure-choices [name=metric]", "")
    assert 100 == page.locator("#figure-table tbody tr").count()
    page.click("#figure-more")

    assert page.locator("#figure-table tbody tr").count() > 1_000
    assert not page.is_visible("#figure-more")


def test_ratios_follow_the_baseline(page: Page) -> None:
    assert "SQLite" == page.input_value("#ratio-choices [name=baseline]")
    assert "1.00×" == _store_ratio(page, "SQLite")
    page.select_option("#ratio-choices [name=baseline]", "NATS JetStream")

    assert "1.00×" == _store_ratio(page, "NATS JetStream")
    assert 0.8 == pytest.approx(float(_store_ratio(page, "SQLite").rstrip("×")), rel=0.1)


def _store_ratio(page: Page, contender: str) -> str:
    row = page.locator("#ratio-table tbody tr").filter(has=page.get_by_role("rowheader", name=contender, exact=True))
    found: str = row.locator("td").first.evaluate("one => one.firstChild.data")
    return found


def _texts(page: Page, selector: str, what: str = "one.textContent") -> list[str]:
    found: list[str] = page.eval_on_selector_all(selector, f"all => all.map(one => {what})")
    return found


def _number(text: str) -> float:
    number, prefix, *_ = [*text.split(), ""]
    return float(number) * {"k": 1e3, "M": 1e6, "G": 1e9}.get(prefix, 1)
