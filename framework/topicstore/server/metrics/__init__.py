"""Metrics of a server: collectors for Prometheus, and time series of the last minutes for the web page.

Most values are read from existing counters on request. Expensive values are computed so rarely that they take a small
share of the time (`paced`); their age is reported, too.
"""
