"""Benchmarks of the runtime and of what is built on it; `registry` lists them, README.md explains them."""
