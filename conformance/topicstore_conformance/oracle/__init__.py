"""The oracle: a model of the database, the comparison with it, and strategies that draw messages and filters."""
