"""The code of functions, made some time after they were traced: alone, or together with that of others.

Whatever JAX is set to meanwhile, code is made of what was traced then, under the settings of then; the user's function
does not run again for it. Threads take turns.
"""

from __future__ import annotations

import contextlib
import gc
import hashlib
import itertools
import math
import os
import threading
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
from jax import export
from jax.extend import core as jex_core
from jax.sharding import AbstractMesh, NamedSharding

from pathways_ray.client import debugging, source_info
from pathways_ray.client.jaxprs import constant_bytes, constants_of, equations_of
from pathways_ray.compat import serialized_module, shared_mlir_context
from pathways_ray.errors import PathwaysError, TraceError
from pathways_ray.formulas.formula import MAX_MEMBERS, Formula, packed
from pathways_ray.jax_hooks import setting, trace_context
from pathways_ray.joint_exports import Joint, Packed, call_of, lowered_for_export, texts_of

_WIDE, _PRECISION = setting("jax_enable_x64"), setting("jax_default_matmul_precision")
_PARTITIONABLE, _GENERATOR = setting("jax_threefry_partitionable"), setting("jax_default_prng_impl")
_context = trace_context()

_LOOP = b"while"
"""The operation in the code of a function that has loops."""

MAX_JOINT = 128
MAX_JOINT_EQUATIONS = 1024
"""Functions that are exported as one, and their equations: who needs one gets all of them. One makes 200 operations at
most (`threefry2x32`), so that they stay below `limits.MAX_OPERATIONS`."""

MAX_SMALL_EQUATIONS = 64
_MAX_SMALL_ELEMENTS = 1 << 32
"""Equations of a function that is exported with others, and elements of each value: far below what hosts refuse."""

_BCSR_KERNEL = b"cpu_csr_sparse_dense_ffi"
"""What JAX makes on CPUs of a product with a sparse matrix of that format. It goes to memory by indices that it does
not check, and hosts have not loaded it."""


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


_PLAIN = _names("""
abs add add_any and argmax argmin atan2 bitcast_convert_type broadcast_in_dim cbrt ceil clamp closed_call clz
concatenate cond conv_general_dilated convert_element_type copy copy_p cos cumlogsumexp cummax cummin cumprod cumsum
custom_jvp_call custom_vjp_call div dot_general dynamic_slice dynamic_update_slice eq erf erf_inv erfc exp exp2 expm1
floor gather ge gt integer_pow iota is_finite jit le log log1p logistic lt max min mul ne neg nextafter not or pad
population_count pow random_bits random_fold_in random_seed random_split random_unwrap random_wrap reduce_and reduce_max
reduce_min reduce_or reduce_precision reduce_prod reduce_sum reduce_xor rem reshape rev round rsqrt scan scatter
scatter-add scatter-max scatter-min scatter-mul select_n sharding_constraint shift_left shift_right_arithmetic
shift_right_logical sign sin slice sort split sqrt square squeeze stop_gradient sub tan tanh threefry2x32 transpose
while xor
""")
"""The operations of functions that are exported with others. A host refuses an export as a whole, so that none of them
may be a reason to: no collectives, and nothing that becomes a custom call."""

_making = threading.RLock()
"""Held while code is made, and by who looks for what has none."""


class Made(NamedTuple):
    """The code of a function: its name for hosts, the export that has it, whether it may have a loop, and whether it
    is a line on CPUs (`Formula.is_line`)."""

    function: str
    blob: bytes
    has_loop: bool
    is_line: bool = False

    @classmethod
    def alone(cls, blob: bytes, has_loop: bool = False) -> Made:
        """Names an export by its content."""
        return cls(hashlib.sha256(blob).hexdigest(), blob, has_loop)


class Code:
    """The code of a function, made when it is first asked for; or before that, with that of others (`export_together`).

    Without a `pending` function it is there. Safe to use from several threads.
    """

    def __init__(self, blob: bytes = b"", pending: Pending | None = None) -> None:
        self.pending = pending
        self._made = Made.alone(blob) if pending is None else None

    def set(self, made: Made) -> None:
        """Notes what was made; once."""
        self._made, self.pending = made, None

    @property
    def made(self) -> Made:
        """The code, made alone unless it is there. Raises `TraceError` where it cannot be exported."""
        if (found := self._made) is None:
            with _making:
                if self.pending is not None and self.pending.formula is not None:
                    _write([(self, self.pending, self.pending.formula)])
                elif self.pending is not None:
                    exported, blob = self.pending.exported()
                    loops = _LOOP in exported.mlir_module_serialized
                    self.set(Made.alone(blob, loops))
                found = self._made
        assert found is not None, "code is pending or made"
        return found


class Evaluated(NamedTuple):
    """A formula's jaxpr, in place of the `jax.stages.Traced` of a function that evaluates it."""

    jaxpr: jex_core.ClosedJaxpr


