"""Windows of a real browser, for tests of how a page looks and behaves."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import pytest

from topicstore_conformance.faults.threads import PATIENCE

if TYPE_CHECKING:
    from playwright.sync_api import BrowserContext

__all__ = ["MEASURES", "SIZES", "Open", "Scheme", "need_browser", "windows"]

Scheme = Literal["light", "dark"]
Open = Callable[..., "BrowserContext"]
"""Opens a window of a width in pixels and a color scheme; keyword arguments are passed to Playwright."""

MEASURES = Path(__file__).with_name("measures.js").read_text()
"""A script that runs in a page and finds elements that are cut off, overlap or have low contrast."""
SIZES: tuple[tuple[int, Scheme], ...] = ((1440, "light"), (1440, "dark"), (390, "light"), (390, "dark"))
"""The window widths in pixels, of a desktop and a phone, and the color schemes in which a page is tested."""
_CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
_ARGUMENTS = [
    "--no-sandbox",
    "--disable-dev-shm-usage",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]


def need_browser() -> None:
    """Skip the module that is being imported unless Playwright and Chromium are installed."""
    pytest.importorskip("playwright", reason="needs playwright: pip install playwright")
    if _CHROMIUM is None:
        pytest.skip("needs Chromium: apt-get install chromium", allow_module_level=True)


@contextmanager
def windows(profile: Callable[[], Path]) -> Iterator[Open]:
    """Yield a function that opens windows of Chromium, and close them at the end.

    Each window has its own profile directory, which ``profile`` returns.
    """
    from playwright.sync_api import expect, sync_playwright

    with sync_playwright() as playwright, ExitStack() as opened:

        def window(width: int, scheme: Scheme, **more: Any) -> BrowserContext:
            context = opened.enter_context(
                playwright.chromium.launch_persistent_context(
                    profile(),
                    executable_path=_CHROMIUM,
                    args=_ARGUMENTS,
                    viewport={"width": width, "height": 900},
                    color_scheme=scheme,
                    locale="en-US",
                    timeout=PATIENCE * 1_000,
                    **more,
                )
            )
            context.set_default_timeout(PATIENCE * 1_000)
            return context

        expect.set_options(timeout=PATIENCE * 1_000)
        yield window
