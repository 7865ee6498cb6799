"""The section ``trie``: what `trie` measured of the learned topic structure, as figures."""

from __future__ import annotations

from .figure import Cell, Figure, Section, Sheet
from .trie import CACHED, Match, Outcome

__all__ = ["trie_section"]

_CALL, _STREAM = 10e-6, 2e-6
"""Seconds that a match may take in any case, and for each stream in its answer."""


def trie_section(outcome: Outcome) -> Section:
    """Return the figures, those of single filters in a table of their own."""
    figures = _figures(outcome)
    return Section(
        name="trie",
        figures=[*figures, *(_matched(match) for match in outcome.matches)],
        sheets=[
            Sheet.listing(
                f"The learned topic structure, {outcome.topics:,} topics",
                {"topics": "data", "figure": "name"},
                figures,
                note="medians; in brackets what a figure should be",
            ),
            Sheet(
                title=f"Filters on {outcome.flood_streams:,} streams",
                columns=["filter", "streams in the answer", "µs"],
                rows=[
                    [f"`{match.topic_filter}`", Cell(f"{match.streams:,}"), _matched(match).cell()]
                    for match in outcome.matches
                ],
                note="medians",
            ),
        ],
    )


def _figures(o: Outcome) -> list[Figure]:
    worst = max(match.seconds / (_CALL + _STREAM * match.streams) for match in o.matches)
    return [
        _figure("devices", f"look-ups a second, {CACHED:,} topics again and again", o.cached, least=1_000_000),
        _figure("devices", "look-ups a second, topics never seen", o.cold, least=150_000),
        _figure("devices", "look-ups a second, topics known and not remembered", o.walked, least=150_000),
        _figure("devices", "streams", o.streams),
        _figure("devices", "loading, ms", o.load_seconds * 1_000),
        _figure("devices", "memory once all were learned, MB", o.learning_memory / 1e6),
        _figure("devices", "memory once loaded, MB", o.memory / 1e6),
        _figure("flood", "look-ups a second, topics never seen", o.flood_rate, least=150_000),
        _figure("flood", "streams", o.flood_streams),
        _figure("flood", "loading, ms", o.flood_load_seconds * 1_000),
        _figure("flood", "memory once loaded, MB", o.flood_memory / 1e6),
        _figure("flood", "slowest filter, times (10 µs + 2 µs for each stream in its answer)", worst, most=1),
    ]


def _figure(data: str, name: str, value: float, least: float | None = None, most: float | None = None) -> Figure:
    return Figure(data=data, subject="trie", name=name, value=value, least=least, most=most)


def _matched(match: Match) -> Figure:
    return _figure("flood", f"µs to match {match.topic_filter}", match.seconds * 1e6)
