"""Variants of replays: by order, in pages, by the messages' own times, and explained."""
