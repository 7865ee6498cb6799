"""The web page's files over HTTP, with the response headers that browsers obey."""

from __future__ import annotations

import gzip
import re
from pathlib import Path

import httpx
import pytest
import topicstore.server.http
from hatchling.builders.wheel import WheelBuilder
from topicstore.server.http.routes import page as route

_FOLDER = Path(topicstore.server.http.__file__).parent / "page"
_PROJECT = Path(__file__).parents[4]
_NAMES = sorted(path.relative_to(_FOLDER).as_posix() for path in _FOLDER.rglob("*") if path.is_file())


def test_the_page_is_there_without_a_token_and_allows_no_inline_code(site: httpx.Client) -> None:
    answer = site.get("/")

    assert 200 == answer.status_code
    assert "text/html; charset=utf-8" == answer.headers["content-type"]
    assert not re.search(r"<script(?![^>]* src=)|<style| style=| on\w+=", answer.text)


@pytest.mark.parametrize("name", _NAMES)
def test_every_file_is_served_as_it_is(site: httpx.Client, name: str) -> None:
    answer = site.get(f"/page/{name}")

    assert 200 == answer.status_code
    assert (_FOLDER / name).read_bytes() == answer.content
    assert "nosniff" == answer.headers["x-content-type-options"]


def test_a_file_that_has_not_changed_is_not_sent_again(site: httpx.Client) -> None:
    first = site.get("/page/main.js")
    second = site.get("/page/main.js", headers={"If-None-Match": first.headers["etag"]})
    other = site.get("/page/main.js", headers={"If-None-Match": '"another"'})

    assert (304, b"") == (second.status_code, second.content)
    assert first.headers["etag"] == second.headers["etag"]
    assert (200, first.content) == (other.status_code, other.content)


def test_files_are_compressed_for_those_that_accept_it(site: httpx.Client) -> None:
    with site.stream("GET", "/page/page.css", headers={"Accept-Encoding": "gzip"}) as answer:
        assert "gzip" == answer.headers["content-encoding"]
        assert (_FOLDER / "page.css").read_bytes() == gzip.decompress(b"".join(answer.iter_raw()))
    assert "content-encoding" not in site.get("/page/page.css", headers={"Accept-Encoding": "identity"}).headers


@pytest.mark.parametrize(
    "name", ["../routes/page.py", "..%2froutes%2fpage.py", "%2e%2e/routes/page.py", "nothing.js", "%00"]
)
def test_nothing_but_the_files_is_served(site: httpx.Client, name: str) -> None:
    answer = site.get(f"/page/{name}")

    assert 404 == answer.status_code
    assert "application/problem+json" == answer.headers["content-type"]


def test_the_library_for_charts_is_kept_by_browsers_for_good(site: httpx.Client) -> None:
    pytest.importorskip("plotly", reason='needs plotly: pip install "topicstore[server]"')
    where = site.get("/charts").json()
    answer = site.get(f"/{where['library']}")

    assert where["missing"] is None
    assert 200 == answer.status_code
    assert "immutable" in answer.headers["cache-control"]
    assert "gzip" == answer.headers["content-encoding"]
    assert 404 == site.get("/charts/other/library.js").status_code


def test_without_the_library_it_says_what_to_install(site: httpx.Client, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(route, "_LIBRARY", ("topicstore_has_no_such_package", "library.js"))
    route._library.cache_clear()
    found = site.get("/charts").json()
    route._library.cache_clear()

    assert found["library"] is None
    assert "pip install" in found["missing"]


def test_the_wheel_has_every_file() -> None:
    builder = WheelBuilder(str(_PROJECT))
    packed = {Path(file.distribution_path).as_posix() for file in builder.recurse_included_files()}

    assert {f"topicstore/server/http/page/{name}" for name in _NAMES} <= packed