class Pending(NamedTuple):
    """A function that was traced, and not exported yet."""

    name: str
    traced: Any
    shardings: tuple[NamedSharding, ...]
    avals: tuple[jax.ShapeDtypeStruct, ...]
    mesh: AbstractMesh
    platforms: tuple[str, ...]
    disabled: tuple[Any, ...]
    settings: tuple[Any, ...]
    """What `jax_settings` were when it was traced."""
    formula: Formula | None
    """The formula that it is, if it is one: then it needs no export."""

    def exported(self) -> tuple[export.Exported, bytes]:
        """Its export, and that as bytes. Raises `TraceError`."""
        size = constant_bytes(self.traced.jaxpr)
        with under(self.settings), tracing_for(self.name, self.mesh), shared_mlir_context(size):
            known: Any = _Known(self.traced)
            made = export.export(known, platforms=self.platforms, disabled_checks=self.disabled)()
            _check_devices(made.nr_devices, self.mesh)
            blob = bytes(made.serialize())
            if _BCSR_KERNEL in blob:
                raise TraceError(
                    f"{self.name} multiplies a jax.experimental.sparse.BCSR, by a kernel that hosts do not have; "
                    "multiply its to_bcoo()"
                )
            return made, blob

    def size(self) -> int:
        """Its equations, where it is exported with others: at most `MAX_SMALL_EQUATIONS`. More for those that are not:
        for several platforms, for one, an export takes a further argument."""
        closed = self.traced.jaxpr
        few = list(itertools.islice(equations_of(closed.jaxpr), MAX_SMALL_EQUATIONS + 1))
        values = [*closed.jaxpr.invars, *(made for equation in few for made in equation.outvars)]
        is_plain = (
            len(self.platforms) == 1
            and all(equation.primitive.name in _PLAIN for equation in few)
            and all(math.prod(value.aval.shape) <= _MAX_SMALL_ELEMENTS for value in values)
            and not any(value.aval.dtype.name == "int1" for value in values)  # which StableHLO does not tell from bool
            and not any(True for _ in constants_of(closed))
        )
        return len(few) if is_plain else MAX_SMALL_EQUATIONS + 1


@dataclass(frozen=True)
class _Known:
    """A `jax.stages.Wrapped`, as `jax.export` asks for, of a function that is traced already."""

    traced: Any

    def __call__(self) -> Any:
        raise AssertionError("it is exported only")

    def trace(self) -> Any:
        """Gives what it was traced to."""
        return self.traced

    def lower(self) -> Any:
        """Gives what it is lowered to."""
        return self.traced.lower()


def export_together(codes: Iterable[Code]) -> None:
    """Makes the code of those that are small, and have none yet: formulas as one, and an export of others for each mesh
    (`formulas.formula`, `joint_exports`)."""
    with _making:
        written: list[tuple[Code, Pending, Formula]] = []
        groups: dict[Any, list[tuple[Code, Pending]]] = {}
        sizes: Counter[Any] = Counter()
        for code in dict.fromkeys(codes):
            if (one := code.pending) is None:
                continue
            if one.formula is not None:
                written.append((code, one, one.formula))
                continue
            if (size := one.size()) > MAX_SMALL_EQUATIONS:
                continue
            alike = one.mesh, one.platforms, one.disabled, one.settings
            if len(groups.get(alike, ())) == MAX_JOINT or sizes[alike] + size > MAX_JOINT_EQUATIONS:
                _export_as_one(groups.pop(alike))
                del sizes[alike]
            groups.setdefault(alike, []).append((code, one))
            sizes[alike] += size
        for group in groups.values():
            _export_as_one(group)
        for k in range(0, len(written), MAX_MEMBERS):
            _write(written[k : k + MAX_MEMBERS])


def _write(codes: Sequence[tuple[Code, Pending, Formula]]) -> None:
    """Makes the code of functions that are formulas."""
    places = {formula: place for place, formula in enumerate(dict.fromkeys(formula for _, _, formula in codes))}
    blob = packed(places)
    digest = hashlib.sha256(blob).hexdigest()
    for code, one, formula in codes:
        is_line = one.platforms == ("cpu",) and formula.is_line
        code.set(Made(f"{digest}#{places[formula]}", blob, has_loop=False, is_line=is_line))


def _export_as_one(codes: Sequence[tuple[Code, Pending]]) -> None:
    """Leaves functions without code that JAX makes something else of: they are exported alone."""
    if len(codes) < 2:
        return
    given = [one for _, one in codes]

    def joint(*groups: Any) -> tuple[Any, ...]:
        return tuple(call_of(one.traced, *group) for one, group in zip(given, groups, strict=True))

    like = given[0]
    shardings = tuple(one.shardings for one in given)
    try:
        with under(like.settings), tracing_for("joint", like.mesh), shared_mlir_context(0):
            traced = jitted(joint, shardings, like.mesh).trace(*(one.avals for one in given))
            module, devices = lowered_for_export(traced, like.platforms)
            _check_devices(devices, like.mesh)
            kinds = Joint(Packed(like.platforms, devices, b""), module).kinds(texts_of(module))
            blob = Packed(like.platforms, devices, serialized_module(module)).packed()
    except PathwaysError:
        return
    digest = hashlib.sha256(blob).hexdigest()
    assert len(kinds) == len(codes), "a joint export has a member for each function"
    for (code, _), (member, has_loop) in zip(codes, kinds, strict=True):
        code.set(Made(f"{digest}#{member}", blob, has_loop))


