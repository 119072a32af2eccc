"""A host as a Ray actor: one process that owns some devices and runs JAX.

Ray restarts the process when it dies (`max_restarts`); the constructor then joins again, under the next epoch.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import threading

import msgspec
import ray

from pathways_ray.transport.messages import HostInfo, JoinReply, encode


def pool_threads(devices: int) -> int:
    """Threads of XLA's CPU pool for a host with `devices` virtual devices; 0 leaves XLA's own choice.

    A collective holds one thread per device until all have arrived, so a pool no larger than the cores deadlocks as
    soon as devices outnumber them. Twice the devices leaves threads for what runs beside a collective. A single device
    needs none of it, and a larger pool than cores costs compute time.
    """
    return max(8, 2 * devices) if devices > 1 else 0


class HostExecutor:
    """One for a host. Methods answer Ray's calls; the work happens in threads (see `dispatcher`)."""

    def __init__(
        self, resource_manager: str, host: int, island: int, devices: int, platform: str, bind: str, fusion: bool
    ) -> None:
        self.host, self.island, self.bind = host, island, bind
        self.resource_manager = ray.get_actor(resource_manager)
        _configure(devices, platform)
        self._start(devices, platform, fusion)

    def _start(self, devices: int, platform: str, fusion: bool) -> None:
        # Imported here, after the environment is set: XLA reads it once, when it starts.
        import jax

        from pathways_ray.executor.compile import Compiler
        from pathways_ray.executor.data_server import DataServer
        from pathways_ray.executor.device_transfer import DeviceTransfer
        from pathways_ray.executor.dispatcher import Dispatcher
        from pathways_ray.executor.store import BufferStore
        from pathways_ray.transport import streams

        local = jax.local_devices()
        if len(local) < devices:
            raise RuntimeError(f"host {self.host} was to have {devices} devices; JAX sees {len(local)}: {local}")
        node = ray.get_runtime_context().get_node_id()
        info = HostInfo(self.host, self.island, platform, devices, node, os.getpid())
        joined = ray.get(self.resource_manager.join.remote(encode(info)))
        reply = msgspec.msgpack.decode(joined, type=JoinReply)
        _, link_secret = ray.get(self.resource_manager.secrets.remote())
        self.epoch = reply.epoch
        self.store = BufferStore()
        compiler = Compiler(self.host, local[:devices])
        transfer = DeviceTransfer(self.host, local[0].client, self.bind)
        self.outbox = streams.ThreadOutbox(lambda: self.dispatcher.under_way())
        self.dispatcher = Dispatcher(self.host, compiler, self.store, transfer, self.outbox.send, fusion)

        def token_of(session: int) -> str:
            return hmac.new(reply.data_secret.encode(), str(session).encode(), hashlib.sha256).hexdigest()

        self.data = DataServer(self.host, compiler, self.store, token_of, self.bind)
        self._link(reply.scheduler_address, link_secret, transfer.address, devices)

    def _link(self, address: str, secret: str, transfer_address: str, devices: int) -> None:
        from pathways_ray.executor.dispatcher import heartbeat
        from pathways_ray.transport import streams
        from pathways_ray.transport.messages import TO_HOST, Heartbeat, HostUp

        self.outbox.send(HostUp(self.host, self.epoch, transfer_address, self.data.address, devices, os.getpid()))
        channel = streams.channel(address)
        call = streams.stream_call(channel, streams.HOST_STREAM, self.outbox, {"authorization": secret})

        def dispatch() -> None:
            try:
                for data in call:
                    self.dispatcher.handle_batch(TO_HOST.decode_batch(data))
            except Exception as error:
                print(f"host {self.host}: the scheduler's stream ended: {error}", flush=True)
            # Without its scheduler a host must not go on: its queue would be nobody's. Ray starts it anew.
            os._exit(1)

        threading.Thread(target=dispatch, name="dispatch", daemon=True).start()
        threading.Thread(target=heartbeat, args=(self.outbox.send, Heartbeat(self.host)), daemon=True).start()

    def ready(self) -> int:
        """The epoch; answers once the constructor is through."""
        return self.epoch

    def statistics(self) -> dict[str, int]:
        """Live entries of this host's tables."""
        return {
            "pid": os.getpid(),
            "buffers": self.store.count(),
            "programs": len(self.dispatcher.programs),
            "active": len(self.dispatcher.active),
        }


def _configure(devices: int, platform: str) -> None:
    """Sets what XLA and JAX read at start."""
    if platform == "cpu":
        os.environ["JAX_PLATFORMS"] = "cpu"
        os.environ["JAX_NUM_CPU_DEVICES"] = str(devices)
        threads = pool_threads(devices)
        if threads:
            os.environ["NPROC"] = str(threads)
    else:
        os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    # Programs carry their own types; without this JAX would narrow 64-bit arrays on their way in.
    os.environ["JAX_ENABLE_X64"] = "1"
