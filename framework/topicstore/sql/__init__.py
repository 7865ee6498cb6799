"""SQL over a database: `statements` runs a statement, over the tables that `messages` and the counts provide."""
