"""Rules of imports that `make lint` can't check."""

from __future__ import annotations

import ast
import gc
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FRAMEWORK = ROOT / "framework" / "topicstore"
ON_TOP = ("cli", "client", "files", "server", "spark", "__init__.py")
"""Programs that use the public API, and the API module itself."""


def imported(file: Path) -> Iterator[str]:
    """Yield the modules that a file imports anywhere, also within functions."""
    # a destructor that runs within `ast.parse` can make the parser fail:
    # https://github.com/python/cpython/issues/106905
    gc.disable()
    try:
        tree = ast.parse(file.read_text())
    finally:
        gc.enable()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (name.name for name in node.names)
        elif isinstance(node, ast.ImportFrom) and not node.level:
            yield node.module or ""


@pytest.mark.parametrize("file", sorted(FRAMEWORK.rglob("*.py")), ids=lambda file: str(file.relative_to(FRAMEWORK)))
def test_a_module_does_not_look_up(file: Path) -> None:
    """No module below the public API imports the public API."""
    if file.relative_to(FRAMEWORK).parts[0] not in ON_TOP:
        assert "topicstore" not in set(imported(file))


@pytest.mark.parametrize("example", sorted((ROOT / "examples").glob("third_party_*")), ids=lambda path: path.name)
def test_plugins_elsewhere_need_the_contract_only(example: Path) -> None:
    """The example plugins import only `topicstore` and `topicstore.contract`."""
    used = {name for file in (example / "src").rglob("*.py") for name in imported(file)}
    ours = {name for name in used if name.split(".")[0] == "topicstore"}
    assert ours
    assert all(name == "topicstore" or name.startswith("topicstore.contract.") for name in ours)
