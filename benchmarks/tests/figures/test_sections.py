"""The sections ``sessions``, ``http``, ``metrics`` and ``cluster``, measured with small sizes."""

from __future__ import annotations

import pytest

pytest.importorskip("rocksdict", reason='needs rocksdict: pip install "topicstore[rocksdb]"')
pytest.importorskip("litestar", reason='needs litestar: pip install "topicstore[server]"')

from topicstore_benchmarks.figures import serving
from topicstore_benchmarks.figures.cluster import measure_cluster
from topicstore_benchmarks.figures.http import measure_http
from topicstore_benchmarks.figures.metrics import measure_metrics
from topicstore_benchmarks.figures.sessions import measure_sessions


def test_sessions(monkeypatch: pytest.MonkeyPatch) -> None:
    """The section has all figures in two sheets; a message is stored once for any number of sessions."""
    monkeypatch.setattr(serving, "SIZES", dict.fromkeys(serving.SIZES, 2))
    section = measure_sessions(sessions=3, published=2_000, backlog=4_000, stored=50, seconds=0.2, clients=8, rounds=1)
    assert all(figure.value > 0 for figure in section.figures)
    assert len({(figure.data, figure.name) for figure in section.figures}) == len(section.figures)
    assert [10, 19] == [len(sheet.rows) for sheet in section.sheets]
    assert 1 == next(f.value for f in section.figures if f.name == "stored copies of a message")
    assert {"32 clients with a message each waiting", "800 retained", "80 new clients", "publish of 1,000"} <= {
        figure.data for figure in section.figures
    }


def test_http() -> None:
    """Every replay is complete; the rates of both HTTP clients are reported as fractions of the rate in process."""
    told: list[str] = []
    section = measure_http(2_000, 1, told.append)
    assert ["http: round 0 of 1", "http: round 1 of 1"] == told
    values = {(figure.subject, figure.unit): figure.value for figure in section.figures}
    for way in ("plain socket", "httpx"):
        assert values[way, ""] == values[way, "messages/s"] / values["in process", "messages/s"] > 0
    assert ("server", "MiB") in values


def test_metrics() -> None:
    """Each figure has an upper bound, and the scrape times are positive."""
    told: list[str] = []
    section = measure_metrics(2_000, 20, 1, 0.2, told.append)
    assert len(told) == 4
    values = {(figure.data, figure.name): figure for figure in section.figures}
    assert len(values) == len(section.figures) == 8
    assert all(figure.most in (1, 50) for figure in section.figures)
    scrapes = [figure.value for figure in section.figures if figure.unit == "ms"]
    assert len(scrapes) == 4
    assert min(scrapes) > 0
    (sheet,) = section.sheets
    assert len(sheet.rows) == 8


@pytest.mark.slow
def test_cluster() -> None:
    """Each figure is measured, and a reader that catches up has all messages."""
    pytest.importorskip("obstore", reason='needs obstore: pip install "topicstore[cluster]"')
    told: list[str] = []
    section = measure_cluster(3_000, 0.2, 1, told.append)
    assert len(told) == 7
    values = {(figure.data, figure.name): figure.value for figure in section.figures}
    assert len(values) == len(section.figures) == 13
    assert min(values.values()) > 0
    (sheet,) = section.sheets
    assert len(sheet.rows) == 13
