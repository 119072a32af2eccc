"""A proxy without a cluster, as a process: `python -m tests.unit.proxy.local_proxy SOCKET [DEVICES [ISLANDS]]`; it ends
with its input, and prints its variables. The client is told of as many islands, all of which are this process.

A program whose name has `broken` in it loses its host; one with `lose` loses the session, as if the controller died.
"""

from __future__ import annotations

import json
import os
import sys


def main(path: str, devices: int = 4, islands: int = 1) -> None:
    os.environ |= {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": str(devices), "JAX_ENABLE_X64": "1", "NPROC": "8"}

    from pathways_ray.proxy.plugin import environment
    from pathways_ray.proxy.server import ProxyServer
    from tests.unit.proxy.local_session import LocalSession

    def opened() -> object:
        session = LocalSession(devices)

        def broken(name: str) -> str:
            if "lose" in name:
                session.end("the controller is gone")
            return "host 0 is gone" if "broken" in name else ""

        session.broken = broken
        return session, session.wholes(islands)

    server = ProxyServer(opened, f"unix:{path}")  # type: ignore[arg-type]
    server.start()
    print(json.dumps({"env": environment(f"grpc://unix:{path}")}), flush=True)
    sys.stdin.read()
    server.stop()


if __name__ == "__main__":
    main(sys.argv[1], *map(int, sys.argv[2:]))
