"""The compiler of plan entries: exported functions composed, lowered for a slice, cached by content."""

from __future__ import annotations

import hashlib
import math
import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import ml_dtypes
import numpy as np
from jax.sharding import Mesh, NamedSharding, SingleDeviceSharding

from pathways_ray.compat import shared_mlir_context
from pathways_ray.errors import CompileError, ProgramRefused
from pathways_ray.executor.compile.agreement import Agreement
from pathways_ray.executor.compile.backend import Function
from pathways_ray.executor.compile.by_device import ByDevice, OverHosts, of_one_device, one_section
from pathways_ray.executor.compile.composition import Calls, composed
from pathways_ray.executor.compile.divisions import module_without_divisions_by_zero, without_divisions_by_zero
from pathways_ray.executor.compile.functions import Called, Read, check_meshes, function_in, lines_among, read
from pathways_ray.executor.compile.pieces import MAX_CHAINED_BYTES, Cut, Placed, packing, unpacking
from pathways_ray.executor.compile.platforms import backend_of
from pathways_ray.executor.compile.sandbox import Sandbox
from pathways_ray.executor.compile.sections import Sections, sections_of, sums_in
from pathways_ray.executor.compile.signatures import check_types
from pathways_ray.executor.compile.whole_modules import Typed, WholeModule
from pathways_ray.executor.run.parts import Keeps
from pathways_ray.ir.graph import Loop, Part, functions_in
from pathways_ray.ir.plan import Edge, Executable, PlacedSlice
from pathways_ray.ir.regions import box_shape
from pathways_ray.ir.types import REPLICATED, ArrayType, Layout, Spec, item_bytes
from pathways_ray.jax_types import partition_spec
from pathways_ray.joint_exports import only_called, read_once
from pathways_ray.transport.messages import encode

MAX_CACHED = 1024
"""Compiled computations kept beyond the programs that use them."""

MAX_CACHED_BYTES = 256 << 20
"""Bytes of the functions that these were made of: each has the constants of its own."""

MAX_EXPORTED_BYTES = 256 << 20
"""Functions kept as they were read, by the bytes of their export; programs to come often have some of them."""


_PACKED = {"int2": 2, "uint2": 2, "int4": 4, "uint4": 4, "float4_e2m1fn": 4}
"""Types of less than a byte, and their bits. JAX does not accept arrays of them in compiled computations (their layouts
are reported as another than was compiled for), so between computations they lie as bytes, as they do in NumPy."""


def dtype_of(name: str) -> np.dtype[Any]:
    """The NumPy dtype in which a logical dtype lies on devices, those of `ml_dtypes` included."""
    return np.dtype(np.uint8 if name in _PACKED else getattr(ml_dtypes, name, None) or name)


def _unpacked(stored: jax.Array, dtype: str) -> jax.Array:
    """An array of the type `dtype_of(dtype)` as one of `dtype`."""
    if dtype not in _PACKED:
        return stored
    return jax.lax.bitcast_convert_type(stored.astype(f"uint{_PACKED[dtype]}"), getattr(ml_dtypes, dtype))


def _packed(value: jax.Array, dtype: str) -> jax.Array:
    """An array of `dtype` as one of the type `dtype_of(dtype)`."""
    if dtype not in _PACKED:
        return value
    return jax.lax.bitcast_convert_type(value, f"uint{_PACKED[dtype]}").astype(np.uint8)


def with_end(run: Function) -> Function:
    """The function with a last output, a scalar that depends on nothing. XLA fills all outputs of a computation at
    once, or none, so it stands for the computation's end."""
    return lambda *given: (*run(*given), jax.numpy.float32(0))


def name_of(executable: Executable) -> str:
    """The names of the functions that are composed into one computation."""
    return " + ".join(dict.fromkeys(part.name for part in functions_in(executable.recipe.parts)))


