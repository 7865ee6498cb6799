"""What is stored and asked: workloads as TOML files, over kinds of workloads that plugins bring."""
