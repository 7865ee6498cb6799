"""The section ``http`` measures what it says, on small numbers."""

from __future__ import annotations

import pytest

pytest.importorskip("litestar", reason='needs litestar: pip install "topicstore[server]"')
pytest.importorskip("rocksdict", reason='needs rocksdict: pip install "topicstore[rocksdb]"')

from topicstore_benchmarks.figures.http import measure_http


def test_the_section() -> None:
    """Every replay is whole, and each way over HTTP has its share of the rate in process."""
    told: list[str] = []
    section = measure_http(2_000, 1, told.append)
    assert ["http: round 0 of 1", "http: round 1 of 1"] == told
    values = {(figure.subject, figure.unit): figure.value for figure in section.figures}
    for way in ("plain socket", "httpx"):
        assert values[way, ""] == values[way, "messages/s"] / values["in process", "messages/s"] > 0
    assert ("server", "MiB") in values
