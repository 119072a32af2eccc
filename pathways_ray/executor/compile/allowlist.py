"""The allowlist of a compiled function from a client: operations, custom calls, sizes; and the search for others.

`jax.export` refuses callbacks and unknown custom calls where a function is exported; that is the client's machine, so
here everything is checked again before XLA sees it. A function is refused for anything that is not on a list:

- operations: arithmetic, data movement, control flow, collectives. Nothing that talks to the outside of the
  computation (infeed, outfeed, send, recv, tokens), and no shapes that depend on data.
- custom calls: linear algebra and the like, whose code is part of jaxlib, in the forms in which JAX emits them
  (`custom_calls`). No callbacks into Python, no kernels that clients bring along, and nothing that reads memory that
  was never written.
- sorts by what is no order (`sorts`).
- collectives that some devices of their group may enter and others not (`uniformity`).
- sizes: operations (after calls are expanded, since XLA expands them), constants, values, nesting.

A tenant that the operator trusts may use any custom call but callbacks into Python, and any collective.

MLIR reads such bytes, and malformed ones can crash or hang it. So this file runs in a process of its own
(`sandbox`), and hosts read functions only after they have passed here.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from typing import Any

import numpy as np
from jax import export
from jax.interpreters.mlir import dtype_to_ir_type
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import chlo, sdy, stablehlo

from pathways_ray import limits
from pathways_ray.errors import ProgramRefused
from pathways_ray.executor.compile.custom_call_rules import check_custom_call
from pathways_ray.executor.compile.sorts import check_sort, check_top_k
from pathways_ray.executor.compile.uniformity import COLLECTIVES, check_collectives
from pathways_ray.joint_exports import Packed, is_joint_export

MAX_DEPTH = 64
"""Regions inside regions, and functions that call functions: readers and compilers recurse on both."""


def _names(text: str) -> list[str]:
    return text.split()


_STABLEHLO = _names("""
abs add all_gather all_reduce all_to_all and atan2 batch_norm_grad batch_norm_inference batch_norm_training
bitcast_convert broadcast broadcast_in_dim case cbrt ceil cholesky clamp collective_broadcast collective_permute
compare complex composite concatenate constant convert convolution cosine count_leading_zeros custom_call divide dot
dot_general dynamic_slice dynamic_update_slice einsum exponential exponential_minus_one fft floor gather if imag
iota is_finite log log_plus_one logistic map maximum minimum multiply negate not optimization_barrier or pad
partition_id popcnt power real reduce reduce_precision reduce_scatter reduce_window remainder replica_id reshape
return reverse rng rng_bit_generator round_nearest_afz round_nearest_even rsqrt scatter select select_and_scatter
shift_left shift_right_arithmetic shift_right_logical sign sine slice sort sqrt subtract tan tanh transpose
triangular_solve while xor
""")

_CHLO = _names("""
acos acosh asin asinh atan atanh bessel_i1e conj constant cosh digamma erf erf_inv erfc is_inf is_neg_inf is_pos_inf
lgamma mulhi next_after polygamma ragged_dot scan sinh square tan top_k zeta
""")

_SDY = _names("""
all_gather all_reduce all_slice all_to_all collective_permute constant manual_computation mesh named_computation
propagation_barrier reduce_scatter replicated_to_unreduced reshard return sharded_to_unreduced sharding_constraint
sharding_group
""")

OPERATIONS = frozenset(
    ["builtin.module", "func.func", "func.call", "func.return"]
    + [f"stablehlo.{name}" for name in _STABLEHLO]
    + [f"chlo.{name}" for name in _CHLO]
    + [f"sdy.{name}" for name in _SDY]
)

_MEANS_SHARDING = ("mhlo.sharding", "xla.sdy")
"""Attributes by which code outside of `sdy.manual_computation` could be made device by device; JAX without Shardy, and
XLA between two of its passes, write them."""

_OF_MODULES = frozenset(
    ["sym_name", "sym_visibility", "mhlo.num_partitions", "mhlo.num_replicas", "jax.uses_shape_polymorphism"]
)
"""What JAX says of a module as a whole. By other words XLA takes the memory of arguments (`mhlo.input_output_alias`),
or looks for a partitioner that there is not, and ends the process (`mhlo.use_auto_spmd_partitioning`)."""

_PYTHON_CALLBACK = re.compile("python.*callback")

_WATCHED = (
    frozenset(["stablehlo.partition_id", "stablehlo.replica_id", "stablehlo.rng", "sdy.manual_computation"])
    | COLLECTIVES
)
"""Operations without which all devices take the same way."""


def check_function(blob: bytes, trusted: bool = False) -> int:
    """The number of devices that an exported function was made for; 0 if it runs on any.

    Args:
        blob: an exported function, or anything else.
        trusted: whether the operator trusts whose it is.

    Raises:
        ProgramRefused: it may not run, with what is wrong with it.
    """
    exported = None if is_joint_export(blob) else _exported(blob)
    code = Packed.read(blob).code if exported is None else exported.mlir_module_serialized
    with _context() as context, ir.Location.unknown(context):
        try:
            module = stablehlo.deserialize_portable_artifact(context, code)
            verified = module.operation.verify()
        except Exception as error:
            raise ProgramRefused(f"its StableHLO cannot be read ({type(error).__name__}: {error})") from None
        if not verified:
            raise ProgramRefused("its StableHLO is not well-formed")
        return _check_module(module, exported, trusted)


def _exported(blob: bytes) -> export.Exported:
    """An export of one function."""
    try:
        exported = export.deserialize(bytearray(blob))
    except Exception as error:  # whatever a reader of malformed bytes may raise
        raise ProgramRefused(f"it is no exported function ({type(error).__name__}: {error})") from None
    _check_exported(exported)
    return exported


def _check_exported(exported: export.Exported) -> None:
    if exported.ordered_effects or exported.unordered_effects:
        raise ProgramRefused("it has side effects, which compiled functions cannot have")
    first, last = (
        export.minimum_supported_calling_convention_version,
        export.maximum_supported_calling_convention_version,
    )
    if not first <= exported.calling_convention_version <= last:
        version = exported.calling_convention_version
        raise ProgramRefused(f"its calling convention has version {version}; this runtime knows {first} to {last}")
    for what, avals in (("argument", exported.in_avals), ("result", exported.out_avals)):
        for k, aval in enumerate(avals):
            if not all(isinstance(size, int) for size in aval.shape):
                raise ProgramRefused(f"{what} {k} has a shape that depends on others: {aval.shape}")


def _context() -> ir.Context:
    """A context without threads: the process that reads is made by a fork, which has no other thread."""
    context = ir.Context()
    context.enable_multithreading(False)
    for dialect in (stablehlo, chlo, sdy):
        dialect.register_dialect(context)
    return context


def _check_module(module: ir.Module, exported: export.Exported | None, trusted: bool) -> int:
    if not trusted and (unknown := next((name for name in module.operation.attributes if name not in _OF_MODULES), "")):
        raise ProgramRefused(f"its module has the attribute {unknown[:80]}, which JAX's have not")
    types: set[ir.Type] = set()
    functions: dict[str, ir.Operation] = {}
    meshes: dict[str, ir.Attribute] = {}
    looked: dict[str, _Look] = {}
    for op in (entry.operation for entry in module.body):
        look = _Look(trusted, types)
        if op.name == "func.func":
            name = ir.StringAttr(op.attributes["sym_name"]).value
            functions[name], looked[name] = op, look
        elif op.name == "sdy.mesh":
            meshes[ir.StringAttr(op.attributes["sym_name"]).value] = op.attributes["mesh"]
        _look(op, look, 0)
    constants = sum(look.constants for look in looked.values())
    if constants > limits.MAX_CONSTANT_BYTES:
        raise ProgramRefused(f"its constants have {constants} bytes; {limits.MAX_CONSTANT_BYTES} are the limit")
    _check_calls(looked)
    for name in {name for look in looked.values() for name in look.comparing}:
        check_top_k(functions[name])
    if "main" not in functions:
        raise ProgramRefused("it has no main function")
    if exported is not None:
        _check_signature(functions["main"], exported)
    if trusted or not any(look.watched for look in looked.values()):
        return 0
    return check_collectives(functions, meshes)


class _Look:
    """The findings in one function: operations, bytes of constants, whether it has one that `uniformity` must see, the
    functions it calls, once for each call, and those by which the largest values are found."""

    def __init__(self, trusted: bool, types: set[ir.Type]) -> None:
        self.trusted = trusted
        self.types = types
        """Those that are right, of all functions."""
        self.operations = 0
        self.constants = 0
        self.watched = False
        self.calls: list[str] = []
        self.comparing: list[str] = []

    def check(self, kind: ir.Type, name: str) -> None:
        """Raises for a type of a value that an operation may not have."""
        if kind not in self.types:
            _check_type(kind, name)
            self.types.add(kind)


def _look(op: ir.Operation, look: _Look, depth: int) -> None:
    name = op.name
    if name not in OPERATIONS:
        raise ProgramRefused(f"operation {name} is not among those that programs may use")
    if depth > MAX_DEPTH:
        raise ProgramRefused(f"its operations are nested more than {MAX_DEPTH} deep")
    look.operations += 1
    if look.operations > limits.MAX_OPERATIONS:
        raise ProgramRefused(f"it has more than {limits.MAX_OPERATIONS} operations")
    for value in op.results:
        look.check(value.type, name)
    look.watched |= name in _WATCHED
    if not look.trusted:
        _check_attributes(op)
    if name == "func.func" and len(op.regions[0].blocks) != 1:  # without one XLA's reader crashes
        raise ProgramRefused("a function of it has no body, or one of several blocks")
    if name == "stablehlo.sort" and not look.trusted:
        check_sort(op)
    if name == "stablehlo.custom_call":
        _look_at_call(op, look)
    elif name in ("func.call", "stablehlo.composite"):
        symbol = op.attributes["callee" if name == "func.call" else "decomposition"]
        look.calls.append(ir.FlatSymbolRefAttr(symbol).value)
    elif name in ("stablehlo.constant", "sdy.constant", "chlo.constant") and not _is_splat(op):
        look.constants += _bytes_of(op.results[0].type)
    for region in op.regions:
        for block in region:
            for argument in block.arguments:
                look.check(argument.type, name)
            for inner in block:
                _look(inner.operation, look, depth + 1)


def _look_at_call(op: ir.Operation, look: _Look) -> None:
    target = ir.StringAttr(op.attributes["call_target_name"]).value
    if _PYTHON_CALLBACK.search(target):
        raise ProgramRefused(
            f"custom call {target!r} calls a Python function, which is in the process that exported it and not here"
        )
    if not look.trusted:
        check_custom_call(op)
    if "called_computations" in op.attributes:
        called = [ir.FlatSymbolRefAttr(symbol).value for symbol in ir.ArrayAttr(op.attributes["called_computations"])]
        look.calls += called
        look.comparing += called if not look.trusted else []


def _check_attributes(op: ir.Operation) -> None:
    """Raises for attributes that say how XLA's partitioner should take an operation, other than by Shardy."""
    for name in op.attributes:
        if name in ("mhlo.sharding", "mhlo.frontend_attributes", "arg_attrs", "res_attrs"):
            said = f"{name} = {op.attributes[name]}"
            if found := next((word for word in _MEANS_SHARDING if word in said), ""):
                raise ProgramRefused(
                    f"operation {op.name} has the attribute {found}; export with Shardy (jax_use_shardy_partitioner), "
                    "which is JAX's default"
                )


