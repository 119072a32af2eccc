"""Many clients on the same devices: see `benchmark`, and `python -m benchmarks.tenants --help`."""
