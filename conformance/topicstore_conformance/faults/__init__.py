"""Fault injection: kills at a counted step, power failures, full disks, races, and clocks that jump."""
