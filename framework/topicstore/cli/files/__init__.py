"""Reading messages from files, and writing them to files.

The formats themselves are in `topicstore.files`.

``arrow_mapping`` which columns of a file in Arrow make a message
``rows``       rows that became messages, the bad one that ends them, and prefixes of text
``source``     what every source can; ``text``, ``parquet`` and ``export_source`` are the kinds
``source_detection`` opening a file or a stream, known by its content or by a name
``importing``  the import of one source; ``progress`` is how far it has come, kept in the database
``output``     messages out: to a file, or to a terminal
"""
