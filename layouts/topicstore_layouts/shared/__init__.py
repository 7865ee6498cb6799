"""What several layouts are made of.

`learned_topics` turns many topics into few streams, `name_table` turns names into numbers, `message_rows` is the
stored form of one message as one value, `latest_positions` knows up to where each stream has messages.
"""
