"""`Connection`: HTTP requests to one server, with errors as exceptions and responses as the library's own objects."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Generic, Self, TypeVar, overload

import msgspec

from topicstore.contract.errors import BackendUnavailableError, InvalidArgumentError, ShardElsewhereError

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
"""The connect timeout in seconds. There is no timeout for responses."""
_PAGE = 10_000
"""The maximum number of items in a page."""


class _Page(msgspec.Struct, Generic[T]):
    items: list[T]
    next: Any = None
    missing: dict[int, str] = {}
    """The shards of a cluster that the page lacks, and why."""


class Connection:
    """An HTTP client for one server; `close` it, or use it in a ``with`` statement.

    url:    the beginning of the server's URLs, such as ``http://127.0.0.1:18083``.
    token:  the bearer token sent with each request; None for none.
    verify: the TLS certificates to trust, in the form that ``httpx.Client`` takes.
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
            verify=verify if self.url.startswith("https:") else False,  # loading trusted certificates is slow
            timeout=httpx.Timeout(None, connect=_PATIENCE),
            trust_env=False,
        )

    def close(self) -> None:
        """Close the HTTP connections."""
        self._http.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # --- whole responses ---

    def get(self, path: str, kind: type[T], **parameters: Any) -> T:
        """Return the resource at a path, decoded as ``kind``. Parameters that are None are omitted.

        Raises the server's error; see `topicstore.client.problems`.
        """
        return self._decoded(self.ask("GET", path, parameters=parameters), kind)

    def pages(self, path: str, kind: type[T], **parameters: Any) -> Iterator[T]:
        """Yield the items of all pages at a path. Raises `ShardElsewhereError` if they lack a shard of a cluster."""
        after: Any = None
        while True:
            page = self.get(path, _Page[kind], limit=_PAGE, after=after, **parameters)  # type: ignore[valid-type]
            for shard, why in page.missing.items():
                raise ShardElsewhereError(f"{path} lacks shard {shard}: {why}", shard)
            yield from page.items
            after = page.next
            if after is None:
                return

    def items(self, path: str, kind: type[T]) -> list[T]:
        """Return the items of a list that the server returns as a single page."""
        return self.get(path, _Page[kind]).items  # type: ignore[valid-type]

    @overload
    def change(self, method: str, path: str, kind: type[T], **request: Any) -> T: ...
    @overload
    def change(self, method: str, path: str, kind: None = None, **request: Any) -> None: ...
    def change(self, method: str, path: str, kind: type[T] | None = None, **request: Any) -> T | None:
        """Make a request with a method such as POST, PUT or DELETE, as `ask` does; decode its response as ``kind``."""
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
        """Make a request and return the body of the response.

        The body of the request is either ``json``, an object to be encoded, or the bytes ``content``.
        """
        with self._answer(method, path, parameters, json, content, headers or {}) as answer:
            return answer.read()

    # --- streams ---

    @contextmanager
    def stream(self, path: str, *, accept: str, **parameters: Any) -> Iterator[Iterator[bytes]]:
        """Make a GET request, and yield the chunks of the response's body as they arrive."""
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
    """Return a query parameter in the server's notation; a list repeats the parameter."""
    if isinstance(value, list):
        return list(map(str, value))
    return str(value).lower() if isinstance(value, bool) else str(value)


def _read(kind: type[Any], value: Any) -> Any:
    """Convert a JSON value to a type that JSON doesn't have (a msgspec ``dec_hook``)."""
    if kind is Path:
        return Path(value)
    raise NotImplementedError(f"no answer holds a {kind.__name__}")
