"""Durable, bounded, first-in first-out queues, each in a separate database."""
