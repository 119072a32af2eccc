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
"""Different nodes composed into one XLA computation: compile time grows with it."""

MAX_FUSED_PARTS = 512
"""Nodes composed into one XLA computation, those that repeat the one before them included."""

MAX_LOOP_DEPTH = 4
"""Loops inside loops of one XLA computation: passes and the compiler recurse into them."""

MAX_FUSED_US = 5_000
"""Estimated microseconds of nodes composed into one XLA computation: tenants interleave between computations."""

LAUNCH_LIMIT_S = 60.0
"""Seconds for which a launch may keep its devices, unless operator or tenant have another limit; then its island is
restarted, since devices stop no work. One launch is a step of training, or some; not an hour of it."""

LOST_AFTER_S = 120.0
"""An island of which a host is missing for this long counts as lost: its machine takes no longer to boot again."""

DEFAULT_TIMEOUT_S = 60.0
"""Limit of a control call when the caller names none."""

MAX_SESSIONS = 1024
"""Sessions of one tenant at a time: each has a stream and tables."""

MAX_SESSION_FUNCTION_BYTES = 1 << 30
"""Exported functions that one session has sent: the controller keeps them for programs to come."""

MAX_PROGRAMS = 65536
"""Programs that one session has registered: the controller keeps their plans, hosts what they compiled."""

MAX_REFERENCES = 1 << 18
"""Inputs, outputs and donated inputs of all nodes of a program together: what looks at each of them stays quick."""

MAX_UPLOAD_BYTES = 64 << 30
"""Arrays of one tenant on their way to one host: it allocates them before their bytes come."""

MAX_REQUESTS = 4096
"""Puts and fetches of one data stream without an answer."""

MAX_DIMENSIONS = 32
"""Dimensions of an uploaded array: NumPy has 64 at most, and tools between here and there fewer."""

MAX_OPERATIONS = 1 << 18
"""Operations in one exported function: XLA's time and memory grow with them."""

MAX_TENSOR_BYTES = 1 << 44
"""One value inside an exported function: beyond it, sizes would overflow further down."""

DATA_SILENCE_S = 60.0
"""A data stream is given up when its other end is silent for this long. That is long, since a host may be copying and
a client be busy; the controller reports sessions and hosts that have ended."""

LINK_SILENCE_S = 60.0
"""The same for a client's direct link to the controller: the keepalive stream beside it shows a lost client."""

MAX_BACKLOG = 8192
"""Messages that wait for one client to read them; meanwhile nothing more is read from it."""
