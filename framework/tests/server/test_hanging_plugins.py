"""A plugin that doesn't answer delays only the client concerned, not other clients or the server's end."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator

import pytest
import topicstore as ts
from topicstore.contract.access import AuthenticationRequest
from topicstore.server.access.access import Access, AccessHooks
from topicstore.server.config.model import AuthenticationSettings, AuthorizationSettings, Limits, ServerSettings
from topicstore.server.config.units import Duration
from topicstore_conformance.faults.threads import PATIENCE, wait_until
from topicstore_conformance.mqtt import wire
from topicstore_conformance.mqtt.embedded import Embedded


class Hanging:
    """A plugin that answers when the test allows it."""

    def __init__(self) -> None:
        self.asked, self.may_answer = threading.Event(), threading.Event()

    @ts.hookimpl
    def topicstore_authenticate(self, request: AuthenticationRequest) -> list[str | bool | None]:
        self.asked.set()
        assert self.may_answer.wait(PATIENCE)
        return [None] * len(request.clients)


@pytest.fixture
def plugin() -> Hanging:
    return Hanging()


@pytest.fixture
def access(plugin: Hanging) -> Iterator[Access]:
    hooks = AccessHooks([("hanging", plugin)], "topicstore_authenticate")
    made = Access(AuthenticationSettings(), AuthorizationSettings(), authenticate=hooks)
    yield made
    made.join()


async def end(plugin: Hanging, access: Access) -> None:
    """Let the plugin answer, and close the `Access` in the event loop that uses it."""
    plugin.may_answer.set()
    access.end()


def test_a_client_that_goes_while_it_is_asked_about_leaves_its_place_to_others(
    db: ts.Database, plugin: Hanging, access: Access
) -> None:
    """A client that disconnects while a plugin is asked about it frees its connection slot.

    Otherwise unauthenticated clients could keep all others out.
    """
    with Embedded(db, ServerSettings(limits=Limits(connections=1)), access=access) as embedded:

        async def full() -> bool:
            assert embedded.server._broker is not None
            return embedded.server._broker.serving.full

        try:
            with embedded.client() as client, embedded.client() as other:
                client.send(wire.connect("me"))
                assert plugin.asked.wait(PATIENCE)
                assert other.connect("other").reason == 0x97
            wait_until(lambda: not embedded.do(full()), "the place to be free")
        finally:
            embedded.do(end(plugin, access))


def test_a_client_of_which_nobody_says_who_it_is_does_not_wait_for_ever(
    db: ts.Database, plugin: Hanging, access: Access
) -> None:
    """A client is refused after the connect timeout, even if a plugin is still being asked about it."""
    with Embedded(db, ServerSettings(limits=Limits(connect_timeout=Duration(1))), access=access) as embedded:
        try:
            refused = None
            while refused is None:  # on a slow machine the CONNECT itself may arrive late
                with embedded.client() as client:
                    client.send(wire.connect("me"))
                    refused = client.farewell()
            assert plugin.asked.is_set()
            assert refused == ("CONNACK", 0x88)
        finally:
            embedded.do(end(plugin, access))


def test_the_event_loop_goes_on_while_a_plugin_is_waited_for_at_the_end(
    db: ts.Database, plugin: Hanging, access: Access
) -> None:
    """The event loop runs while a stopping server waits for a plugin.

    Otherwise a second signal, which ends the program at once, would not be handled.
    """
    with Embedded(db, access=access) as embedded:
        # as if the server had created this object; settings can only name installed plugins
        embedded.server._access = access
        went_on = threading.Event()

        async def later() -> None:
            while embedded.server._access is not None:
                await asyncio.sleep(0)
            for _ in range(100):
                await asyncio.sleep(0)
            went_on.set()

        try:
            with embedded.client() as client:
                client.send(wire.connect("me"))
                assert plugin.asked.wait(PATIENCE)
                ending, goes_on = embedded.begin(embedded.server.drain()), embedded.begin(later())
                assert client.farewell() == ("CONNACK", 0x88)
            assert went_on.wait(60)
            assert not ending.done()
        finally:
            plugin.may_answer.set()
        ending.result(PATIENCE)
        goes_on.result(PATIENCE)
