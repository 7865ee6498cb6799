"""The files of a database beside its engines: manifest, lock, recovery points, ballast."""
