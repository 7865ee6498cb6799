"""The hooks of the plugin.

Every read, as objects, as Arrow or on the command line, passes the hook `topicstore_read`, so no other hook for reading
is needed.
"""

import attrs
from topicstore import hookimpl
from topicstore.contract.columns import to_iterable

from .sealing import KEY_VARIABLE, cipher, decrypt, encrypt


@hookimpl
def topicstore_variables():
    """Return the environment variables of the plugin; topicstore warns of unknown ones with its prefix."""
    return [KEY_VARIABLE]


@hookimpl
def topicstore_opened(db):
    """Raise `MissingKeyError` when a database is opened without a key, instead of at the first message."""
    cipher()


@hookimpl(wrapper=True)
def topicstore_store(request):
    """Encrypt the payloads of a batch before it is stored."""
    request.batch = _with_payloads(request.batch, encrypt)
    return (yield)


@hookimpl(wrapper=True)
def topicstore_read(request):
    """Decrypt the payloads of a batch that was read."""
    result = yield
    return attrs.evolve(result, batch=_with_payloads(result.batch, decrypt)) if len(result.batch) else result


def _with_payloads(batch, convert):
    key = cipher()
    rows = zip(to_iterable(batch.payloads), to_iterable(batch.topics), strict=True)
    return batch.replace(payloads=[convert(key, bytes(payload), topic) for payload, topic in rows])
