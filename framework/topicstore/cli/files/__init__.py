"""Importing messages from files, and writing them to files or the terminal.

The formats themselves are in `topicstore.files`.

``arrow_mapping`` the conversion of Arrow columns to columns of messages
``rows``       rows converted to messages, the error for a bad row, and digests of a source's first rows
``source``     the interface of sources; ``text``, ``parquet`` and ``export_source`` implement it
``source_detection`` opening a file or a stream as a source, and identifying it by its content or by a name
``importing``  the import of one source; ``progress`` keeps its progress in the database
``output``     writing messages to a file or to a terminal
"""
