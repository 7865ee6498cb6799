"""Applies a test's mutation in the processes that the test starts: every Python process imports this module."""

import os

if name := os.environ.get("MUTATION"):
    import running

    running.begin_mutated(name)
if os.environ.get("MUTANT"):
    import generated

    generated.install()
if os.environ.get("REACHED"):
    import reaching

    reaching.install()
