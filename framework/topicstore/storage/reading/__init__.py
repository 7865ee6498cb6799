"""Variants of replays: orders, pages, ranges of message times, following, and explanations."""
