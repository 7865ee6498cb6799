"""Files that messages come from and go to.

``formats``    messages as JSON lines and as CSV, and which format a file's name tells
``rows``       rows that became messages, the bad one that ends them, and prefixes of text
``source``     what every source can; ``text``, ``parquet`` and ``exported`` are the kinds
``sources``    opening a file or a stream, known by its content or by a name
``importing``  the import of one source; ``progress`` is how far it has come, kept in the database
``writing``    messages out: to a file, or to a terminal
"""
