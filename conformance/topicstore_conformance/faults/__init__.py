"""Deliberate faults: kills at a counted step, races behind gates, clocks that jump."""
