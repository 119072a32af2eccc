"""Parts of JAX and Ray that have no public name. Each entry says why the project needs it."""

from __future__ import annotations

import contextlib
import functools
import os
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from pathways_ray.module_functions import DONATING, LAYOUT, add_end, forget, is_laid_out

if TYPE_CHECKING:
    import jax
    from jax.sharding import NamedSharding


def gloo_listens_at(address: str) -> None:
    """Has the collectives between CPU hosts listen at an address; call it before JAX makes its CPU client.

    JAX leaves that to gloo, which listens where the name of the machine resolves to. On many machines that is loopback,
    so that hosts on several of them never find each other; and where a machine has several addresses it may be one that
    the others do not reach. The function that makes the collectives takes the address, but JAX has no setting for it.
    """
    from jaxlib import _jax

    made_by_jax = _jax.make_gloo_tcp_collectives

    def make(**given: Any) -> Any:
        with interrupting_nobody():
            return made_by_jax(**given, hostname=address.strip("[]"))

    _jax.make_gloo_tcp_collectives = make


@contextlib.contextmanager
def interrupting_nobody() -> Iterator[None]:
    """Has threads that are made inside take no core from another one when they wake: they wait for a free core, or for
    the end of a turn (`SCHED_BATCH`).

    That is for the thread in which gloo reads its sockets. It is woken by what other hosts send, often while a thread
    of this one is in a call that has the lock of the same connection. Had it taken the core of that one, it would try
    the lock again and again until its turn ends, some milliseconds later, and so keep the other from giving it back:
    `Pair::handleEvents` of `gloo/transport/tcp` goes back where it does not get the lock, and is called again at once.
    """
    before: tuple[int, os.sched_param] | None = None
    with contextlib.suppress(OSError):  # a sandbox may not allow any of these; then it is as before, and slower
        before = os.sched_getscheduler(0), os.sched_getparam(0)
        os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
    try:
        yield
    finally:
        if before is not None:
            with contextlib.suppress(OSError):
                os.sched_setscheduler(0, *before)


def enqueuing_as_one_thread() -> Callable[[], None]:
    """A call that has XLA's CPU client take what its thread enqueues from then on as if one thread enqueued it with
    what all others do that have called it: on each device it runs in that order. Else each thread's own is kept, and no
    other."""
    from jaxlib import _jax

    return functools.partial(_jax.set_execution_stream_id, 1)


def within_callback(run: Callable[[], None]) -> None:
    """Runs a function within a callback of XLA's, where its CPU client runs a computation of one device in the thread
    that calls it, if its arguments are there, and else hands it to another (`ThisThreadIsInsideHostCallback`). What
    JAX has for that, `jax_cpu_enable_async_dispatch`, holds for all threads of a process.

    Such a thread rounds as XLA does: numbers that are too small to be normal are 0 to it. Where JAX, whose experimental
    name this is, makes no such callback, the function runs without: computations take longer there, no more.

    Raises:
        BaseException: what the function has raised.
    """
    begun: list[bool] = []
    raised: list[BaseException] = []

    def call(context: Any, out: Any) -> None:
        begun.append(True)
        try:
            run()
        except BaseException as error:
            raised.append(error)

    try:
        import jax
        from jax.experimental.buffer_callback import buffer_callback

        begin = buffer_callback(call, jax.ShapeDtypeStruct((), bool))
        with jax.default_device(jax.local_devices()[0]):
            jax.block_until_ready(jax.jit(begin)())
    except Exception as error:  # whatever an experimental name comes to
        raised.append(error)
    if not begun:
        print(f"JAX makes no callback to compute brief calls in, which take longer: {raised}", flush=True)
        run()
    elif raised:
        raise raised[0]


def made_backends() -> Sequence[str]:
    """The platforms whose devices JAX has made in this process. What is public makes them to say which there are."""
    bridge = sys.modules.get("jax._src.xla_bridge")  # else JAX is not even imported
    return tuple(bridge._backends) if bridge is not None else ()


class _Contexts(threading.local):
    """The MLIR context that lowerings of a thread share, how many have used it, and whether they do at the moment."""

    context: Any = None
    uses = 0
    shared = False


_contexts = _Contexts()

MAX_CONTEXT_USES = 64
MAX_SHARED_BYTES = 512 << 10
"""A context keeps all types, names and constants that it has seen, so it is used for some exports only, small ones."""


