"""Every message on the wire, as typed structs. One definition is both the data type and the schema.

Messages travel as MessagePack lists of tagged arrays: `[tag, field, field, …]`. Decoding checks every type, so that a
malformed message is a `WireError` before any of it is used, and nothing is ever unpickled. A field may be added at the
end (older readers ignore it); anything else raises `VERSION`, which both ends compare when a session opens.

The life of a launch, in messages: `Launch` (client → controller), `IslandLaunch` (controller → scheduler → hosts),
`Done` (hosts → scheduler → controller), `Completed` (controller → client); on the way back `IslandLaunchFailed` and
`LaunchFailed` may stand in their place.
"""

from pathways_ray.transport.client_messages import *
from pathways_ray.transport.data_messages import *
from pathways_ray.transport.early_messages import *
from pathways_ray.transport.holding_messages import *
from pathways_ray.transport.island_messages import *
from pathways_ray.transport.joining import *
from pathways_ray.transport.launch_messages import *
from pathways_ray.transport.message import *
from pathways_ray.transport.operator_messages import *
from pathways_ray.transport.preemption_messages import *
from pathways_ray.transport.resume_messages import *
