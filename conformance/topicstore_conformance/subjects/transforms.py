"""A correct transform: a plugin that changes payloads when they are stored, and undoes it when they are read."""

from __future__ import annotations

from collections.abc import Generator, Iterable

import attrs
import topicstore as ts
from topicstore.contract.columns import to_iterable
from topicstore.contract.requests import ReadRequest, ReadResult, StoreRequest, StoreResult

__all__ = ["SHIFTING", "Shifting"]


class Shifting:
    """A transform that stores a payload as one byte, the step, and the payload's bytes, increased by the step."""

    def __init__(self, step: int) -> None:
        self._head = bytes((step,))
        self._encoding = bytes((byte + step) % 256 for byte in range(256))
        self._decoding = bytes((byte - step) % 256 for byte in range(256))

    def encode(self, payloads: Iterable[bytes]) -> list[bytes]:
        """Return the stored form of payloads."""
        return [self._head + bytes(payload).translate(self._encoding) for payload in payloads]

    def decode(self, payloads: Iterable[bytes]) -> list[bytes]:
        """Return the payloads of stored forms."""
        return [bytes(payload)[1:].translate(self._decoding) for payload in payloads]

    def before_store(self, request: StoreRequest) -> None:
        """Encode the payloads of a request."""
        request.batch = request.batch.replace(payloads=self.encode(to_iterable(request.batch.payloads)))

    def before_read(self, request: ReadRequest) -> None:
        """Leave a read request unchanged."""

    def after_read(self, request: ReadRequest, result: ReadResult) -> ReadResult:
        """Return a result with its payloads decoded."""
        batch = result.batch.replace(payloads=self.decode(to_iterable(result.batch.payloads)))
        return attrs.evolve(result, batch=batch)

    @ts.hookimpl(wrapper=True)
    def topicstore_store(self, request: StoreRequest) -> Generator[None, StoreResult, StoreResult]:
        """Encode the payloads of a batch before it is stored."""
        self.before_store(request)
        return (yield)

    @ts.hookimpl(wrapper=True)
    def topicstore_read(self, request: ReadRequest) -> Generator[None, ReadResult, ReadResult]:
        """Decode the payloads of a batch that was read."""
        self.before_read(request)
        result = yield
        return self.after_read(request, result)


SHIFTING = Shifting(3)
