"""Workloads, which are TOML files that configure a kind of workload; plugins provide the kinds."""
