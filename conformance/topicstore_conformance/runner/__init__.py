"""The command that runs the suites against plugins and pairs, and reports their results."""
