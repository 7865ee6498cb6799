"""Strategies for any kind of message, and an exact comparison of lists of messages."""

from __future__ import annotations

from typing import Any

import msgspec
from hypothesis import strategies as st
from topicstore.contract.model import Message
from topicstore.contract.positions import MAX_TIME
from topicstore_conformance.oracle import strategies

messages = strategies.messages(times=st.none() | st.integers(0, 3) | st.integers(0, MAX_TIME))
# Batches with mostly constant columns are as frequent as batches without any.
alike = st.builds(lambda message, count: [message] * count, messages, st.integers(1, 6))
lists = st.lists(messages, max_size=8) | alike | st.builds(lambda one, other: one + other, alike, alike)


def exactly(messages: list[Message]) -> list[list[tuple[type, Any]]]:
    """Return the messages' values together with their types, so that True and 1 differ."""
    return [[(type(value), value) for value in msgspec.structs.astuple(message)] for message in messages]
