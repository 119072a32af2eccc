"""Plain JAX behind processes that do no work: what a message for each computation costs before any controller decides.

The hosts are those of `jax_multicontroller`, but each enqueues a computation when 40 bytes say so. Nothing is checked,
ordered, freed or reported. What is missing to JAX without a controller is the floor of a single one on this machine.

    opbyop         40 bytes for each computation through two relays, as through controller and scheduler, to all hosts
    opbyop-wait    straight to all hosts; each answers when its value is there
"""

import socket
import threading
from collections.abc import Iterator, Sequence
from typing import Any

from benchmarks.peers.jax_multicontroller import HostProcess, MultiController
from benchmarks.peers.protocol import for_both_payloads, serve
from benchmarks.workers import Worker, answers

BYTES = 40  # of a message, as in `benchmarks.relays`
RELAYS = 2
ANSWER_LIMIT_S = 20.0  # of one computation; a host that fails, or waits for one that has ended, does not answer


def tuned(connection: socket.socket) -> socket.socket:
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return connection


def connected(port: int) -> socket.socket:
    return tuned(socket.create_connection(("127.0.0.1", port)))


class Relay:
    """The object in a relay's process: all that comes goes to every process behind it."""

    def __init__(self, behind: list[int]) -> None:
        self._behind = [connected(port) for port in behind]
        self._server = socket.create_server(("127.0.0.1", 0))
        threading.Thread(target=self._forward, daemon=True).start()

    def port(self) -> int:
        return int(self._server.getsockname()[1])

    def _forward(self) -> None:
        before = tuned(self._server.accept()[0])
        try:
            while data := before.recv(1 << 16):
                for each in self._behind:
                    each.sendall(data)
        finally:
            for each in self._behind:
                each.close()


class ToldHost(HostProcess):
    """The object in a host process, which two processes tell what to do: the last relay, and the client."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._server = socket.create_server(("127.0.0.1", 0))

    def port(self) -> int:
        return int(self._server.getsockname()[1])

    def accept(self) -> None:
        """Takes both connections: the relay's is the first."""
        self._relay, self._client = (tuned(self._server.accept()[0]) for _ in range(2))

    def run(self, mode: str, payload: str, count: int) -> list[float]:
        waits = mode == "opbyop-wait"
        for messages in self._messages(self._client if waits else self._relay, count):
            self.steps(payload, messages)
            if waits and messages:
                self.wait()
                self._client.sendall(bytes(BYTES))
        found: list[float] = self.fetch().tolist()
        return found

    @staticmethod
    def _messages(connection: socket.socket, count: int) -> Iterator[int]:
        """The messages that each read completes, until there were so many."""
        got = 0
        while got < count * BYTES:
            data = connection.recv(1 << 16)
            if not data:
                raise ConnectionError("the process before this one has ended")
            yield (got % BYTES + len(data)) // BYTES
            got += len(data)


class BehindRelays(MultiController):
    modes = for_both_payloads("opbyop", "opbyop-wait")
    host = ToldHost
    _relays: Sequence[Worker] = ()

    def configure(self, hosts: int, devices: int) -> None:
        super().configure(hosts, devices)
        behind = ports = self._ask("port")
        for _ in range(RELAYS):
            relay = Worker(Relay, behind)
            self._relays = [*self._relays, relay]
            relay.answer()
            behind = [relay.ask("port")]
        self._first = connected(*behind)
        self._direct = [connected(port) for port in ports]
        for direct in self._direct:
            direct.settimeout(ANSWER_LIMIT_S)
        self._ask("accept")

    def run(self, mode: str, payload: str, count: int) -> list[float]:
        """Runs the computations. Ends this process where another one fails or has ended: those that are left may wait
        for it without end, as in `MultiController`."""
        try:
            for host in self._hosts:
                host.tell("run", mode, payload, count)
            for _ in range(count):
                if mode == "opbyop-wait":
                    self._told_and_done()
                else:
                    self._first.sendall(bytes(BYTES))
            return [value for part in answers(self._hosts) for value in part]
        except (OSError, RuntimeError) as error:
            raise SystemExit(str(error)) from None

    def _told_and_done(self) -> None:
        """Tells all hosts, and waits for all."""
        for host in self._direct:
            host.sendall(bytes(BYTES))
        for host in self._direct:
            left = BYTES
            while left:
                if not (data := host.recv(left)):
                    raise ConnectionError("a host has ended")
                left -= len(data)

    def close(self) -> None:
        super().close()
        for relay in self._relays:
            relay.kill()


if __name__ == "__main__":
    serve(BehindRelays())
