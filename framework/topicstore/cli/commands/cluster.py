"""The commands ``topicstore cluster …``: databases that several sites share through a log store."""

from __future__ import annotations

from pathlib import Path

import click

import topicstore
from topicstore.cli.command import Answer, answers
from topicstore.cli.terminal.display import count_of

__all__ = ["cluster"]


@click.group()
def cluster() -> None:
    """Share a database among several sites, through a log store such as S3 or a directory."""


@cluster.command()
@answers()
@click.argument("url")
@click.option("--instead", is_flag=True, help="Accept a copy of a database that another cluster shares.")
def begin(path: Path, url: str, *, instead: bool) -> Answer:
    """Make the database PATH the first copy of a new cluster in the log store URL, such as s3://bucket/prefix.

    Everything in PATH is copied to the store. Then open PATH with the cluster; other sites join with empty directories.
    No program may have PATH open. With --instead, PATH may be a checkpoint of a server of another cluster. If the
    command is interrupted, repeat it. Credentials are taken from the environment.
    """
    topicstore.begin_cluster(path, url, instead=instead)
    with topicstore.open(path, mode="r") as db:
        id_, found = db.id.hex(), db.info()
    yield {"url": url, "database": id_, "shards": len(found.shards), "messages": found.messages}
    yield f"{url} has {count_of(found.messages, 'message')} of {path}; open it with the cluster from now on"
