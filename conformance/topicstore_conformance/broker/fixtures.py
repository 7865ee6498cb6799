"""Fixtures shared by all tests of brokers: clients on raw sockets, and choices that the standard leaves open."""

from __future__ import annotations

import re
import secrets
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, suppress
from functools import cache
from typing import Any, TypeVar

import attrs
import pytest

from topicstore_conformance.faults.threads import PATIENCE
from topicstore_conformance.mqtt import wire
from topicstore_conformance.mqtt.raw_client import RawClient

__all__ = ["QUICK_ANSWER", "Broker", "Connect", "Fixtures", "MustEnd", "both", "needs"]

F = TypeVar("F", bound=Callable[..., Any])
Connect = Callable[..., RawClient]
MustEnd = Callable[..., None]
QUICK_ANSWER = 10.0
"""The seconds within which a broker that anyone may run answers."""
VERSIONS = {4: "MQTT 3.1.1", 5: "MQTT 5"}
both = pytest.mark.parametrize("version", list(VERSIONS), ids=list(VERSIONS.values()))
"""Run a test with both versions of MQTT."""
_NEEDED = "topicstore_broker_needs"


def needs(*features: str) -> Callable[[F], F]:
    """Declare that a test needs features, such as ``retain``: it is skipped if the CONNACK says that one is missing."""

    def keep(test: F) -> F:
        setattr(test, _NEEDED, features)
        return test

    return keep


@attrs.frozen
class Broker:
    """A broker under test, which may have other clients and messages.

    strict: whether to test also two features that MQTT doesn't demand and topicstore's server has: the reason why it
            ends a connection, and shared subscriptions of MQTT 3.1.1.
    """

    host: str
    port: int
    patience: float = PATIENCE
    """The timeout of each wait for the broker, in seconds."""
    strict: bool = False

    def client(self, version: int = 5) -> RawClient:
        """Return a new connection, on which no packet was sent yet."""
        return RawClient(self.port, version=version, host=self.host, patience=self.patience)


@cache
def greeting(broker: Broker, version: int) -> wire.Packet | None:
    """Return the CONNACK that accepts a client of an MQTT version, or None if the broker doesn't speak that version."""
    with broker.client(version) as client, suppress(AssertionError):  # the CONNACK may be of another version
        client.send(wire.connect(f"greeting-{secrets.token_hex(4)}", version=version))
        packet = client.receive()
        return packet if packet is not None and (packet.kind, packet.reason) == ("CONNACK", 0) else None
    return None


class Fixtures:
    """Fixtures of all tests of brokers; a subclass overrides ``broker``."""

    @pytest.fixture
    def broker(self) -> Broker:
        """Return the broker under test."""
        raise NotImplementedError("override the fixture 'broker': it returns a Broker")

    @pytest.fixture(autouse=True)
    def _offered(self, request: pytest.FixtureRequest, broker: Broker) -> None:
        """Skip a test that needs a version or a feature that the broker doesn't offer."""
        version = request.node.callspec.params.get("version", 5) if hasattr(request.node, "callspec") else 5
        found = greeting(broker, version)
        if found is None:
            pytest.skip(f"the broker accepts no client of {VERSIONS[version]}")
        for feature in getattr(request.function, _NEEDED, ()):
            if not found.properties.get(f"{feature}_available", 1):
                pytest.skip(f"the broker says in its CONNACK that it has no {feature.replace('_', ' ')}")

    @pytest.fixture
    def name(self, request: pytest.FixtureRequest) -> str:
        """Return a name that nothing else on the broker has, usable as a topic level and as a client id."""
        return f"{re.sub(r'[^a-z0-9]+', '-', request.node.name.lower())[:40]}-{secrets.token_hex(4)}"

    @pytest.fixture
    def connect(self, broker: Broker, name: str) -> Iterator[Connect]:
        """Yield a function that connects a client, which the broker must accept.

        Its arguments are those of `RawClient.connect`; without a client id, the client has one that no other has.
        Afterwards the clients' sessions are discarded, and so are the retained messages under the test's name.
        """
        kept: set[tuple[str, int]] = set()
        with ExitStack() as clients:

            def connected(client_id: str | None = None, *, version: int = 5, **options: Any) -> RawClient:
                client = clients.enter_context(broker.client(version))
                if client_id:
                    kept.add((client_id, version))
                client.connect(f"{name}-{secrets.token_hex(4)}" if client_id is None else client_id, **options)
                assert client.connack.reason == 0, f"the broker refuses a client: {client.connack}"
                return client

            yield connected
        with suppress(AssertionError, OSError):  # a failed clean-up doesn't fail the test
            for client_id, version in kept:
                with broker.client(version) as client:
                    client.connect(client_id)
                    client.leave()
            self._clear(broker, name)

    @staticmethod
    def _clear(broker: Broker, name: str) -> None:
        """Remove the retained messages whose topics begin with a name."""
        version = 5 if greeting(broker, 5) else 4
        with closing(broker.client(version)) as client:
            client.connect(f"{name}-clears")
            filters = [(f"{name}/#", 0)]  # `name/#` matches the topic `name`, too
            client.send(wire.subscribe(client.next_id(), filters, version=version), wire.PINGREQ)
            found = set()
            while (packet := client.next()).kind != "PINGRESP":
                found.add(packet.topic)
            for topic in found - {""}:
                client.send(wire.publish(topic, retain=True, version=version))
            client.leave()

    @pytest.fixture
    def stranger(self, broker: Broker) -> Iterator[Connect]:
        """Yield a function that opens a connection for an MQTT version, on which nothing has been sent yet."""
        with ExitStack() as clients:
            yield lambda version=5: clients.enter_context(broker.client(version))

    @pytest.fixture
    def must_end(self, broker: Broker) -> MustEnd:
        """Return a function that waits until the broker ends a client's connection, and checks the broker's reason.

        Its arguments are the client, and the reason codes that a DISCONNECT of MQTT 5 may have, the usual one first.
        A broker that isn't strict may end the connection without a DISCONNECT, or with any error.
        """

        def ended(client: RawClient, *reasons: int) -> None:
            found = client.farewell()
            if client.version == 4:
                assert found is None, f"{found} came in MQTT 3.1.1, in which a server ends connections without a word"
            elif broker.strict:
                assert found is not None, "the connection ended without a DISCONNECT that says why"
                assert (found[0], found[1] in reasons) == ("DISCONNECT", True), f"it ended with {found}"
            elif found is not None:
                assert (found[0], found[1] >= 0x80) == ("DISCONNECT", True), f"it ended with {found}"

        return ended
