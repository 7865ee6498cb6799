"""Messages in formats that other programs read, as the program's commands and the HTTP interface write and read them.

``formats``   messages as JSON lines and as CSV, and which format a file's name tells
``encoding``  messages as the bytes of a file, piece by piece: JSON lines, CSV, Arrow, Parquet
``text``      text in UTF-8 with or without a byte order mark
``mapping``   which columns of a file make a message, and how; ``column_values`` takes single ones, ``time_units`` times
"""
