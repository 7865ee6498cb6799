"""Encrypts payloads on their way into a topicstore database, and decrypts them on their way out."""

from .sealing import KEY_VARIABLE, DecryptionError, MissingKeyError, new_key

__all__ = ["KEY_VARIABLE", "DecryptionError", "MissingKeyError", "new_key"]