class Compiler:
    """Turns plan entries into compiled computations on this host's devices. Safe to call from several threads.

    Args:
        devices: this host's devices.
        island: the devices of every host of the island, this one's included; they form one JAX group.
    """

    def __init__(self, host: int, devices: Sequence[jax.Device], island: Mapping[int, Sequence[jax.Device]]) -> None:
        self.host = host
        self.devices = list(devices)
        self.island = island
        self.backend = backend_of(devices[0].platform)
        self.is_busy: Callable[[], bool] = lambda: False
        self.meet: Callable[[bytes, Sequence[int], bool], Agreement | None] = lambda name, hosts, may: None
        """Makes this host's side of a computation on several hosts, by what all have for it, if they `may` exchange
        values, and are of one machine; else None. May wait for them."""
        self.sandbox = Sandbox(host)
        self._exported: OrderedDict[str, tuple[Read, int]] = OrderedDict()
        self._exported_bytes = 0
        self._cache: OrderedDict[bytes, tuple[Any, int]] = OrderedDict()
        self._cached_bytes = 0
        self._costs: weakref.WeakKeyDictionary[Any, Mapping[str, float]] = weakref.WeakKeyDictionary()
        self._lock = threading.Lock()

    def mesh(self, placed: PlacedSlice) -> Mesh:
        """The slice's devices as a mesh; all are on hosts of this island."""
        chosen = [self.island[device.host][device.index] for device in placed.devices]
        grid = np.empty(len(chosen), dtype=object)
        grid[:] = chosen
        return Mesh(grid.reshape(placed.mesh.shape), placed.mesh.axes)

    def sharding(self, placed: PlacedSlice, spec: Spec) -> NamedSharding:
        return NamedSharding(self.mesh(placed), partition_spec(spec))

    def executable(
        self, executable: Executable, placed: PlacedSlice, functions: Mapping[str, bytes], trusted: bool = False
    ) -> Any:
        """The compiled computation of a plan entry.

        Args:
            trusted: whether the operator trusts the client, whose code is then checked for less.

        Raises:
            ProgramRefused: a function does what is not allowed, or is not what the graph says.
            CompileError: XLA, or the export format, refused it.
        """
        parts = list(functions_in(executable.recipe.parts))
        name = name_of(executable)
        key = encode(
            (
                executable.recipe,
                executable.inputs,
                executable.outputs,
                [layout.spec for layout in executable.input_layouts],
                [layout.spec for layout in executable.output_layouts],
                executable.donated,
                (placed.mesh.shape, placed.mesh.axes, placed.devices),
                trusted,
            )
        )

        def make() -> Any:
            # Nothing of a function is read here before the sandbox has read it: malformed ones crash their reader.
            digests = [part.digest for part in parts]
            self.sandbox.check(name, digests, functions, trusted, placed.mesh.size)
            with shared_mlir_context(sum(len(functions[digest]) for digest in set(digests))), read_once():
                calls = {part.function: self._function(part.function, functions) for part in parts}
                check_types(executable, placed.mesh.size, calls)
                check_meshes(placed.mesh, calls)
                return self._compile(executable, placed, calls, hashlib.blake2b(key, digest_size=16).digest())

        # Those that were exported with others, or are formulas, have no constants.
        alone = {part.function for part in parts if "#" not in part.function}
        return self._cached(key, make, name, sum(len(functions.get(one, b"")) for one in alone))

    def _function(self, name: str, functions: Mapping[str, bytes]) -> Called:
        digest, is_member, _ = name.partition("#")
        key = digest + is_member
        with self._lock:
            if found := self._exported.get(key):
                self._exported.move_to_end(key)
        if found is None:
            code = functions[digest]
            found = read(name, code), len(code)
            with self._lock:
                self._exported_bytes += found[1] if key not in self._exported else 0
                self._exported[key] = found
                while self._exported_bytes > MAX_EXPORTED_BYTES:
                    self._exported_bytes -= self._exported.popitem(last=False)[1][1]
        return function_in(found[0], name)

    def _compile(self, executable: Executable, placed: PlacedSlice, calls: Calls, name: bytes = b"") -> Any:
        """Args: name: what all hosts of the slice have for the computation."""
        recipe = executable.recipe
        if placed.mesh.size > 1 and any(part.as_is for part in functions_in(recipe.parts)):
            return self._compile_as_is(executable, placed, calls)

        alone = len(list(functions_in(recipe.parts))) == 1
        lines = lines_among(calls) if self.backend.seals and not alone else frozenset()

        def run_of(calls: Calls) -> Function:
            def run(*stored: jax.Array) -> tuple[jax.Array, ...]:
                inputs = [_unpacked(s, t.dtype) for s, t in zip(stored, executable.inputs, strict=True)]
                made = composed(recipe.parts, recipe.outputs, calls, inputs, lines)
                return tuple(_packed(v, t.dtype) for v, t in zip(made, executable.outputs, strict=True))

            return run

        mesh = self.mesh(placed)
        arguments = self._typed(mesh, executable.inputs, executable.input_layouts)
        outputs = self._typed(mesh, executable.outputs, executable.output_layouts)
        options = self._options(executable, lines)
        here = [self.devices[device.index] for device in placed.devices if device.host == self.host]
        most = self.backend.elements_apart if len(here) > 1 else 0
        if part := of_one_device(executable, calls, mesh, most):
            return ByDevice(one_section(run_of(part), arguments, here[0]), here, outputs, options)
        end = jax.ShapeDtypeStruct((), np.float32, sharding=NamedSharding(mesh, partition_spec(())))

        def lower(function: Function) -> Any:
            jitted = jax.jit(
                function,
                in_shardings=tuple(a.sharding for a in arguments),
                out_shardings=tuple(a.sharding for a in (*outputs, end)),
                donate_argnums=executable.donated,
                keep_unused=True,
            )
            with jax.set_mesh(mesh):
                return without_divisions_by_zero(only_called(jitted.lower(*arguments)))

        run = run_of(calls)
        lowered = lower(with_end(run))

        def rebuild(change: Callable[[Function], Function]) -> Any:
            return lower(change(run)).compile(compiler_options=options)

        may_be = alone and not executable.donated and (most or len(placed.hosts) == placed.mesh.size > 1)
        sections = self._sections(lowered, placed) if may_be else None
        if sections is not None and not sections.sums and most:
            return ByDevice(sections, here, outputs, options)
        compiled = lowered.compile(compiler_options=options)
        self.backend.check(compiled, len(self.island))
        if sections is not None and (not sections.sums or sums_in(compiled) != sections.sums):
            sections = None
        over = self._over(name, placed, sections) if len(placed.hosts) > 1 else None
        if sections is not None and (over is not None or len(placed.hosts) == 1):
            return ByDevice(sections, here, outputs, self.backend.options(True, False, 0), compiled, over)

        made = self.backend.prepare(compiled, len(here), rebuild)
        if made is not compiled:
            self._costs[made] = compiled.cost_analysis()
        return made

    def _sections(self, lowered: Any, placed: PlacedSlice) -> Sections | None:
        return sections_of(lowered, placed.mesh.size, self.backend.elements_apart, len(self.island) > 1)

    def _over(self, name: bytes, placed: PlacedSlice, sections: Sections | None) -> OverHosts | None:
        """The other hosts of a computation, where they exchange what is summed: each has one device of it, so that XLA
        would wait for them within the call as well. All of them hear whether they do."""
        hosts = placed.hosts
        may = sections is not None and len(hosts) == placed.mesh.size and sections.fits(len(hosts))
        met = self.meet(name, hosts, may)
        if met is None:
            return None
        order = tuple(hosts.index(device.host) for device in placed.devices)
        return OverHosts(met, order.index(hosts.index(self.host)), order)

    def _typed(self, mesh: Mesh, types: Sequence[ArrayType], layouts: Sequence[Layout]) -> list[jax.ShapeDtypeStruct]:
        """Arrays of these types and layouts, as JAX wants to know them."""
        return [
            jax.ShapeDtypeStruct(t.shape, dtype_of(t.dtype), sharding=NamedSharding(mesh, partition_spec(lies.spec)))
            for t, lies in zip(types, layouts, strict=True)
        ]

    def called(self, compiled: Any, placed: PlacedSlice) -> Function:
        """A computation on a slice, as launches call it."""
        made: Function = compiled
        return made if len(placed.hosts) == 1 else self.backend.over_hosts(made, self._here(placed))

    def _here(self, placed: PlacedSlice) -> int:
        return sum(device.host == self.host for device in placed.devices)

    def queues(self, compiled: Any, placed: PlacedSlice) -> bool:
        """Whether a computation on a slice may be in a device's queue when the call that enqueues it returns."""
        return self.backend.queues(compiled, 1 if isinstance(compiled, ByDevice) else self._here(placed))

    def keeps(self, compiled: Any, placed: PlacedSlice) -> Keeps:
        """The time for which a computation on a slice keeps a thread that computes within its calls."""
        return Keeps.BRIEFLY if isinstance(compiled, ByDevice) else self.backend.keeps(compiled, self._here(placed))

    def cost_of(self, compiled: Any) -> Mapping[str, float] | None:
        """XLA's cost of a computation that was built again, before it was; None of others."""
        return self._costs.get(compiled)

    def _compile_as_is(self, executable: Executable, placed: PlacedSlice, calls: Calls) -> Any:
        """A module that brings its own shardings. It takes and gives all that the node does, in the same order."""
        (part,) = executable.recipe.parts
        if not isinstance(part, Part) or [ref.output for ref in part.inputs] != list(range(len(executable.inputs))):
            raise ProgramRefused("a function that is compiled as it is stands alone in its node, and takes its inputs")
        if [ref.output for ref in executable.recipe.outputs] != list(range(len(executable.outputs))):
            raise ProgramRefused(f"{part.name} is compiled as it is, so its node has all results of it in order")
        mesh = self.mesh(placed)

        def typed(kinds: Sequence[ArrayType], layouts: Sequence[Layout]) -> list[Typed]:
            if packed := next((kind for kind in kinds if kind.dtype in _PACKED), None):
                raise CompileError(f"{packed} cannot be laid out over several devices by a client's own module")
            return [
                (jax.ShapeDtypeStruct(t.shape, dtype_of(t.dtype)), NamedSharding(mesh, partition_spec(layout.spec)))
                for t, layout in zip(kinds, layouts, strict=True)
            ]

        code = calls[part.function].mlir_module_serialized
        compiled = WholeModule(
            self.backend.rewritten(module_without_divisions_by_zero(code), len(self.island)),
            list(mesh.devices.flat),
            executable.donated,
            typed(executable.inputs, executable.input_layouts),
            typed(executable.outputs, executable.output_layouts),
        )
        self.backend.check(compiled, len(self.island))
        return compiled

    def _options(self, executable: Executable, lines: frozenset[str]) -> dict[str, str | bool] | None:
        """The compiler's options. Only loops of the IR count, since a loop inside a user's function may be thousands of
        times as long: such functions do not become bodies (`Part.has_loop`)."""
        parts = executable.recipe.parts
        loops = any(isinstance(part, Loop) for part in parts)
        run = [part.function for part in functions_in(parts)]
        elements = 0
        if lines.issuperset(run):
            elements = len(run) * max(math.prod(kind.shape) for kind in executable.inputs)
        return self.backend.options(len(parts) > 1 or loops, loops, elements)

    def reshard(self, edges: Sequence[Edge], source: PlacedSlice, target: PlacedSlice) -> Any:
        """The compiled identity that changes the layouts of arrays on the same devices."""
        starts = [self.sharding(source, edge.source.spec) for edge in edges]
        ends = tuple(self.sharding(target, edge.target.spec) for edge in edges)

        def make() -> Any:
            arguments = [
                jax.ShapeDtypeStruct(edge.type.shape, dtype_of(edge.type.dtype), sharding=start)
                for edge, start in zip(edges, starts, strict=True)
            ]
            if len(source.hosts) == 1:
                return jax.jit(lambda *arrays: arrays, out_shardings=ends).lower(*arguments).compile()
            whole = (*ends, self.sharding(source, REPLICATED))
            made = jax.jit(with_end(lambda *arrays: arrays), out_shardings=whole).lower(*arguments).compile()
            called = self.called(made, source)
            return lambda *arrays: called(*arrays)[:-1]

        kinds = [(edge.type, edge.source.spec, edge.target.spec) for edge in edges]
        a, b = source.mesh, target.mesh
        return self._cached(
            encode(("reshard", kinds, a.shape, a.axes, b.shape, b.axes, source.devices)), make, "reshard"
        )

    def pack(self, shards: Sequence[ArrayType], packs: Sequence[Sequence[Cut]], device: int) -> Callable[..., Any]:
        """The compiled `pieces.packing` on one device, for shards of these types."""
        chained = self._chained(shards)
        cut = sum(math.prod(box_shape(box)) * item_bytes(shards[k].dtype) for pack in packs for k, box in pack)
        nbytes = 4 * cut if chained else 0  # read and written twice; XLA counts all of a shard for each cut
        return self._on_device(("pack", shards, packs), packing(packs, chained), shards, device, nbytes)

    def unpack(
        self, arrived: Sequence[ArrayType], shards: Sequence[tuple[ArrayType, Sequence[Placed]]], device: int
    ) -> Callable[..., Any]:
        """The compiled `pieces.unpacking` on one device, for pieces of these types."""
        chained = self._chained([kind for kind, _ in shards])
        return self._on_device(("unpack", arrived, shards), unpacking(shards, chained), arrived, device)

    def _chained(self, moved: Sequence[ArrayType]) -> bool:
        """Whether a device moves these as a chain."""
        return self.devices[0].platform == "cpu" and sum(kind.nbytes for kind in moved) <= MAX_CHAINED_BYTES

    def _on_device(
        self, what: Any, run: Function, kinds: Sequence[ArrayType], device: int, nbytes: int = 0
    ) -> Callable[..., Any]:
        def make() -> Any:
            sharding = SingleDeviceSharding(self.devices[device])
            arguments = [jax.ShapeDtypeStruct(k.shape, dtype_of(k.dtype), sharding=sharding) for k in kinds]

            def build(function: Function) -> Any:
                return jax.jit(function, out_shardings=sharding).lower(*arguments).compile()

            plain = build(run)
            made = self.backend.prepare(plain, 1, lambda change: build(change(run)), nbytes)
            moves: Function = made if made is plain else lambda *given: made(*given)[:-1]
            return self.backend.beside(moves, lambda: self.is_busy())

        compiled: Callable[..., Any] = self._cached(encode((what, device)), make, what[0])
        return compiled

    def _cached(self, key: bytes, make: Callable[[], Any], name: str, size: int = 0) -> Any:
        with self._lock:
            if key in self._cache:
                self._cache.move_to_end(key)
                return self._cache[key][0]
        try:
            made = make()
        except ProgramRefused:
            raise
        except CompileError as error:
            raise CompileError(f"{name} cannot run on host {self.host}: {error}") from None
        except Exception as error:
            raise CompileError(f"{name} could not be compiled on host {self.host}: {error}") from error
        with self._lock:
            self._cached_bytes += size if key not in self._cache else 0
            self._cache[key] = made, size
            while len(self._cache) > MAX_CACHED or self._cached_bytes > MAX_CACHED_BYTES:
                self._cached_bytes -= self._cache.popitem(last=False)[1][1]
        return made
