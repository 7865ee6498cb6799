"""Retention and archiving of generations: they are dropped after a time, or exported to partitioned Parquet.

`topicstore.lifecycle.export_format` defines the files of an export, `exporting` writes one and checks it row by row,
`archive_slab` reads a generation from an export as if it were local, `restoring` returns an export's rows in order.
"""
