"""The suite of MQTT brokers, for the address of the option ``--only-broker``."""

from __future__ import annotations

import pytest

from topicstore_conformance.broker.fixtures import QUICK_ANSWER, Broker
from topicstore_conformance.broker.suite import BrokerSuite


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Run every test for the broker."""
    host, _, port = metafunc.config.getoption("only_broker").rpartition(":")
    metafunc.parametrize("broker", [Broker(host, int(port), QUICK_ANSWER)], ids=[f"{host}:{port}"], scope="class")


class TestBroker(BrokerSuite):
    """The suite for the broker."""
