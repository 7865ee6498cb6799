"""Samples of real messages, which are imported and compared with their files row by row."""

from __future__ import annotations

from pathlib import Path

import pytest
import topicstore as ts
from click.testing import CliRunner
from topicstore.cli import cli
from topicstore.cli.files.source_detection import open_source
from topicstore.files.formats import decode_lines
from topicstore_conformance.conditions.skipping import need_data
from topicstore_conformance.subjects import datasets


def sample(name: str) -> Path:
    need_data(name)
    return datasets.folder() / name


def run(*arguments: object) -> bytes:
    result = CliRunner().invoke(cli, list(map(str, arguments)))
    assert (result.exit_code, result.stderr) == (0, "")
    return result.stdout_bytes


@pytest.mark.parametrize("name", [pytest.param("bus", marks=pytest.mark.slow), "home"])
@pytest.mark.parametrize("ending", ["-sample.jsonl.gz", ".parquet"])
def test_row_for_row(tmp_path: Path, name: str, ending: str) -> None:
    """A replay returns the sample file's messages in the file's order."""
    file = sample(name + ending)
    run("import", tmp_path / "db", file)
    with open_source(file) as source, ts.open(tmp_path / "db", mode="r+") as db:
        stored = db.replay("#", order="time")
        for rows in source.read(0, 8_192):
            batch = rows.messages if isinstance(rows.messages, list) else ts.MessageBatch.from_arrow(rows.messages)
            for message in batch if isinstance(batch, list) else batch.to_messages():
                assert message == next(stored)
        assert next(stored, None) is None


@pytest.mark.parametrize("name", ["bus", "home"])
def test_the_sample_begins_the_whole(tmp_path: Path, name: str) -> None:
    """The sample of a data set equals the beginning of the whole data set."""
    run("import", tmp_path / "sample", sample(f"{name}-sample.jsonl.gz"), "--shards", 4)
    run("import", tmp_path / "whole", sample(f"{name}.parquet"), "--limit", 5_000, "--shards", 4)
    lines = run("replay", tmp_path / "sample")
    assert run("replay", tmp_path / "whole") == lines
    assert len(decode_lines(lines)) == 5_000