def _check_devices(devices: int, mesh: AbstractMesh) -> None:
    """Raises `ValueError` where a function for one device was lowered for more: `jitted` says nothing of that one."""
    if mesh.size == 1 and devices > 1:
        raise ValueError(
            f"a sharding inside is over {devices} devices of another mesh, and the slice has 1; name its axes "
            "(jax.P), or take a slice of more devices"
        )


class _Collections:
    """The number of blocks of `few_collections` that are open in this process, and the thresholds before the first."""

    lock = threading.Lock()
    open = 0
    before = gc.get_threshold()
    meanwhile: tuple[int, ...] | None = None
    """What was set; None where nothing was."""

    @classmethod
    def opened(cls) -> None:
        with cls.lock:
            cls.open += 1
            found = gc.get_threshold()
            if cls.open > 1 or not found[0] or found == cls.meanwhile:
                return
            cls.before = found
            gc.set_threshold(max(found[0], _YOUNG), found[1], _NEVER)
            cls.meanwhile = gc.get_threshold()  # not all Pythons keep the last one

    @classmethod
    def closed(cls) -> None:
        with cls.lock:
            cls.open = max(0, cls.open - 1)
            if not cls.open and gc.get_threshold() == cls.meanwhile:  # else the user has set others
                gc.set_threshold(*cls.before)

    @classmethod
    def forked(cls) -> None:
        """Closes all, in a child: it has none of the other threads, of which one may have had the lock."""
        cls.lock, cls.open = threading.Lock(), 0
        cls.closed()


_YOUNG, _NEVER = 200_000, 1 << 30
"""Objects made since the last look, some 20 MB of them, after which Python looks among them for cycles; and a number
of looks that is never reached, after which it would look at all objects."""

os.register_at_fork(after_in_child=_Collections.forked)


@contextlib.contextmanager
def few_collections() -> Iterator[None]:
    """Has Python look less often for cycles meanwhile, and at new objects alone: tracing makes many of them, and a look
    at all objects of a process with JAX takes 0.1 s, as long as 100 functions do."""
    try:
        _Collections.opened()
        yield
    finally:
        _Collections.closed()


def jitted(fun: Any, shardings: Sequence[Any], mesh: AbstractMesh) -> Any:
    """The function, to be traced for arguments with these shardings. On one device nothing is said of them: JAX writes
    it down for each argument, and every reader looks at it."""
    if mesh.size == 1:
        return jax.jit(fun, keep_unused=True)
    return jax.jit(fun, in_shardings=tuple(shardings), keep_unused=True)


@contextlib.contextmanager
def tracing_for(name: str, mesh: AbstractMesh) -> Iterator[None]:
    """Has JAX trace and lower for a mesh; what it cannot is a `TraceError`."""
    try:
        with jax.sharding.use_abstract_mesh(mesh), jax.disable_jit(False):
            yield
    except PathwaysError:
        raise
    except Exception as error:
        where_text = source_info.of_error(error)
        at = f" ({where_text})" if where_text else ""
        raise source_info.noted(
            TraceError(f"{name}{at} cannot be traced: {source_info.text_of(error)}"), source_info.hint_for(error)
        ) from error


def jax_settings() -> tuple[Any, ...]:
    """The settings of JAX that a trace depends on beside its arguments; they may differ with each call. First those
    that code depends on as well (`jax.enable_x64`, `jax.default_matmul_precision`, `jax.threefry_partitionable`,
    `jax.default_prng_impl`), last all by which JAX tells traces apart, such as `jax.numpy_dtype_promotion`."""
    return (
        _WIDE.value,
        _PRECISION.value,
        _PARTITIONABLE.value,
        _GENERATOR.value,
        debugging.checks_asked(),
        _context(),
    )


def settings_of_calls() -> tuple[Any, ...]:
    """The settings of `jax_settings`, but for those that are among the ones by which JAX tells traces apart: each call
    looks for its program by them."""
    return _GENERATOR.value, debugging.NANS.value, debugging.INFS.value, _context()


@contextlib.contextmanager
def under(settings: tuple[Any, ...]) -> Iterator[None]:
    """Has this thread's JAX be set as then. What only the trace depended on, such as the values that are looked for
    (`checks_asked`), is in what was traced."""
    wide, precision, partitionable, generator, *_ = settings
    with (
        jax.enable_x64(wide),
        jax.default_matmul_precision(precision),
        jax.threefry_partitionable(partitionable),
        jax.default_prng_impl(generator),
    ):
        yield
