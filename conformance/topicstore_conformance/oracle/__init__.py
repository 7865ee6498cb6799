"""What is right: a model of the database, the comparison with it, and what is drawn to be stored and asked for."""
