"""Training in every way that two devices allow: see `benchmark`, and `python -m benchmarks.training --help`."""
