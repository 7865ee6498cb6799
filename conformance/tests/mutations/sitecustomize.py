"""Imported by each Python process that begins: those that a test starts have its mutation, too."""

import os

if name := os.environ.get("MUTATION"):
    import running

    running.begin_mutated(name)
if os.environ.get("MUTANT"):
    import generated

    generated.install()
