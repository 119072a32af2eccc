"""Fixed limits of the runtime, each with its reason."""

MAX_NODES = 8192
"""Nodes in a program after transfers were inserted: 13 bits of a transfer id name the bundle of edges."""

MAX_HOSTS = 4096
"""Hosts in a cluster: 12 bits of a transfer id name the receiving host."""

MAX_ISLAND_HOSTS = 512
"""Hosts of one island: they form one JAX group, whose members find each other one by one."""

MAX_HOST_DEVICES = 4096
"""Devices of one host, far more than machines have: those of CPU hosts are virtual, and each takes memory and time."""

MAX_CONSTANT_BYTES = 64 << 20
"""Constants captured by one function or program: they are copied into the compiled program on every device."""

MAX_HOST_FUNCTION_BYTES = 16 << 20
"""A host function, pickled with what it uses: it travels with its program, and is kept in each process that runs it."""

MAX_PROGRAM_BYTES = 128 << 20
"""All functions of a program, exported: they travel in one message."""

MAX_PLAN_BYTES = 32 << 20
"""The plan of a program for one island, names included: it travels with the functions, and names stand in it twice."""

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

LINES_AS_ONE_NODE = 4
"""Lines (functions of plain arithmetic on one array) that count as one of these: XLA makes one kernel of many."""

MAX_FUSED_PARTS = 512
"""Nodes composed into one XLA computation, those that repeat the one before them included."""

MAX_LOOP_DEPTH = 4
"""Loops inside loops of one XLA computation: passes and the compiler recurse into them."""

MAX_FUSED_US = 5_000
"""Estimated microseconds of nodes composed into one XLA computation: tenants interleave between computations."""

LAUNCH_LIMIT_S = 60.0
"""Seconds for which a launch may keep its devices, unless operator or tenant have another limit; then its island is
restarted, since devices stop no work. One launch is a step of training, or some; not an hour of it."""

MAX_REMEMBERED_UPLOADS = 4096
"""Uploads of which a host says again that it has them when it comes to another scheduler."""

HOST_ABSENCE_LIMIT_S = 20.0
"""A launch, a put and a fetch wait this long for a lost host's successor before they fail."""

ORPHAN_LIMIT_S = 30.0
"""A host that has lost its scheduler goes on with what it holds, and looks for the successor, for this long."""

RESUME_LIMIT_S = 30.0
"""A session whose client has lost the controller may come back within this time from when its successor knows what
there is; the client looks for the successor for this long too, and a start beside."""

LOST_AFTER_S = 120.0
"""An island of which a host is missing for this long counts as lost: its machine takes no longer to boot again."""

COMPILE_LIMIT_S = 120.0
"""Seconds for which a host may compile one program; then its island is restarted, since nothing stops a compiler."""

COMPILE_WORKERS = 2
"""Programs that a host compiles at a time: a long one does not hold up all others."""

DEFAULT_TIMEOUT_S = 60.0
"""Limit of a control call when the caller names none."""

MAX_SESSIONS = 1024
"""Sessions of one tenant at a time: each has a stream and tables."""

MAX_SESSION_FUNCTION_BYTES = 1 << 30
"""Exported functions that one session has sent, and the plans of its programs: the controller keeps them until the
session drops the last program that names them."""

MAX_TENANT_FUNCTION_BYTES = 4 << 30
"""Exported functions of all sessions of one tenant, each counted once."""

MAX_PROGRAMS = 65536
"""Programs that one session has registered: the controller keeps their plans, hosts what they compiled."""

MAX_REFERENCES = 1 << 19
"""Inputs, outputs and donated inputs of all nodes of a program together, and the parts of their recipes, once for each
node that runs them: what looks at each of them stays quick."""

MAX_RESULTS = 8192
"""Results of a program: the controller has an entry for each of them, for every launch."""

MAX_GRAPH_BYTES = 32 << 20
"""A graph in a message, without its functions. One of `MAX_NODES` nodes has about 3 MiB."""

MAX_SLICES = 256
"""Slices of one session at a time, and slices that a program names: programs and status list them."""

MAX_PLACES = 4096
"""Slices of one session, with released ones that its buffers and programs name, which may outlive them."""

MAX_SESSION_BUFFERS = 1 << 16
"""Buffers of one session. The controller keeps up to 700 bytes for each, and lets go of them in 30 ms when it ends."""

