"""TensorFlow 1: a client session over gRPC, one server process for each host, a graph for each mode.

    opbyop-wait    a graph of one computation, run once per computation through `make_callable`; a run returns when done
    chained        a graph of 128 computations
    fused          a graph with a `while_loop` of 128 computations, the nearest there is to one node that holds them

Devices are CPU devices of the servers. The all-reduce is what the graph says: every device's value goes to the first
device, which sends the mean back. Between two computations stands a barrier, as in the paper: a node on the first
device on which all of the next computation depends. The session's master is in the first host's server.
"""

import json
import os
import subprocess
import sys
from typing import Any

from benchmarks.peers.jax_host import free_address
from benchmarks.peers.protocol import ALLREDUCE, CHAIN, NOOP, START, System, for_both_payloads, serve

PAYLOADS = {ALLREDUCE: "TensorFlow add_n on the first device, through its rendezvous", NOOP: "TensorFlow v + 1"}


def config(v1: Any, devices: int, threads: int) -> Any:
    """For servers and client. No rewriting of graphs: it would fold what is to be measured."""
    made = v1.ConfigProto(device_count={"CPU": devices}, inter_op_parallelism_threads=threads)
    made.intra_op_parallelism_threads = 1  # there is nothing in a scalar to share out
    made.graph_options.optimizer_options.opt_level = -1
    made.graph_options.rewrite_options.disable_meta_optimizer = True
    return made


def serve_host(hosts: list[str], host: int, devices: int, threads: int) -> None:
    """Body of a server process; does not return."""
    import tensorflow.compat.v1 as v1

    cluster = v1.train.ClusterSpec({"worker": hosts})
    server = v1.train.Server(cluster, "worker", host, config=config(v1, devices, threads))
    print("up", flush=True)
    server.join()


class Tf1(System):
    packages = ("tensorflow-cpu", "numpy")
    payloads = PAYLOADS
    modes = for_both_payloads("opbyop-wait", "chained", "fused")

    def configure(self, hosts: int, devices: int) -> None:
        import tensorflow.compat.v1 as v1

        v1.disable_eager_execution()
        v1.disable_control_flow_v2()
        self._v1, self._devices = v1, devices
        self._threads = int(os.environ.get("NPROC", 0))  # 0: one for each core
        addresses = [free_address() for _ in range(hosts)]
        arguments = [json.dumps([addresses, host, devices, self._threads]) for host in range(hosts)]
        command = [sys.executable, "-m", "benchmarks.peers.tf1_sessions", "--server"]
        self._servers = [subprocess.Popen([*command, argument], stdout=subprocess.PIPE) for argument in arguments]
        for server in self._servers:
            if server.stdout is None or not server.stdout.readline():  # or the session would wait for it for ever
                raise RuntimeError("a TensorFlow server ended before it was up")
        self._target = f"grpc://{addresses[0]}"
        self._where = [f"/job:worker/task:{host}/device:CPU:{k}" for host in range(hosts) for k in range(devices)]
        self._sessions: dict[tuple[str, str], tuple[Any, Any, Any, Any]] = {}

    def _session(self, mode: str, payload: str) -> tuple[Any, Any, Any, Any]:
        """A session with a graph of its own, and callables of it: restart, one call, read."""
        v1 = self._v1
        with v1.Graph().as_default() as graph:
            variables = []
            for k, where in enumerate(self._where):
                with v1.device(where):
                    variables.append(v1.get_variable(f"v{k}", [], v1.float32, use_resource=True, trainable=False))
            restart = [self._assign(k, variable, START) for k, variable in enumerate(variables)]
            with v1.control_dependencies(restart):
                restart = v1.no_op()
            call = self._loop(variables, payload) if mode == "fused" else self._chain(variables, payload, mode)
            read = [variable.read_value() for variable in variables]
        session = v1.Session(self._target, graph, config(v1, self._devices, self._threads))
        return session, *(session.make_callable(each) for each in (restart, call, read))

    def _assign(self, k: int, variable: Any, value: Any) -> Any:
        with self._v1.device(self._where[k]):
            return variable.assign(value, read_value=False)

    def _computation(self, values: list[Any], payload: str) -> list[Any]:
        """The values of all devices after one computation."""
        v1, values = self._v1, list(values)
        if payload != NOOP:
            with v1.device(self._where[0]):
                values = [v1.add_n(values) / len(values)] * len(values)
        changed = []
        for where, value in zip(self._where, values, strict=True):
            with v1.device(where):
                changed.append(value + 1.0)
        return changed

    def _chain(self, variables: list[Any], payload: str, mode: str) -> Any:
        """One computation, or 128 of them; returns the last barrier."""
        v1 = self._v1
        barrier = None
        for _ in range(CHAIN if mode == "chained" else 1):
            with v1.control_dependencies([] if barrier is None else [barrier]):
                values = []
                for where, variable in zip(self._where, variables, strict=True):
                    with v1.device(where):
                        values.append(variable.read_value())
                changed = self._computation(values, payload)
                done = [self._assign(k, variables[k], value) for k, value in enumerate(changed)]
            with v1.device(self._where[0]), v1.control_dependencies(done):
                barrier = v1.no_op()
        return barrier

    def _loop(self, variables: list[Any], payload: str) -> Any:
        v1 = self._v1

        def body(k: Any, *values: Any) -> list[Any]:
            with v1.device(self._where[0]):
                k = k + 1
            return [k, *self._computation(list(values), payload)]

        with v1.device(self._where[0]):
            first = v1.constant(0)
        start = [variable.read_value() for variable in variables]
        _, *last = v1.while_loop(lambda k, *_: k < CHAIN, body, [first, *start], parallel_iterations=1)
        with v1.control_dependencies([self._assign(k, variables[k], value) for k, value in enumerate(last)]):
            return v1.no_op()

    def prepare(self, mode: str, payload: str, count: int) -> None:
        key = mode, payload
        if key not in self._sessions:
            self._sessions[key] = self._session(mode, payload)
            self._sessions[key][1]()
            self._sessions[key][2]()  # servers take their part of the graph at its first run
        self._sessions[key][1]()

    def run(self, mode: str, payload: str, count: int) -> list[float]:
        _, _, call, read = self._sessions[mode, payload]
        for _ in range(count if mode == "opbyop-wait" else count // CHAIN):
            call()
        return read()

    def close(self) -> None:
        for server in self._servers:
            server.kill()  # a server never ends by itself
            server.wait()


if __name__ == "__main__":
    if sys.argv[1:2] == ["--server"]:
        serve_host(*json.loads(sys.argv[2]))
    else:
        serve(Tf1())
