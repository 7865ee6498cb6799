"""The plugin that registers the environment variables of the conformance suites and their data sets."""

from __future__ import annotations

from topicstore import hookimpl

from topicstore_conformance.conditions import modes
from topicstore_conformance.subjects import datasets

__all__ = ["topicstore_variables"]


@hookimpl
def topicstore_variables() -> list[str]:
    """Return the environment variables that set the mode, random examples, and the data sets of real messages."""
    return [modes.VARIABLE, modes.EXAMPLES, datasets.VARIABLE]
