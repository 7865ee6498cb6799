"""What Prometheus is told of a server, a collector a subject, and the series of the last minutes that a page draws.

Everything is read from counters that are there anyway when somebody asks. What is dear to find out is found out so
rarely that it takes a small share of the time (`paced`), and how old it is, is told.
"""
