"""The files of a database besides those of its engines: manifest, lock, recovery points and ballast."""
