"""Replays: their order, pages, times of messages, following, and what explains them."""
