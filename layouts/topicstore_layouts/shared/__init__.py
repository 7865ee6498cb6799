"""Parts that several layouts use.

`learned_topics` maps many topics to few streams, `name_table` maps names to numbers, `message_rows` is the
stored form of a message as a single value, `topic_parts` caches the parts of keys that depend on the topic only,
and `latest_positions` caches the last position of each stream.
"""
