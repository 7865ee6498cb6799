"""The command ``topicstore create``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import attrs
import click

import topicstore
from topicstore.cli.terminal.options import PATH, arguments_of, creation_options, json_option, warn_unless_kept

__all__ = ["create"]


@click.command()
@click.argument("path", type=PATH)
@creation_options
@json_option
def create(path: Path, *, as_json: bool, **given: Any) -> None:
    """Create an empty database in the directory PATH.

    The arguments hold for the database's whole life, except the layout, which each generation may change.
    """
    from topicstore.cli.terminal.display import print_json

    warn_unless_kept(given["backend"])
    with topicstore.open(path, mode="x", **arguments_of(**given)) as db:
        manifest = db.manifest
    if as_json:
        print_json({"path": str(path), **attrs.asdict(manifest)})
    else:
        plural = "s" if manifest.shards > 1 else ""
        click.echo(f"created {path}: {manifest.backend}, {manifest.layout}, {manifest.shards} shard{plural}")
