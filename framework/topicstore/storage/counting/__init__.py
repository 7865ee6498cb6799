"""Counts of messages by topic, client id and time, and how far readers are behind."""