MAX_BUFFERS = 1 << 20
"""Buffers of all sessions together."""

MIN_BUFFER_BYTES = 4096
"""The least that a buffer counts against a quota of bytes, at the controller and at hosts: an empty array costs as much
as a small one, some kilobytes of a host."""

MAX_CLIENT_BATCH_BYTES = 8 << 20
"""A batch from a client, unless it is one program. Clients close theirs when it reaches this size
(`batcher.MAX_BATCH_BYTES`), so a longer one comes from somebody else's code; to decode it takes 0.1 s,
and up to 0.3 s where all of it is small numbers, each a byte there and eight here."""

MAX_CLIENT_BATCH_MESSAGES = 4096
"""Messages in one batch from a client, for the same reason (`batcher.MAX_MESSAGES`)."""

MAX_CALLS = 16
"""Calls of one session that wait for their reply."""

MAX_TENANT_CALLS = 128
"""Calls of one tenant without a session: all its clients may start at once."""

MAX_UPLOAD_BYTES = 64 << 30
"""Arrays of one tenant on their way to one host: it allocates them before their bytes come."""

MAX_SIBLINGS = 255
"""Small results of a launch that come along with one that was asked for, and results that a question for one waits for
besides."""

MAX_SIBLINGS_BYTES = 1 << 16
"""All results that come along with one that was asked for."""

MAX_FETCHED_SHARDS = 4096
"""Shards that one fetch asks a host for: no host has more devices. A fetch that waits is kept with their numbers."""

MAX_REQUESTS = 4096
"""Puts and fetches of one data stream without an answer."""

MAX_DIMENSIONS = 32
"""Dimensions of an uploaded array: NumPy has 64 at most, and tools between here and there fewer."""

MAX_PART_DEVICES = 4096
"""Devices of a slice that is a part of another one: the request names each of them."""

MAX_OPERATIONS = 1 << 18
"""Operations in one exported function: XLA's time and memory grow with them."""

MAX_TENSOR_BYTES = 1 << 44
"""One array, and one value inside an exported function: beyond it, sizes would overflow further down."""

DATA_SILENCE_S = 60.0
"""A data stream is given up when its other end is silent for this long. That is long, since a host may be copying and
a client be busy; the controller reports sessions and hosts that have ended."""

LINK_SILENCE_S = 60.0
"""The same for a client's direct link to the controller: the keepalive stream beside it shows a lost client."""

MAX_PRIORITY = 100
"""Levels above and below 0 that the priority of a launch may have: seconds for which others may pass it, see
`scheduler.priorities`."""

MAX_BACKLOG_CALLS = 8192
"""Calls of one session that wait at the controller; beyond them nothing more is read from it."""

MAX_BACKLOG_BYTES = 256 << 20
"""Values that these carry, for the same reason."""

MAX_BACKLOG = 8192
"""Messages that wait for one client to read them; meanwhile nothing more is read from it."""

MAX_EARLY_BYTES = 1 << 20
"""Results of a launch that a host may make before there is known to be room for them, for a few launches at a time."""

MAX_KEPT_BYTES = MAX_EARLY_BYTES
"""Donated arguments of a program keep their memory until a launch is over where they have no more than this together,
on all devices: so the launch may begin early."""

MAX_EARLY_TEMPORARY_BYTES = 64 << 20
"""What such a launch takes inside on each device, where one computes at a time."""

MAX_COVERED = 128
"""Such launches that leave as one."""

MAX_DEVICE_COMPUTATIONS = 28
"""Computations on one device that may be with the hosts, unless one launch has more. From 32 on, XLA's CPU client has
the thread wait that enqueues for all devices of its host: behind a loop without end, a host would stand still."""

MAX_SERVED = 64
"""Results of a call that its host serves: each is a question of its own."""

MAX_SERVED_BYTES = 128 << 10
"""All of them together. Up to 120 KiB come by a local socket, where there is one."""

MAX_WHOLE_BYTES = 64 << 10
"""An array that is uploaded in one message, and waited for, where its client waits for each value."""

MAX_INLINE_BYTES = 128 << 10
"""Values that a launch carries, where its client hands it to its host: they need not be sent once the host has them."""

MAX_SENT_INLINE_BYTES = 32 << 10
"""Values that a client has other launches carry: no more than the numbers of `MAX_NODES` arguments take, so launches
are not longer."""

MAX_INLINE = 256
"""The same, as a number of values."""