def _is_splat(constant: ir.Operation) -> bool:
    """Whether a constant is one number for all of its elements, and takes no more than that."""
    try:
        value = constant.attributes["value"]
    except TypeError:
        return False  # complex numbers, which these bindings cannot look into
    return isinstance(value, ir.DenseElementsAttr) and value.is_splat


def _check_type(kind: ir.Type, name: str) -> None:
    if not isinstance(kind, ir.RankedTensorType) or not kind.has_static_shape:
        raise ProgramRefused(f"operation {name} has a value of type {kind}; only arrays of known shapes are allowed")
    if _bytes_of(kind) > limits.MAX_TENSOR_BYTES:
        raise ProgramRefused(f"operation {name} has a value {kind} of more than {limits.MAX_TENSOR_BYTES} bytes")


def _bytes_of(kind: ir.RankedTensorType) -> int:
    """Bytes of an array, without its sizes of 0, which would hide the others: XLA's own arithmetic overflows by these.
    Types of less than a byte count as one, those other than numbers as 16."""
    element = kind.element_type
    bits = element.width if isinstance(element, ir.IntegerType | ir.FloatType) else 128
    return math.prod(size for size in kind.shape if size) * ((bits + 7) // 8)


def _check_calls(looked: dict[str, _Look]) -> None:
    """Raises unless calls end, and end soon: XLA puts the body of a function in place of each call of it."""
    total: dict[str, int] = {}

    def expanded(name: str, depth: int) -> int:
        if depth > MAX_DEPTH:
            raise ProgramRefused(f"its functions call each other more than {MAX_DEPTH} deep, or without end")
        if name not in looked:
            raise ProgramRefused(f"it calls function {name[:80]!r}, which it does not have")
        if name not in total:
            size = looked[name].operations + sum(expanded(callee, depth + 1) for callee in looked[name].calls)
            if size > limits.MAX_OPERATIONS:
                raise ProgramRefused(
                    f"it has {size} operations when calls are expanded; {limits.MAX_OPERATIONS} are the limit"
                )
            total[name] = size
        return total[name]

    for name in looked:
        expanded(name, 0)
    if sum(look.operations for look in looked.values()) > limits.MAX_OPERATIONS:
        raise ProgramRefused(f"it has more than {limits.MAX_OPERATIONS} operations")


def _check_signature(main: ir.Operation, exported: export.Exported) -> None:
    """Raises unless the code takes and gives the arrays that the export says."""
    kind = ir.FunctionType(ir.TypeAttr(main.attributes["function_type"]).value)
    kept = exported.module_kept_var_idx
    if any(not 0 <= k < len(exported.in_avals) for k in kept):
        raise ProgramRefused(f"it keeps arguments {kept[:8]} of {len(exported.in_avals)}")
    inputs = list(kind.inputs)
    if len(exported.platforms) > 1:
        inputs = inputs[1:]  # which of its platforms it runs on
    for what, types, avals in (
        ("arguments", inputs, [exported.in_avals[k] for k in kept]),
        ("results", list(kind.results), list(exported.out_avals)),
    ):
        said = [_said(aval) for aval in avals]
        if types != said:
            shown = ", ".join(map(str, types[:4])), ", ".join(map(str, said[:4]))
            raise ProgramRefused(f"its code has {what} ({shown[0]}), and it says ({shown[1]})")


def _said(aval: Any) -> ir.Type:
    return ir.RankedTensorType.get(aval.shape, dtype_to_ir_type(np.dtype(aval.dtype)))


def verdicts(blobs: Sequence[bytes], trusted: bool = False) -> list[tuple[str, int]]:
    """The verdict on each function: "", or why it is refused; and the devices that it was made for."""
    found = []
    for blob in blobs:
        devices, refused = 0, ""
        try:
            devices = check_function(blob, trusted)
        except ProgramRefused as error:
            refused = str(error)
        except Exception as error:  # a function that is not understood is not allowed
            refused = f"it cannot be checked ({type(error).__name__}: {error})"
        found.append((refused[:2000], devices))
    return found
