"""The floor of a round trip: bytes through a chain of relay processes and back, with blocking sockets and nothing else.

A launch goes from the client through controller and scheduler to a host, and its value comes back. Three relays that do
no work are the least that so many processes cost on the machine of the moment.
"""

from __future__ import annotations

import socket
import subprocess
import sys
import time

RELAYS = 3
BYTES = 40

RELAY = """
import socket, sys
def tuned(connection):
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return connection
server = socket.create_server(("127.0.0.1", 0))
print(server.getsockname()[1], flush=True)
before = tuned(server.accept()[0])
after = tuned(socket.create_connection(("127.0.0.1", int(sys.argv[1])))) if sys.argv[1] != "0" else None
while data := before.recv(4096):
    if after is not None:
        after.sendall(data)
        data = after.recv(4096)
    before.sendall(data)
"""


class Relays:
    """A chain of relay processes, the last of which answers."""

    def __init__(self, count: int = RELAYS) -> None:
        self._processes: list[subprocess.Popen[str]] = []
        port = 0
        for _ in range(count):
            process = subprocess.Popen([sys.executable, "-c", RELAY, str(port)], stdout=subprocess.PIPE, text=True)
            self._processes.append(process)
            assert process.stdout is not None
            port = int(process.stdout.readline())
        self._connection = socket.create_connection(("127.0.0.1", port))
        self._connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def round_trip(self) -> float:
        """Seconds until the bytes are back."""
        begun = time.perf_counter()
        self._connection.sendall(bytes(BYTES))
        left = BYTES
        while left:
            if not (data := self._connection.recv(left)):
                raise ConnectionError("a relay has ended")
            left -= len(data)
        return time.perf_counter() - begun

    def close(self) -> None:
        """Ends the processes."""
        self._connection.close()
        for process in reversed(self._processes):
            process.wait(10)
            if process.stdout is not None:
                process.stdout.close()
