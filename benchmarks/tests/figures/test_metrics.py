"""The section ``metrics`` measures what it says, on small numbers."""

from __future__ import annotations

import pytest

pytest.importorskip("litestar", reason='needs litestar: pip install "topicstore[server]"')
pytest.importorskip("rocksdict", reason='needs rocksdict: pip install "topicstore[rocksdb]"')

from topicstore_benchmarks.figures.metrics import measure_metrics


def test_the_section() -> None:
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
