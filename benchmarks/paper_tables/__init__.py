"""The planner beside the papers' tables: see `benchmark`, and `python -m benchmarks.paper_tables --help`."""
