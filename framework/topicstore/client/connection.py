"""`Connection`: requests to one server, with errors as exceptions and answers as the library's own objects."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Generic, Self, TypeVar, overload

import msgspec

from topicstore.contract.errors import BackendUnavailableError, InvalidArgumentError

from .problems import ServerUnreachableError, error_of, problem_of, stranger

if TYPE_CHECKING:
    import ssl

    import httpx

__all__ = ["ARROW", "Connection"]

T = TypeVar("T")

ARROW = "application/vnd.apache.arrow.stream"
"""The media type of a stream of Arrow's IPC format."""
_PREFIX = "/api/v5"
_PATIENCE = 10.0
"""Seconds to wait for a connection. An answer may take as long as it needs."""
_PAGE = 10_000
"""The most items of a page."""


class _Page(msgspec.Struct, Generic[T]):
    items: list[T]
    next: Any = None


class Connection:
    """A connection to a server, until `close`.

    url:    the beginning of its URLs, such as ``http://127.0.0.1:18083``.
    token:  sent with each request; None for none.
    verify: which certificates are trusted with TLS, as httpx takes it.
    """

    def __init__(self, url: str, token: str | None, *, verify: ssl.SSLContext | bool = True) -> None:
        try:
            import httpx
        except ImportError as missing:
            raise BackendUnavailableError(
                f'asking the server at {url} needs httpx: pip install "topicstore[server]"'
            ) from missing
        self.url = url.rstrip("/")
        headers = {} if token is None else {"Authorization": f"Bearer {token}"}
        self._http = httpx.Client(
            base_url=f"{self.url}{_PREFIX}",
            headers=headers,
            verify=verify if self.url.startswith("https:") else False,  # what is trusted takes long to load
            timeout=httpx.Timeout(None, connect=_PATIENCE),
            trust_env=False,
        )

    def close(self) -> None:
        """End the connection."""
        self._http.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # --- whole answers ---

    def get(self, path: str, kind: type[T], **parameters: Any) -> T:
        """Return what is at a path. Parameters that are None are left out. Raises what the server raised."""
        return self._decoded(self.ask("GET", path, parameters=parameters), kind)

    def pages(self, path: str, kind: type[T], **parameters: Any) -> Iterator[T]:
        """Yield the items of all pages at a path."""
        after: Any = None
        while True:
            page = self.get(path, _Page[kind], limit=_PAGE, after=after, **parameters)  # type: ignore[valid-type]
            yield from page.items
            after = page.next
            if after is None:
                return

    def items(self, path: str, kind: type[T]) -> list[T]:
        """Return the items of a list that comes as a whole."""
        return self.get(path, _Page[kind]).items  # type: ignore[valid-type]

    @overload
    def change(self, method: str, path: str, kind: type[T], **request: Any) -> T: ...
    @overload
    def change(self, method: str, path: str, kind: None = None, **request: Any) -> None: ...
    def change(self, method: str, path: str, kind: type[T] | None = None, **request: Any) -> T | None:
        """Make a request that changes something, as `ask`; return its answer as an object."""
        body = self.ask(method, path, **request)
        return None if kind is None else self._decoded(body, kind)

    def _decoded(self, body: bytes, kind: type[T]) -> T:
        try:
            return msgspec.json.decode(body, type=kind, dec_hook=_read)
        except msgspec.DecodeError as bad:
            raise stranger(self.url, str(bad)) from bad

    def ask(
        self,
        method: str,
        path: str,
        *,
        parameters: Mapping[str, Any] | None = None,
        json: Any = None,
        content: bytes | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> bytes:
        """Make a request and return the body of the answer; ``json`` is the body of the request as an object."""
        with self._answer(method, path, parameters, json, content, headers or {}) as answer:
            return answer.read()

    # --- streams ---

    @contextmanager
    def stream(self, path: str, *, accept: str, **parameters: Any) -> Iterator[Iterator[bytes]]:
        """Yield the body of the answer in pieces, as they come."""
        with self._answer("GET", path, parameters, None, None, {"Accept": accept}) as answer:
            yield answer.iter_bytes()

    @contextmanager
    def _answer(
        self,
        method: str,
        path: str,
        parameters: Mapping[str, Any] | None,
        json: Any,
        content: bytes | None,
        headers: Mapping[str, str],
    ) -> Iterator[httpx.Response]:
        import httpx

        given = {name: _written(value) for name, value in (parameters or {}).items() if value is not None}
        if json is not None:
            content, headers = msgspec.json.encode(json), {**headers, "Content-Type": "application/json"}
        try:
            with self._http.stream(method, path, params=given, content=content, headers=dict(headers)) as answer:
                if answer.is_error:
                    raise error_of(problem_of(answer.status_code, answer.read()), self.url)
                yield answer
        except httpx.InvalidURL as bad:
            raise InvalidArgumentError(f"the server can't be asked for a name or filter of this length: {bad}") from bad
        except (httpx.TransportError, httpx.StreamError) as lost:
            raise ServerUnreachableError(
                f"the server at {self.url} doesn't answer: {lost or type(lost).__name__}"
            ) from lost


def _written(value: Any) -> str | list[str]:
    """Return a parameter as the server reads it; a list is one that is given several times."""
    if isinstance(value, list):
        return list(map(str, value))
    return str(value).lower() if isinstance(value, bool) else str(value)


def _read(kind: type[Any], value: Any) -> Any:
    """Make what JSON doesn't know."""
    if kind is Path:
        return Path(value)
    raise NotImplementedError(f"no answer holds a {kind.__name__}")
