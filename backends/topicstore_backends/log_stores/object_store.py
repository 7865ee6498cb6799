"""A log store in an object store, through obstore: S3 and compatible stores, Google Cloud Storage, Azure.

Addresses and credentials are obstore's own configuration: the environment variables of the clouds (``AWS_REGION``,
``AWS_ENDPOINT_URL``, ``GOOGLE_SERVICE_ACCOUNT``, ``AZURE_STORAGE_ACCOUNT_NAME``…), roles of machines, and ``config``
among the options.

A store may answer "already exists" to a request that lost a race whose winner then failed (S3's 409). So that answer
doesn't prove that the object exists: the caller must read the object, and create it again if it is absent.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from datetime import timedelta
from typing import Any
from urllib.parse import urlsplit, urlunsplit

import attrs
import obstore
from obstore.exceptions import (
    AlreadyExistsError,
    BaseError,
    PermissionDeniedError,
    PreconditionError,
    UnauthenticatedError,
)
from obstore.store import from_url
from topicstore.contract.errors import InvalidArgumentError, InvalidOptionError
from topicstore.contract.log_store import (
    LogStore,
    LogStoreRefusedError,
    ObjectExistsError,
    ObjectNotFoundError,
    StorageUnavailableError,
    check_name,
)
from topicstore.contract.options import make_options

__all__ = ["ObjectLogStore", "ObjectStoreOptions"]

_CHUNK = 1_000
"""The most names in a list that is yielded: as many as in a page of S3."""
_FAILED = (BaseError, OSError)  # obstore raises Python's own errors for some failures
_REFUSED = (PermissionDeniedError, UnauthenticatedError, PermissionError)
_REFUSAL = re.compile(
    r"status code: (?!408|425|429)4\d\d (?!.*<Code>RequestTimeout<)|incorrectly configured region", re.DOTALL
)
"""Matches the text of an error that a retry can't change, because listings raise no error class of their own for it.

Statuses 408, 425 and 429, and S3's 400 ``RequestTimeout``, come from a busy store, and don't match.
"""
_NO_BUCKET = re.compile("NoSuchBucket|ContainerNotFound|bucket does not exist")
"""Matches the text of a 404 if the bucket or container is missing, and not an object. Of S3, Azure and Google."""


@attrs.frozen
class ObjectStoreOptions:
    """The options of a store."""

    config: dict[str, str] = attrs.field(factory=dict, repr=False)
    """Settings of obstore for this store, such as ``{"endpoint": …, "region": …, "allow_http": "true"}``."""
    timeout: float = attrs.field(default=30.0, validator=attrs.validators.gt(0))
    """The time that one request may take, in seconds."""


class ObjectLogStore(LogStore):
    """A log store of objects below a prefix of a bucket or container."""

    Options = ObjectStoreOptions

    def __init__(self, url: str, options: ObjectStoreOptions) -> None:
        parts = urlsplit(url)
        host = parts.netloc.rpartition("@")[2]
        self._place = urlunsplit((parts.scheme, host, parts.path, "", ""))
        if parts.scheme != "memory" and not host:
            raise InvalidArgumentError(f"the URL of an object store names a bucket, as s3://bucket/prefix, not {url!r}")
        try:
            self._store = from_url(url, **_settings(parts.scheme, options))
        except _FAILED as bad:
            raise InvalidOptionError(f"{self._place}: {_brief(bad)}") from bad

    @classmethod
    def open(cls, url: str, options: Mapping[str, Any]) -> ObjectLogStore:
        """Return the store. No request is sent yet."""
        return cls(url, make_options(urlsplit(url).scheme, cls.Options, options))

    @property
    def place(self) -> str:
        """The URL, without user name, password and query."""
        return self._place

    def create(self, name: str, data: bytes) -> None:
        """Create an object. Raises `ObjectExistsError` if the name is taken."""
        try:
            obstore.put(self._store, check_name(name), data, mode="create", use_multipart=False)
        except (AlreadyExistsError, PreconditionError) as taken:
            raise ObjectExistsError(name, self._place) from taken
        except _FAILED as error:
            raise self._unavailable(error) from error

    def get(self, name: str) -> bytes:
        """Return the content of an object. Raises `ObjectNotFoundError` if there is none."""
        try:
            return bytes(obstore.get(self._store, check_name(name)).bytes())
        except FileNotFoundError as absent:
            if _NO_BUCKET.search(str(absent)):
                raise self._unavailable(absent) from absent
            raise ObjectNotFoundError(name, self._place) from absent
        except _FAILED as error:
            raise self._unavailable(error) from error

    def names(self, prefix: str, after: str = "") -> Iterator[list[str]]:
        """Yield names in order, a page at a time.

        Raises `StorageUnavailableError` for a store that lists names out of order, such as S3 Express One Zone.
        """
        check_name(prefix)
        last = after
        try:
            for page in obstore.list(self._store, prefix, offset=after or None, chunk_size=_CHUNK):
                chunk = [found["path"] for found in page]
                for name in chunk:
                    if name <= last:
                        raise StorageUnavailableError(
                            f"{self._place} lists {name} after {last}; a log needs a store that lists names in order"
                        )
                    last = name
                if chunk:
                    yield chunk
        except _FAILED as error:
            raise self._unavailable(error) from error

    def delete(self, name: str) -> None:
        """Delete an object, if there is one."""
        try:
            obstore.delete(self._store, check_name(name))
        except FileNotFoundError as absent:
            if _NO_BUCKET.search(str(absent)):
                raise self._unavailable(absent) from absent
        except _FAILED as error:
            raise self._unavailable(error) from error

    def _unavailable(self, error: BaseException) -> StorageUnavailableError:
        text = _brief(error)
        refused = isinstance(error, _REFUSED) or _REFUSAL.search(text) or _NO_BUCKET.search(text)
        kind = LogStoreRefusedError if refused else StorageUnavailableError
        return kind(f"{self._place}: {text}; look at the address, the network and the credentials")


def _settings(scheme: str, options: ObjectStoreOptions) -> dict[str, Any]:
    if scheme == "memory":
        return {}
    timeout = timedelta(seconds=options.timeout)
    client = {"timeout": timeout}
    config = dict(options.config)
    if "allow_http" in config:  # a setting of obstore's client, which users expect among the others
        client["allow_http"] = config.pop("allow_http") == "true"  # type: ignore[assignment]
    return {"config": config, "client_options": client, "retry_config": {"retry_timeout": timeout}}


def _brief(error: BaseException) -> str:
    """Return an error's message without obstore's debug output."""
    return " ".join(str(error).partition("\n\nDebug source")[0].split())
