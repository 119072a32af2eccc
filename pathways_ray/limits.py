"""Fixed limits of the runtime, each with its reason."""

MAX_NODES = 8192
"""Nodes in a program after transfers were inserted: 13 bits of a transfer id name the edge."""

MAX_HOSTS = 4096
"""Hosts in a cluster: 12 bits of a transfer id name the receiving host."""

MAX_CONSTANT_BYTES = 64 << 20
"""Constants captured by one function or program: they are copied into the compiled program on every device."""

MAX_PROGRAM_BYTES = 128 << 20
"""All functions of a program, exported: they travel in one message."""

MAX_MESSAGE_BYTES = 256 << 20
"""One gRPC message: a program with all its functions; arrays are cut into parts long before."""

PART_BYTES = 4 << 20
"""Arrays cross the wire in parts of this size, so that a big array does not hold up a small one."""

MAX_LAUNCHES_IN_FLIGHT = 1024
"""Launches of one session without an outcome; a further call waits."""

ISLAND_WINDOW = 128
"""Launches of one island handed to its hosts without a completion: PJRT itself would run ahead without bound."""

MAX_FUSED_NODES = 32
"""Nodes composed into one XLA computation: compile time grows with it, and tenants interleave between computations."""

DEFAULT_TIMEOUT_S = 60.0
"""Limit of a control call when the caller names none."""
