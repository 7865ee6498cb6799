"""What becomes of old generations: let go after a time, or exported as partitioned Parquet and read from there.

`topicstore.lifecycle.export_format` says what an export is on disk, `exporting` makes one and checks it row by row,
`archive_slab` reads a generation from it as if it were local, `restoring` gives its rows back in their order.
"""
