"""`BrokerSuite`, which combines all tests of a broker."""

from __future__ import annotations

from .connecting import Connecting
from .publishing import Publishing
from .subscribing import Subscribing

__all__ = ["BrokerSuite"]


class BrokerSuite(Connecting, Publishing, Subscribing):
    """Tests of the numbered statements of MQTT 5 and 3.1.1 about brokers, over raw sockets.

    Subclass it and override the fixture ``broker``::

        class TestMine(BrokerSuite):
            @pytest.fixture
            def broker(self) -> Broker:
                return Broker("127.0.0.1", 1883)

    Each test's docstring states a duty of the broker. `statements_of` returns the numbers of a test's statements.
    """
