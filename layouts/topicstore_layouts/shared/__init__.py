"""Parts that several layouts use.

`learned_topics` maps many topics to few streams, `name_table` maps names to numbers, `message_rows` is the
stored form of one message as one value, `topic_parts` remembers the parts of keys that topics determine, and
`latest_positions` remembers the last position of each stream.
"""
