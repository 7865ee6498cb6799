"""Workloads: TOML files that configure the kinds of workloads that plugins provide."""