@contextlib.contextmanager
def shared_mlir_context(size: int) -> Iterator[None]:
    """Has lowerings and exports of this thread, inside, share an MLIR context, unless their constants, or on hosts
    their code, have a `size` of more than `MAX_SHARED_BYTES`.

    JAX makes two of them for each export, and one for each module that it lowers or reads, each with all dialects: half
    of the time that a small function takes. It has no setting for that.
    """
    _share_mlir_contexts()
    before, _contexts.shared = _contexts.shared, size <= MAX_SHARED_BYTES
    try:
        yield
    finally:
        _contexts.shared = before


@functools.cache
def _share_mlir_contexts() -> None:
    from jax._src.interpreters import mlir

    made_by_jax = mlir.make_ir_context

    def context() -> Any:
        if not _contexts.shared:
            return made_by_jax()
        if _contexts.context is None or _contexts.uses >= MAX_CONTEXT_USES:
            _contexts.context, _contexts.uses = made_by_jax(), 0
        _contexts.uses += 1
        return _contexts.context

    mlir.make_ir_context = context


@contextlib.contextmanager
def ray_on_loopback() -> Iterator[None]:
    """Has a Ray that starts meanwhile listen on 127.0.0.1 only, as it does on macOS.

    On Linux it listens everywhere, and turns `_node_ip_address="127.0.0.1"` into an address that others reach. The
    variable says the same to the processes that it starts; this one has read it already.
    """
    from ray._private import ray_constants

    variable = "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"
    before, asked = ray_constants.ENABLE_RAY_CLUSTER, os.environ.get(variable)
    ray_constants.ENABLE_RAY_CLUSTER, os.environ[variable] = False, "0"
    try:
        yield
    finally:
        ray_constants.ENABLE_RAY_CLUSTER = before
        os.environ.pop(variable)
        if asked is not None:
            os.environ[variable] = asked


def ray_has_token() -> bool:
    """Whether the user has a token for Ray: in the environment, or in a file where Ray looks for one."""
    from ray._raylet import AuthenticationTokenLoader  # type: ignore[attr-defined]

    return bool(AuthenticationTokenLoader.instance().has_token(ignore_auth_mode=True))


def ray_forgets_token() -> None:
    """Has Ray read mode and token again when it needs them next: it keeps what it found in the environment."""
    from ray._raylet import AuthenticationTokenLoader, Config  # type: ignore[attr-defined]

    AuthenticationTokenLoader.instance().reset_cache()
    Config.initialize("")


def ray_found() -> str:
    """The address of a Ray that runs on this machine, as Ray finds it; `OSError` without one."""
    from ray._private import services

    return str(services.canonicalize_bootstrap_address("auto"))


def ray_dials(host: str) -> str:
    """The host that Ray dials for this one: in place of loopback an address that other machines reach."""
    from ray._private import services

    return str(services.resolve_ip_for_localhost(host))


def module_of(module: bytes) -> Any:
    """Serialised portable StableHLO, read in a context of JAX's own, which the result keeps alive."""
    from jax._src.interpreters import mlir
    from jaxlib import _jax

    with mlir.make_ir_context():
        return _jax.mlir.deserialize_portable_artifact(module)


def serialized_module(module: Any) -> bytes:
    """A module as portable StableHLO, in the oldest form that the installed jaxlib writes for what it has."""
    from jaxlib import _jax
    from jaxlib.mlir.dialects import stablehlo

    version = stablehlo.get_version_from_compatibility_requirement(stablehlo.StablehloCompatibilityRequirement.WEEK_4)
    with module.context:
        return bytes(_jax.mlir.serialize_portable_artifact(module, version, True))


def compiled_module(
    module: bytes,
    devices: Sequence[jax.Device],
    with_end: bool = False,
    in_memory: bool = False,
    overrides: Sequence[tuple[str, Any]] = (),
    donated: Sequence[int] | None = None,
) -> Any:
    """A module that brings its own shardings, compiled for devices in the order in which it counts them.

    Args:
        with_end: adds a last result, a scalar that depends on nothing, which stands for the computation's end.
        in_memory: has arguments and results lie in memory as the module says; else all lie in C order.
        overrides: options of the compiler, by name.
        donated: the arguments whose memory it may take, of those that the module donates; None: all of them.

    `jax.jit` compiles functions, and would put the module into one of its own. XLA may choose the layouts of those
    arguments and results of which the module says none.
    """
    import numpy as np
    from jax._src import compiler
    from jaxlib import xla_client
    from jaxlib.mlir import ir

    read = module_of(module)
    with read.context:
        main = next(
            op
            for op in read.body.operations
            if "sym_name" in op.attributes and op.attributes["sym_name"].value == "main"
        )
        if with_end:
            add_end(main)
        if not in_memory:
            forget(main, "arg_attrs", {LAYOUT})
            forget(main, "res_attrs", {LAYOUT})
        if donated is not None:
            forget(main, "arg_attrs", DONATING, donated)
        kind = ir.FunctionType(ir.TypeAttr(main.attributes["function_type"]).value)
        free = [
            [not is_laid_out(main, name, k) for k in range(len(types))]
            for name, types in (("arg_attrs", kind.inputs), ("res_attrs", kind.results))
        ]
        grid = np.empty((1, len(devices)), dtype=object)
        grid[0, :] = list(devices)
        options = compiler.get_compile_options(1, len(devices), grid, backend=devices[0].client)
        build = options.executable_build_options
        build.allow_spmd_sharding_propagation_to_parameters = free[0]
        build.allow_spmd_sharding_propagation_to_output = free[1]
        if overrides:
            options.env_option_overrides = list(overrides)
        together = xla_client.DeviceList(tuple(devices))
        return compiler.backend_compile_and_load(devices[0].client, read, together, options, [])


