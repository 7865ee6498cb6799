"""The suite finds what is wrong with a database, and names the promise that it breaks."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parent))  # what lies beside this file belongs to no package

from sabotage import Saboteur, run
from sabotage_databases import SABOTEURS
from topicstore_conformance.database.suite import DatabaseSuite

pytest.importorskip("rocksdict", reason="the extra 'rocksdb' is not installed")

Results = dict[str, dict[str, str]]


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Results:
    return run("sabotage_databases", tmp_path_factory.mktemp("sabotage"))


@pytest.mark.parametrize("saboteur", SABOTEURS, ids=lambda saboteur: saboteur.name)
def test_a_broken_promise_is_named(saboteur: Saboteur, results: Results) -> None:
    """The test fails whose docstring is the promise that a saboteur breaks."""
    assert getattr(DatabaseSuite, saboteur.test).__doc__
    if results[saboteur.name][saboteur.test] == "skipped":
        pytest.skip(f"the test that must fail is skipped here: {saboteur.test}")
    assert results[saboteur.name][saboteur.test] == "failed", saboteur.what
