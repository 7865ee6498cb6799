"""The selection of backends and layouts that are tested together, and the rejection of incompatible pairs."""

from __future__ import annotations

from pathlib import Path

import pytest
import topicstore as ts
from topicstore.plugins import registry
from topicstore_conformance.runner.running import Plan, everything, plans_for
from topicstore_conformance.subjects.pairs import absent, incompatible, pair_of, pairs


def test_incompatible_pairs(tmp_path: Path) -> None:
    """Opening a layout on a backend that lacks a required capability raises with the reason, and creates nothing."""
    if not incompatible():
        pytest.skip("every installed layout runs on every installed backend")
    for (backend, layout), reason in incompatible().items():
        missing = registry().layout(layout).requires - registry().backend(backend).capabilities
        assert missing
        assert all(name in reason for name in missing)
        with pytest.raises((ts.IncompatibleError, ts.BackendUnavailableError)) as refused:
            ts.open(tmp_path / "db", backend=backend, layout=layout)
        assert isinstance(refused.value, ts.BackendUnavailableError) or reason == str(refused.value)
        assert not (tmp_path / "db").exists()
        with pytest.raises(ts.IncompatibleError):
            pair_of(backend, layout)


def test_every_pair_is_tested_or_left_out_with_a_reason() -> None:
    """Every pair of registered plugins is tested, unless one plugin can't be loaded or the two are incompatible."""
    tested = {(pair.backend, pair.layout) for pair in pairs()}
    for backend in registry().backends():
        for layout in registry().layouts():
            reasons = [absent().get(backend), absent().get(layout), incompatible().get((backend, layout))]
            assert ((backend, layout) in tested) == (not any(reasons))


def test_unknown_names() -> None:
    """A pair with an unknown name raises UnknownPluginError, which lists the registered names."""
    for names in (("no such", pairs()[0].layout), (pairs()[0].backend, "no such")):
        with pytest.raises(ts.UnknownPluginError, match="there are"):
            pair_of(*names)


def test_everything_covers_everything() -> None:
    """The full mode tests every pair once, and each backend and each layout fully in at least one pair."""
    quick = pairs()
    plans = everything("full")
    databases = [plan for plan in plans if plan.suite == "database"]
    assert sorted((pair.backend, pair.layout) for pair in quick) == sorted((p.backend, p.layout) for p in databases)
    full = [plan for plan in databases if plan.mode == "full"]
    assert {pair.backend for pair in quick} == {plan.backend for plan in full}
    assert {pair.layout for pair in quick} == {plan.layout for plan in full}
    by_themselves = {(plan.suite, plan.backend or plan.layout) for plan in plans if plan.suite in ("backend", "layout")}
    names = {("backend", pair.backend) for pair in quick} | {("layout", pair.layout) for pair in quick}
    assert names == by_themselves
    assert {"quick"} == {plan.mode for plan in everything("quick")}


def test_a_name_brings_all_that_fits() -> None:
    """A backend is tested alone and with all compatible layouts, and a layout likewise; two names select one pair."""
    first = pairs()[0]

    def planned(backend: str | None, layout: str | None) -> list[tuple[str, str, str]]:
        return sorted((plan.suite, plan.backend, plan.layout) for plan in plans_for(backend, layout, "quick"))

    backend, layout = ("backend", first.backend, ""), ("layout", "", first.layout)
    both = ("database", "parts")
    mine = [(suite, pair.backend, pair.layout) for pair in pairs() if pair.backend == first.backend for suite in both]
    assert sorted([backend, *mine]) == planned(first.backend, None)
    mine = [(suite, pair.backend, pair.layout) for pair in pairs() if pair.layout == first.layout for suite in both]
    assert sorted([layout, *mine]) == planned(None, first.layout)
    mine = [(suite, first.backend, first.layout) for suite in both]
    assert sorted([backend, *mine, layout]) == planned(first.backend, first.layout)


def test_plans_are_distinguished() -> None:
    """A plan's text has the names of its plugins, and its capabilities are those that they declare."""
    backend, layout = pairs()[0].backend, pairs()[0].layout
    plan = Plan(suite="database", backend=backend, layout=layout, mode="quick")
    assert (str(pairs()[0]), sorted(pairs()[0].capabilities)) == (str(plan), plan.capabilities)
    alone = Plan(suite="layout", layout=layout, mode="quick")
    assert (layout, sorted(registry().layout(layout).capabilities)) == (str(alone), alone.capabilities)
