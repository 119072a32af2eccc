"""Some tests compile for 4 CPU devices of this process."""

import jax

jax.config.update("jax_num_cpu_devices", 8)  # before a backend starts, which no test module does when it is imported
