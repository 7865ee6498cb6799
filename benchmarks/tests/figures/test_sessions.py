"""The section ``sessions`` measures what it says, on small numbers."""

from __future__ import annotations

from topicstore_benchmarks.figures.sessions import measure_sessions


def test_every_figure_is_measured() -> None:
    """All figures come, and one copy is stored however many sessions there are."""
    section = measure_sessions(sessions=3, published=2_000, backlog=4_000, stored=50, seconds=0.2)
    figures = {figure.name: figure.value for figure in section.figures}
    assert all(value > 0 for value in figures.values())
    assert figures["stored copies of a message"] == 1
