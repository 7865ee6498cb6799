"""What several layouts are made of.

`learned_topics` turns many topics into few streams, `name_table` turns names into numbers, `message_rows` is the
stored form of one message as one value, `topic_parts` remembers what topics put into keys, and
`latest_positions` up to where each stream has messages.
"""
