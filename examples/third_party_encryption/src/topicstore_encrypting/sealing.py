"""Encryption with AES-256 in Galois/counter mode, from the package `cryptography`.

Stored form of a payload: 0x01, a nonce of 12 random bytes, the ciphertext, and its tag of 16 bytes. The tag also covers
the topic, so that decryption detects a payload that was moved to another topic. At most 2**32 payloads may be encrypted
with one key (NIST SP 800-38D, 8.3).
"""

import base64
import binascii
import functools
import os

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from topicstore.contract.errors import InvalidOptionError, UnrecoverableError

KEY_VARIABLE = "TOPICSTORE_ENCRYPTION_KEY"
"""The environment variable with the key: 32 bytes in base64."""

_VERSION = b"\x01"
_NONCE_BYTES = 12
_HEAD = len(_VERSION) + _NONCE_BYTES


class MissingKeyError(InvalidOptionError):
    """Raised, before anything is read or stored, if the environment has no key or an invalid one."""


class DecryptionError(UnrecoverableError):
    """Raised if a payload was encrypted with another key, belongs to another topic, or is damaged."""


def new_key():
    """Return a new random key in base64, as a value for the environment variable."""
    return base64.b64encode(AESGCM.generate_key(256)).decode()


def cipher():
    """Return the cipher with the key from the environment. Raises `MissingKeyError`."""
    text = os.environ.get(KEY_VARIABLE, "")
    if not text:
        raise MissingKeyError(f"set {KEY_VARIABLE} to the key, 32 bytes in base64")
    return _cipher(text)


@functools.cache
def _cipher(text):
    try:
        return AESGCM(base64.b64decode(text, validate=True))
    except (binascii.Error, ValueError) as bad:
        raise MissingKeyError(f"{KEY_VARIABLE} is not a key, 32 bytes in base64: {bad}") from bad


def encrypt(with_cipher, payload, topic):
    """Return the stored form of a payload."""
    nonce = os.urandom(_NONCE_BYTES)
    return b"".join((_VERSION, nonce, with_cipher.encrypt(nonce, bytes(payload), topic.encode())))


def decrypt(with_cipher, stored, topic):
    """Return the payload of a stored form. Raises `DecryptionError`."""
    if stored[:1] != _VERSION:
        raise DecryptionError(f"a payload of topic {topic!r} is not encrypted, or by a later version")
    try:
        return with_cipher.decrypt(stored[1:_HEAD], stored[_HEAD:], topic.encode())
    except InvalidTag as bad:
        raise DecryptionError(f"a payload of topic {topic!r} can't be decrypted with this key") from bad
