"""Counts of messages by topic, client id and time, and the lag of readers."""
