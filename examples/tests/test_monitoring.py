"""Checks that every query of the dashboard and of the alerts names metrics and labels that a server exports."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import topicstore as ts
from prometheus_client.parser import text_string_to_metric_families
from topicstore.server import Address, ListenerSettings, Server, ServerSettings
from topicstore.server.config.model import HttpSettings
from topicstore_conformance.mqtt.raw_client import RawClient

HERE = Path(__file__).parents[1] / "monitoring"
GUIDE = HERE.parents[1] / "framework" / "guides" / "server.md"
BY_PROMETHEUS = {"job", "instance"}
"""The labels that Prometheus itself adds to scraped samples."""

_STRING = r'"(?:[^"\\]|\\.)*"'
_GROUPING = re.compile(r"\b(?:by|without|on|ignoring|group_left|group_right)\s*\(([^)]*)\)")
_SELECTOR = re.compile(rf"(?<![\w:])([a-zA-Z_:][\w:]*)\s*(?:\{{((?:[^}}\"]|{_STRING})*)\}})?(?!\s*\(|[\w:{{])")
_LABEL = re.compile(rf"(\w+)\s*(?:=~|!~|!=|=)\s*{_STRING}")
_WORDS = {"and", "or", "unless", "bool", "offset"}


def selectors(query: str) -> Iterator[tuple[str, set[str]]]:
    """Yield each metric that a PromQL query names, with the labels that the query selects or groups by."""
    grouped = {label.strip() for group in _GROUPING.findall(query) for label in group.split(",") if label.strip()}
    rest = re.sub(r"\[[^\]]*\]", "", _GROUPING.sub("", query))
    for name, matchers in _SELECTOR.findall(rest):
        if name not in _WORDS:
            yield name, {*_LABEL.findall(matchers), *grouped}


def queries(dashboard: Any) -> Iterator[tuple[str, str]]:
    """Yield (title, query) of the panels and of the variables of a dashboard."""
    for panel in dashboard["panels"]:
        for target in panel.get("targets", ()):
            yield panel["title"], target["expr"]
    for variable in dashboard["templating"]["list"]:
        if variable["type"] == "query":
            matched = re.fullmatch(r"label_values\((.*), \w+\)", variable["query"]["query"])
            assert matched, variable
            yield variable["name"], matched[1]


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> dict[str, set[str]]:
    """The labels by sample name that a server exports after it has served MQTT, queues and stores."""

    async def scrape() -> str:
        listeners = {"tcp": ListenerSettings(listen=Address("127.0.0.1:0"))}
        settings = ServerSettings(listeners=listeners, http=HttpSettings(listen=Address("127.0.0.1:0")))
        with ts.open(tmp_path_factory.mktemp("monitoring") / "db") as db:
            db.queues.open("queue")
            db.store([ts.Message("a", b"1", "client")])
            async with Server(db, settings) as server:
                await asyncio.to_thread(use, int(server.addresses[0].rpartition(":")[2]))
                async with httpx.AsyncClient(trust_env=False, timeout=60) as client:
                    return (await client.get(f"{server.urls_of_http[0]}/metrics")).text

    def use(port: int) -> None:
        with RawClient(port) as client:
            client.connect("client")
            client.publish("a", b"1")
            client.leave()

    families = text_string_to_metric_families(asyncio.run(scrape()))
    return {sample.name: set(sample.labels) for family in families for sample in family.samples}


def check(query: str, exported: dict[str, set[str]]) -> None:
    found = list(selectors(query))
    assert found, query
    for name, labels in found:
        assert name in exported, f"{name} in {query}"
        assert labels <= exported[name] | BY_PROMETHEUS, f"{labels - exported[name]} of {name} in {query}"


def test_queries_of_the_dashboard(exported: dict[str, set[str]]) -> None:
    dashboard = json.loads((HERE / "dashboard.json").read_text(encoding="utf-8"))
    asked = list(queries(dashboard))
    assert len(asked) > 50
    for _, query in asked:
        check(query, exported)


def test_panels_lie_beside_each_other() -> None:
    """Panels of the dashboard have distinct ids, don't overlap, and fit into its 24 columns."""
    panels = json.loads((HERE / "dashboard.json").read_text(encoding="utf-8"))["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    cells = [
        (x, y)
        for at in (panel["gridPos"] for panel in panels)
        for x in range(at["x"], at["x"] + at["w"])
        for y in range(at["y"], at["y"] + at["h"])
    ]
    assert len(set(cells)) == len(cells)
    assert all(x < 24 for x, _ in cells)


def test_alerts_of_the_readme(exported: dict[str, set[str]]) -> None:
    rows = re.findall(r"^\| .* \| `(.*)` \|$", (HERE / "README.md").read_text(encoding="utf-8"), re.M)
    assert len(rows) >= 5
    for query in rows:
        check(query, exported)


def test_every_metric_is_in_the_guide(exported: dict[str, set[str]]) -> None:
    """The server guide lists every exported metric, except the ``process_`` ones."""
    guide = GUIDE.read_text(encoding="utf-8")
    families = {re.sub("_(total|bucket|count|sum)$", "", name) for name in exported}
    assert sorted(name for name in families if not name.startswith("process_") and name not in guide) == []


@pytest.mark.parametrize(
    ("query", "found"),
    [
        (
            'sum by (le, a) (rate(x_bucket{job="j",b=~"c}d"}[$__rate_interval]))',
            [("x_bucket", {"job", "b", "le", "a"})],
        ),
        ("x / ignoring(y) z > 1e7 and x", [("x", {"y"}), ("z", {"y"}), ("x", {"y"})]),
        ("predict_linear(x[1h], 86400) < 0", [("x", set())]),
    ],
)
def test_what_is_read_from_a_query(query: str, found: list[tuple[str, set[str]]]) -> None:
    assert list(selectors(query)) == found
