"""JAX's own tests through a proxy, beside the same tests on plain CPU devices: `python -m tests.jax_suite --help`."""
