"""The command ``topicstore create``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

import topicstore
from topicstore.cli.command import Answer, answers
from topicstore.cli.terminal.display import count_of
from topicstore.cli.terminal.options import arguments_of, creation_options, warn_unless_kept

__all__ = ["create"]


@click.command()
@answers()
@creation_options
def create(path: Path, **given: Any) -> Answer:
    """Create an empty database in the directory PATH.

    These settings can't be changed later, except the layout, which can be changed with each generation.
    """
    warn_unless_kept(given["backend"])
    with topicstore.open(path, mode="x", **arguments_of(**given)) as db:
        manifest = db.manifest
    yield manifest
    yield f"created {path}: {manifest.backend}, {manifest.layout}, {count_of(manifest.shards, 'shard')}"
