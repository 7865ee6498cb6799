"""The section ``sessions`` measures what it says, on small numbers."""

from __future__ import annotations

import pytest
from topicstore_benchmarks.figures import serving
from topicstore_benchmarks.figures.sessions import measure_sessions


def test_every_figure_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """All figures come, with two sheets, and one copy is stored however many sessions there are."""
    monkeypatch.setattr(serving, "SIZES", dict.fromkeys(serving.SIZES, 2))
    section = measure_sessions(sessions=3, published=2_000, backlog=4_000, stored=50, seconds=0.2, clients=8, rounds=1)
    assert all(figure.value > 0 for figure in section.figures)
    assert len({(figure.data, figure.name) for figure in section.figures}) == len(section.figures)
    assert [10, 19] == [len(sheet.rows) for sheet in section.sheets]
    assert 1 == next(f.value for f in section.figures if f.name == "stored copies of a message")
    assert {"32 clients with a message each waiting", "800 retained", "80 new clients", "publish of 1,000"} <= {
        figure.data for figure in section.figures
    }
