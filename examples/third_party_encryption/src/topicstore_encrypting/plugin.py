"""The hooks: one on the way in, one on the way out.

Every read, as objects, as Arrow or on the command line, passes `topicstore_iterate`, so this is all.
"""

import attrs
from topicstore import hookimpl
from topicstore.contract.columns import to_iterable

from .sealing import cipher, decrypt, encrypt


@hookimpl
def topicstore_opened(db):
    """Refuse to open without a key, rather than fail at the first message."""
    cipher()


@hookimpl(wrapper=True)
def topicstore_store(request):
    """Encrypt."""
    request.batch = _with_payloads(request.batch, encrypt)
    return (yield)


@hookimpl(wrapper=True)
def topicstore_iterate(request):
    """Decrypt."""
    result = yield
    return attrs.evolve(result, batch=_with_payloads(result.batch, decrypt)) if len(result.batch) else result


def _with_payloads(batch, convert):
    key = cipher()
    rows = zip(to_iterable(batch.payloads), to_iterable(batch.topics), strict=True)
    return batch.replace(payloads=[convert(key, bytes(payload), topic) for payload, topic in rows])
