"""Costs of a launch beyond this machine: see `benchmark`, and `python -m benchmarks.scale --help`."""
