"""Durable queues: bounded, first in, first out, each in a database of its own."""
