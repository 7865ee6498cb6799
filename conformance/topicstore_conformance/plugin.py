"""The variables that the suites and their data read from the environment, registered as by any plugin."""

from __future__ import annotations

from topicstore import hookimpl

from topicstore_conformance.conditions import modes
from topicstore_conformance.subjects import datasets

__all__ = ["topicstore_variables"]


@hookimpl
def topicstore_variables() -> list[str]:
    """Return the variables that choose a mode and random examples, and that name sets of real messages."""
    return [modes.VARIABLE, modes.EXAMPLES, datasets.VARIABLE]
