"""Encrypts payloads when a topicstore database stores them, and decrypts them when it reads them."""

from .sealing import KEY_VARIABLE, DecryptionError, MissingKeyError, new_key

__all__ = ["KEY_VARIABLE", "DecryptionError", "MissingKeyError", "new_key"]
