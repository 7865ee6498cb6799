"""Old generations: they are dropped after a time, or exported as partitioned Parquet and read from there.

`topicstore.lifecycle.export_format` defines the files of an export, `exporting` writes one and checks it row by row,
`archive_slab` reads a generation from it as if it were local, `restoring` returns its rows in their order.
"""
