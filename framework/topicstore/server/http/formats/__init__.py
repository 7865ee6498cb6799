"""Decoding and encoding of messages in the bodies of requests and responses, by media type."""