def compiled_for_each(module: Any, devices: Sequence[jax.Device], overrides: dict[str, Any] | None) -> list[Any]:
    """A module of one device, in StableHLO, compiled for each of some devices of this process.

    `jax.jit` would trace and lower it for each. All but the first are read from JAX's cache, where there is one. XLA
    does not write what it has read: executables of the CPU are serialized without their code then.

    Args:
        overrides: options of the compiler, by name.

    Returns:
        executables with `execute_sharded`.
    """
    import numpy as np
    from jax._src import compilation_cache, compiler
    from jaxlib import xla_client

    client = devices[0].client
    made: list[Any] = []
    for device in devices:
        grid = np.empty((1, 1), dtype=object)
        grid[0, 0] = device
        options = compiler.get_compile_options(1, 1, grid, overrides, backend=client)
        where = xla_client.DeviceList((device,))
        if made and not compilation_cache.is_persistent_cache_enabled():
            made.append(client.deserialize_executable(made[0].serialize(), where, options))
        else:
            made.append(compiler.compile_or_get_cached(client, module, grid, options, [], where))
    return made


def is_laid_out_as(op_sharding: Any, sharding: NamedSharding, dimensions: int) -> bool:
    """Whether shards of what XLA reports lie where JAX says. Devices with parts of a sum count as ones with copies."""
    from jax._src.op_shardings import are_hlo_shardings_equal
    from jaxlib.xla_client import HloSharding, OpSharding

    said, kinds = op_sharding.clone(), OpSharding.Type
    as_lies = {kinds.UNREDUCED: kinds.REPLICATED}
    said.type, *said.last_tile_dims = (as_lies.get(kinds(k), kinds(k)) for k in (said.type, *said.last_tile_dims))
    return bool(are_hlo_shardings_equal(HloSharding.from_proto(said), sharding._to_xla_hlo_sharding(dimensions)))


def exported_module(
    name: str,
    module: bytes,
    inputs: Any,
    outputs: Any,
    devices: int,
    platforms: tuple[str, ...],
) -> Any:
    """An export that has a module as its code, for a main function that takes and gives these types: trees of them.

    `jax.export` makes exports of functions; there is no public way to make one of a module.
    """
    from jax import export, tree_util
    from jax.core import ShapedArray

    (taken, in_tree), (results, out_tree) = map(tree_util.tree_flatten, ((tuple(inputs), {}), tuple(outputs)))
    given, made = (tuple(ShapedArray(t.shape, t.dtype) for t in kinds) for kinds in (taken, results))
    nothing = (None,)
    return export.Exported(
        fun_name=name,
        in_tree=in_tree,
        in_avals=given,
        out_tree=out_tree,
        out_avals=made,
        _has_named_shardings=True,
        _in_named_shardings=nothing * len(given),
        _out_named_shardings=nothing * len(made),
        in_shardings_hlo=nothing * len(given),
        out_shardings_hlo=nothing * len(made),
        nr_devices=devices,
        platforms=platforms,
        ordered_effects=(),
        unordered_effects=(),
        disabled_safety_checks=(),
        mlir_module_serialized=module,
        calling_convention_version=export.maximum_supported_calling_convention_version,
        module_kept_var_idx=tuple(range(len(given))),
        uses_global_constants=False,
        _get_vjp=None,
    )


def ray_draining_nodes(now: float) -> dict[str, float]:
    """The Ray nodes that are being drained, with the seconds until they end; infinite where that is not said.

    `ray.nodes()` does not say which nodes are drained.

    Args:
        now: seconds since the epoch.
    """
    from ray._private.state import state

    found = state.get_draining_nodes()
    return {node: at / 1000 - now if at else float("inf") for node, at in found.items()}
