"""The values that calls for many sessions take and return.

Such a call takes rows, and returns a result for each. With ``partial``, a row that fails is refused, with its error,
and the other rows are carried out. Without ``partial``, the call raises the first error; each method documents which
errors are raised before any change.
"""

from __future__ import annotations

from collections.abc import Mapping

import attrs
import msgspec

from topicstore.contract.arguments import Length
from topicstore.contract.errors import TopicstoreError
from topicstore.pubsub.publish import PublishResult

from .delivery_batch import Allow
from .in_flight import MAX_PACKET_ID
from .model import Overlapping, Will

__all__ = ["Acknowledged", "Connect", "PublishedRows"]


class Connect(msgspec.Struct, frozen=True, kw_only=True):
    """The parameters of `Sessions.open` for one row of `Sessions.open_many`."""

    client_id: str
    clean_start: bool = False
    expiry_interval: Length | None = 0.0
    """A timedelta or seconds; None or 0xFFFFFFFF: the session never expires."""
    receive_maximum: int = MAX_PACKET_ID
    keep_alive: Length = 0
    """A timedelta or seconds; 0: no limit."""
    will: Will | None = None
    allow: Allow | None = None
    overlapping: Overlapping = "each"
    in_memory: bool = False
    batch_size: int | None = None
    user: str = ""
    """The user that a new session counts for; see `Sessions.bounds`."""


@attrs.frozen(kw_only=True)
class PublishedRows:
    """The result of `Sessions.publish`. Rows are numbered from 0, in the order of the call."""

    result: PublishResult
    """The result of the messages that were published: neither refused nor repetitions, in the order of their rows."""
    matched: list[bool]
    """By row, whether a subscription matches its topic; if not, a server may answer with the reason code 0x10, "no
    matching subscribers" (MQTT 5, section 3.4.2.1). False for a refused row. ``no_local`` is not considered."""
    repeated: frozenset[int]
    """The rows that repeat a message of QoS 2 that was published before, and were left out."""
    refused: Mapping[int, TopicstoreError]
    """The error of each row that was refused."""


@attrs.frozen(kw_only=True)
class Acknowledged:
    """The result of `Sessions.pubrel` and `Sessions.pubrec`. Rows are numbered from 0, in the order of the call."""

    known: list[bool]
    """By row, whether its packet id was in use; if not, a server answers with the reason code 0x92, "packet identifier
    not found" (MQTT 5, section 3.7.2.1). False for a refused row."""
    refused: Mapping[int, TopicstoreError]
    """The error of each row that was refused."""
