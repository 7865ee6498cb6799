"""The model checker finds no error in the protocol, and finds an error if any of its rules is broken."""

from __future__ import annotations

import os

import pytest
from topicstore_conformance.replication.checker import check
from topicstore_conformance.replication.faults import FAULTS, Fault
from topicstore_conformance.replication.world import Scope

FULL = os.environ.get("TOPICSTORE_CONFORMANCE") == "thorough"
QUICK_SCOPES = {
    "lost answers": Scope(),
    "an owner appends twice": Scope(appends=2, lost=0),
    "three owners": Scope(owners=3, slots=5, lost=0, follower=False),
    "late and doubled PUTs": Scope(late=1, follower=False),
    "handing over": Scope(releases=True, lost=0),
    "two owners of one epoch": Scope(any_epoch=True, lost=0),
    "entries deleted in any order": Scope(scattered=True, lost=0),
}
FULL_SCOPES = {
    "an owner appends twice, lost answers": Scope(appends=2),
    "three owners and a follower": Scope(owners=3, lost=0),
    "three owners, lost answers and a follower": Scope(owners=3),
    "three owners of any epoch": Scope(owners=3, slots=5, lost=0, follower=False, any_epoch=True),
    "late PUTs, one epoch, any order of deleting": Scope(late=1, any_epoch=True, scattered=True),
    "handing over, lost answers": Scope(releases=True),
    "two late PUTs": Scope(late=2, lost=1),
}
MOST = 4_000_000
"""The maximum number of states to check; a complete search has fewer."""


@pytest.mark.slow
@pytest.mark.timeout(3_600)
@pytest.mark.parametrize("name", [*QUICK_SCOPES, *(FULL_SCOPES if FULL else ())])
def test_every_interleaving_keeps_what_must_hold(name: str) -> None:
    """In each bounded configuration, no reachable state of the protocol violates an invariant."""
    report = check((QUICK_SCOPES | FULL_SCOPES)[name], most=MOST)
    assert report.finding is None, str(report.finding)
    assert report.whole


@pytest.mark.parametrize("fault", FAULTS.values(), ids=FAULTS)
def test_a_broken_rule_is_found(fault: Fault) -> None:
    """A broken rule is found, with the steps that lead to the violation."""
    report = check(fault.scope, fault.decisions(), most=200_000)
    assert report.finding is not None
    assert len(report.finding.trace) > 2


def test_a_finding_shows_its_steps() -> None:
    """A finding's text lists its steps in order, one on each line."""
    fault = FAULTS["acknowledged when sent"]
    report = check(fault.scope, fault.decisions())
    assert str(report.finding).splitlines() == [
        "A1 was acknowledged and is not in the log, after 6 steps:",
        "site A: named the owner for epoch 1, and has what lies below 0",
        "site A: finds nothing at 0",
        "site A: has created fence fA at 0",
        "site A: owns",
        "site A: queues A1 at 1",
        "site A: sends changes A1 at 1",
    ]
