"""Measurements of the runtime: `dispatch`, `memory` and `startup`. Each runs as `python -m benchmarks.NAME`."""
