"""Messages in formats that other programs read, as the program's commands and the HTTP interface write and read them.

``formats``   messages as JSON lines and as CSV, and the format that a file's name implies
``encoding``  messages as the bytes of a file, piece by piece: JSON lines, CSV, Arrow, Parquet
``text``      text in UTF-8 with or without a byte order mark
``mapping``   the mapping from columns to messages; ``column_values`` converts single values, ``time_units`` times
"""
