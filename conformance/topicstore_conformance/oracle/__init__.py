"""A model of the database, comparisons of a database with it, and strategies that draw messages and filters."""
