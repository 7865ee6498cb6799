"""Conversion of errors to problem documents (RFC 9457).

``status`` and ``detail`` are always present. An error of the library has its class name in ``title`` and in ``type``.
Invalid parameters or bodies have ``errors``, each with the place (``key``, ``source``) and a message.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from http import HTTPStatus
from typing import Any

import msgspec
from litestar import Request, Response
from litestar.exceptions import HTTPException, MethodNotAllowedException, NotFoundException

from topicstore.contract import errors
from topicstore.runtime.cancelling import UnwantedError
from topicstore.server.sites import UnknownStorageError

__all__ = ["HANDLERS", "PROBLEM", "document_of", "problem", "status_of"]

PROBLEM = "application/problem+json"
"""The media type of problem documents."""

_NO_ROUTE = (NotFoundException, MethodNotAllowedException)
_FAULT = "the server failed; its log says why"
_log = logging.getLogger("topicstore.server.http")

_STATUS: tuple[tuple[type[Exception], int], ...] = (
    # not found
    (errors.SessionNotFoundError, 404),
    (errors.DatabaseNotFoundError, 404),
    (errors.UnknownSiteError, 404),
    (UnknownStorageError, 404),
    (errors.GenerationDroppedError, 410),
    # an invalid request
    (errors.MessageTooLargeError, 413),
    (errors.InvalidArgumentError, 400),
    (errors.UnknownPluginError, 400),
    # a conflict with the current state
    (errors.SubscriptionClosedError, 409),
    (errors.SessionEndedError, 409),
    (errors.GenerationError, 409),
    (errors.StateConflictError, 409),
    (errors.ReadOnlyDatabaseError, 409),
    (errors.ManifestMismatchError, 409),
    (errors.NotADatabaseError, 409),
    (errors.NewerFormatError, 409),
    (errors.IncompatibleError, 409),
    (errors.UnsupportedError, 409),
    # a temporary failure of the server
    (errors.QuotaExceededError, 507),
    (errors.StorageFullError, 507),
    (errors.RecoverableError, 503),
    (errors.DatabaseClosedError, 503),
    # a failure of the server
    (errors.EngineError, 500),
    (errors.PluginError, 500),
    (errors.BackendUnavailableError, 500),
    (errors.ForkedProcessError, 500),
)
"""Statuses by class of error; the first match applies."""


_TROUBLES = errors.StorageFullError, errors.TooManyOpenFilesError, errors.ShardReadOnlyError
"""Errors that an operator has to resolve."""
_WITHOUT_OWNER = errors.ClusterNotReadyError, errors.ShardElsewhereError, errors.ShardMovedError
"""Errors of a cluster's shard that has another owner, or none. The next request may find the owner."""


def status_of(error: errors.TopicstoreError) -> int:
    """Return the HTTP status for an error of the library."""
    return next((status for kind, status in _STATUS if isinstance(error, kind)), 500)


def problem(
    status: int,
    detail: str,
    *,
    name: str | None = None,
    headers: Mapping[str, str] | None = None,
    more: Mapping[str, Any] | None = None,
) -> Response[bytes]:
    """Return a response with a problem document.

    ``name`` is the class name of an error of the library, ``more`` are further members of the document.
    """
    text = _document(status, detail, name, more)
    return Response(text, status_code=status, media_type=PROBLEM, headers=headers or {})


def document_of(error: Exception) -> bytes:
    """Return the problem document of an error that occurs after the response's status was sent."""
    if isinstance(error, errors.TopicstoreError):
        return _document(status_of(error), str(error), type(error).__name__, None)
    return _document(HTTPStatus.INTERNAL_SERVER_ERROR, _FAULT, None, None)


def _document(status: int, detail: str, name: str | None, more: Mapping[str, Any] | None) -> bytes:
    body = {
        "type": "about:blank" if name is None else f"urn:topicstore:{name}",
        "title": name if name is not None else HTTPStatus(status).phrase,
        "status": int(status),
        "detail": detail,
        **(more or {}),
    }
    return msgspec.json.encode(body, enc_hook=str)


def _of_http(request: Request[Any, Any, Any], error: HTTPException) -> Response[bytes]:
    detail = error.detail
    if detail == HTTPStatus(error.status_code).phrase and isinstance(
        error, (NotFoundException, MethodNotAllowedException)
    ):
        detail = f"there is no {request.method} {request.url.path}; /schema shows what there is"
    extra = [*map(_explained, error.extra)] if isinstance(error.extra, list) else error.extra
    mistakes = {"errors": extra} if extra else None
    return problem(error.status_code, detail, headers=error.headers, more=mistakes)


def _explained(mistake: Any) -> Any:
    """Add a message for a missing parameter, of which Litestar only reports the name."""
    if isinstance(mistake, dict) and mistake.get("message") == repr(mistake.get("key")):
        return {**mistake, "message": "it is missing"}
    return mistake


def _of_topicstore(request: Request[Any, Any, Any], error: errors.TopicstoreError) -> Response[bytes]:
    status = status_of(error)
    if status == HTTPStatus.INTERNAL_SERVER_ERROR:
        _log.error("%s %s failed", request.method, request.url.path, exc_info=error)
    elif isinstance(error, _TROUBLES):
        _log_once(request.app.state.context.logged, error)
    where = None
    if isinstance(error, errors.InvalidMessageError) and error.index is not None:
        where = {"index": error.index, "reason": error.reason}
    headers = {"Retry-After": "1"} if isinstance(error, _WITHOUT_OWNER) else None
    return problem(status, str(error), name=type(error).__name__, headers=headers, more=where)


def _of_elsewhere(request: Request[Any, Any, Any], error: errors.ShardElsewhereError) -> Response[bytes]:
    """Return the response of the shard's owner; the problem if there is none, or if this server is in no cluster."""
    forwarder = request.app.state.context.forwarder
    found = None if forwarder is None else forwarder.answer(request, error)
    return _of_topicstore(request, error) if found is None else found


def _log_once(logged: dict[str, str], error: errors.TopicstoreError) -> None:
    """Log an error that an operator has to resolve, unless the last error of its class had the same text."""
    kind, text = type(error).__name__, str(error)
    if logged.get(kind) != text:
        logged[kind] = text
        _log.warning("requests can't be served: %s", text)


def _of_unwanted(_: Request[Any, Any, Any], error: UnwantedError) -> Response[bytes]:
    """Return a response that is never read, because the client has disconnected."""
    return problem(503, str(error))


def _of_fault(request: Request[Any, Any, Any], error: Exception) -> Response[bytes]:
    _log.error("%s %s could not be served", request.method, request.url.path, exc_info=error)
    return problem(500, _FAULT)


HANDLERS: dict[int | type[Exception], Callable[..., Response[bytes]]] = {
    HTTPException: _of_http,
    errors.ShardElsewhereError: _of_elsewhere,
    errors.TopicstoreError: _of_topicstore,
    UnwantedError: _of_unwanted,
    Exception: _of_fault,
}
"""The exception handlers, which convert exceptions to responses."""
