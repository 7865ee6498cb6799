"""Exports that an attacker has crafted with valid checksums."""

from __future__ import annotations

import copy
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import topicstore as ts
import xxhash
from click.testing import CliRunner
from topicstore.cli import cli

SLAB = "shard=0000/generation=0001/_topicstore_slab.json"
HEAD = "_topicstore_export.json"
WRONG = (-1, 2**40, 2**70, "", "../x", "\0", None, [], {}, True, 1.5, ["#", "#"], ["+/x", "#/#"])


@pytest.fixture
def target(tmp_path: Path) -> Path:
    with ts.open(tmp_path / "db", backend="memory") as db:
        db.store([ts.Message(f"t/{n}", b"%d" % n, timestamp=n) for n in range(50)])
        db.add_generation()
        db.archives.export(tmp_path / "export")
    return tmp_path / "export"


def load(file: Path) -> dict[str, Any]:
    data: dict[str, Any] = msgspec.json.decode(file.read_bytes())
    return data


def craft(file: Path, data: dict[str, Any]) -> None:
    fields = {name: value for name, value in data.items() if name not in ("format", "checksum")}
    checksum = xxhash.xxh64_hexdigest(msgspec.json.encode(fields, order="deterministic"))
    file.write_bytes(msgspec.json.encode({**fields, "format": data["format"], "checksum": checksum}))


def places(value: Any) -> Iterator[tuple[Any, Any]]:
    """Yield each container within a value, with each of its keys or indexes."""
    for key, inner in value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ():
        yield value, key
        yield from places(inner)


@pytest.mark.parametrize(
    "name", ["../x.parquet", "../../../x.parquet", "/x.parquet", "sub/part-00000.parquet", "part-00000.parquet\n"]
)
def test_a_part_is_a_file_of_the_export(target: Path, tmp_path: Path, name: str) -> None:
    """A part whose name leads outside its slab's directory is refused, because an import must not read other files."""
    data = load(target / SLAB)
    part = target / "shard=0000/generation=0001" / data["parts"][0]["name"]
    moved = (tmp_path / "root" if name.startswith("/") else part.parent) / name.removeprefix("/")
    moved.parent.mkdir(exist_ok=True)
    shutil.copy(part, moved)
    data["parts"][0]["name"] = str(moved) if name.startswith("/") else name
    craft(target / SLAB, data)
    result = CliRunner().invoke(cli, ["import", str(tmp_path / "new"), str(target)])
    assert 5 == result.exit_code, result.output
    assert "$.parts[0]" in result.stderr


@pytest.mark.slow
@pytest.mark.parametrize("name", [HEAD, SLAB])
def test_whatever_is_crafted_is_reported(target: Path, tmp_path: Path, name: str) -> None:
    """An export with a wrong value in its description is refused with a clear error, or imported correctly."""
    whole = load(target / name)
    for number in range(len(list(places(whole)))):
        for wrong in WRONG:
            data = copy.deepcopy(whole)
            where, key = list(places(data))[number]
            if key == "checksum":
                continue
            where[key] = wrong
            craft(target / name, data)
            result = CliRunner().invoke(cli, ["import", str(tmp_path / "new"), str(target), "--backend", "memory"])
            assert result.exit_code in (0, 2, 3, 5), (key, wrong)
            assert isinstance(result.exception, SystemExit | None), (key, wrong)
