"""The check of one custom call against the forms of `custom_calls`: shapes, types, attributes, layouts, and uses."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass

from jaxlib import _jax
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import sdy

from pathways_ray.errors import ProgramRefused
from pathways_ray.executor.compile.attributes import Value, entries, integers, maker
from pathways_ray.executor.compile.custom_calls import EXPANDED, KERNELS, ArrayForm, Form, parsed

_ALWAYS = {"call_target_name", "api_version", "backend_config", "has_side_effect", "called_computations"}
_KERNEL = _ALWAYS | {
    "mhlo.backend_config",
    "mhlo.frontend_attributes",
    "operand_layouts",
    "result_layouts",
    "output_operand_aliases",
    "sdy.sharding_rule",
    "sdy.sharding",
}
_REAL = {"complex<f32>": "f32", "complex<f64>": "f64"}
_COMPLEX = {"f32": "complex<f32>", "f64": "complex<f64>"}
_KEEPS_PLACES = frozenset(f"stablehlo.{name}" for name in ("complex", "real", "imag", "negate", "convert"))
"""Operations between a guarded result and its `select` whose element comes from the elements in the same place."""


def check_custom_call(op: ir.Operation) -> None:
    """Raises `ProgramRefused` unless a `stablehlo.custom_call` is one that programs may use, in a form that is safe."""
    target = ir.StringAttr(op.attributes["call_target_name"]).value
    if target in KERNELS:
        _check_form(op, target, KERNELS[target], _KERNEL)
        _expect(op, target, "api_version", ("1 : i32", "4 : i32"), "1 : i32")
        _expect(op, target, "backend_config", ('""',), '""')
        _expect(op, target, "has_side_effect", ("false",), "false")
        _expect(op, target, "called_computations", ("[]",), "[]")
    elif target in EXPANDED:
        form, config, version = EXPANDED[target]
        _check_form(op, target, (form,), _ALWAYS | {"sdy.sharding"})
        _expect(op, target, "api_version", (f"{version} : i32",), "1 : i32")
        _expect(op, target, "has_side_effect", ("false",), "false")
        _expect(op, target, "called_computations", ("[]",), "[]")
        said = str(op.attributes["backend_config"]) if "backend_config" in op.attributes else '""'
        if not re.fullmatch(f'"{config}"', said):
            raise _refusal(target, f"its backend_config is {said}")
    elif target == "ApproxTopK":
        _check_top_k(op)
    elif target == "annotate_device_placement":
        _check_placement(op, target)
    else:
        raise ProgramRefused(f"custom call {target!r} is not among those that programs may use")


def _refusal(target: str, what: str) -> ProgramRefused:
    return ProgramRefused(f"custom call {target!r} is not as JAX makes it: {what}")


def _expect(op: ir.Operation, target: str, name: str, allowed: Sequence[str], default: str) -> None:
    said = str(op.attributes[name]) if name in op.attributes else default
    if said not in allowed:
        raise _refusal(target, f"its {name} is {said}, not {' or '.join(allowed)}")


def _check_names(op: ir.Operation, target: str, allowed: set[str]) -> None:
    if unknown := [name for name in op.attributes if name not in allowed]:
        raise _refusal(target, f"it has the attribute {unknown[0]}")


# --- forms ------------------------------------------------------------------------------------------------------------


@dataclass
class _Bound:
    """The meaning of a signature's names in one call."""

    batch: tuple[int, ...]
    types: dict[str, str]
    sizes: dict[str, int]

    def array(self, form: ArrayForm, shape: Sequence[int]) -> tuple[tuple[int, ...], str]:
        """The shape and type that a signature asks for. A name that is new takes its size from `shape`."""
        if form.dims is None:
            return (), self.types[form.letter]
        rest = tuple(shape[len(self.batch) :])
        for name, size in zip(form.dims, rest, strict=False):
            if name not in ("k", "n-1"):
                self.sizes.setdefault(name, size)
        return self.batch + tuple(self.size(name) for name in form.dims), self.types[form.letter]

    def size(self, name: str) -> int:
        match name:
            case "k":
                return min(self.sizes.get("m", 0), self.sizes.get("n", 0))
            case "n-1":
                return self.sizes["n"] - 1
        return self.sizes.get(name, -1)


def _check_form(op: ir.Operation, target: str, forms: Sequence[Form], attributes: set[str]) -> None:
    """Raises unless the call has one of these forms; one for the same attributes, if there is, says what is wrong."""
    _check_names(op, target, attributes)
    worst: ProgramRefused | None = None
    said = _kernel_attributes(op)
    for form in [form for form in forms if _is_for(form, said)] or forms:
        try:
            bound = _check_arrays(op, target, form)
            if target in KERNELS:
                _check_attributes(op, target, form, bound)
                _check_layouts(op, target, form, len(bound.batch))
            _check_uses(op, target, form, len(bound.batch))
            return
        except ProgramRefused as error:
            worst = error
    raise worst or _refusal(target, "it has no form")


def _kernel_attributes(op: ir.Operation) -> dict[str, str]:
    return {name: str(value) for name, value in entries(op, "mhlo.backend_config").items()}


def _is_for(form: Form, said: dict[str, str]) -> bool:
    return all(callable(values) or said.get(name) in values for name, values in form.attributes.items())


def _check_arrays(op: ir.Operation, target: str, form: Form) -> _Bound:
    operands, results = parsed(form.signature)
    given, made = list(op.operands), list(op.results)
    if (len(given), len(made)) != (len(operands), len(results)):
        raise _refusal(
            target,
            f"it has {len(given)} operands and {len(made)} results; {form.signature} has {len(operands)} and "
            f"{len(results)}",
        )
    first = ir.RankedTensorType(given[0].type)
    element = str(first.element_type)
    if element not in form.element_types:
        raise _refusal(target, f"operand 0 is {first}; its elements may be {', '.join(form.element_types)}")
    nr_dims = len(operands[0].dims or ())
    if first.rank < nr_dims:
        raise _refusal(target, f"operand 0 is {first}, which has less than {nr_dims} dimensions")
    types = {"T": element, "R": _REAL.get(element, element), "C": _COMPLEX.get(element, element), "i32": "i32"}
    bound = _Bound(tuple(first.shape[: first.rank - nr_dims]), types, {})
    for what, values, arrays in (("operand", given, operands), ("result", made, results)):
        for number, (value, array) in enumerate(zip(values, arrays, strict=True)):
            kind = ir.RankedTensorType(value.type)
            shape, wanted = bound.array(array, kind.shape)
            if tuple(kind.shape) != shape or str(kind.element_type) != wanted:
                asked = "x".join([*map(str, shape), wanted])
                raise _refusal(target, f"{what} {number} is {kind}; {_with(form, bound)} asks for tensor<{asked}>")
    if not form.where(bound.sizes):
        raise _refusal(target, f"its sizes do not fit each other: {_with(form, bound)}")
    return bound


def _with(form: Form, bound: _Bound) -> str:
    sizes = ", ".join(f"{name}={size}" for name, size in bound.sizes.items())
    return f"{form.signature} with {sizes or 'no sizes'} and batch {list(bound.batch)}"


def _check_attributes(op: ir.Operation, target: str, form: Form, bound: _Bound) -> None:
    said = _kernel_attributes(op)
    if said.keys() != form.attributes.keys():
        raise _refusal(target, f"its kernel gets the attributes {sorted(said)}, not {sorted(form.attributes)}")
    for name, values in form.attributes.items():
        allowed = (values(bound.sizes),) if callable(values) else values
        if said[name] not in allowed:
            raise _refusal(target, f"its {name} is {said[name]}; with these shapes it may be {' or '.join(allowed)}")
    aliases = "".join(
        f"#stablehlo.output_operand_alias<output_tuple_indices = [{result if len(op.results) > 1 else ''}], "
        f"operand_index = {operand}, operand_tuple_indices = []>, "
        for result, operand in form.aliases
    )
    _expect(op, target, "output_operand_aliases", (f"[{aliases.removesuffix(', ')}]", "[]"), "[]")


def _check_layouts(op: ir.Operation, target: str, form: Form, batch: int) -> None:
    """Raises unless matrices lie as the kernel reads them, and only batch dimensions may be partitioned."""
    operands, results = parsed(form.signature)
    for name, arrays in (("operand_layouts", operands), ("result_layouts", results)):
        layouts = list(ir.ArrayAttr(op.attributes[name])) if name in op.attributes else []
        wanted = [_layout(array, batch, form.row_major) for array in arrays]
        found = [integers(layout) for layout in layouts]
        if found != wanted:
            raise _refusal(target, f"its {name} are {found}, not {wanted}")
    expected = {"num_batch_dims": f'"{batch}"'}
    if "mhlo.frontend_attributes" in op.attributes:
        said = {name: str(value) for name, value in entries(op, "mhlo.frontend_attributes").items()}
        if said != expected:
            raise _refusal(target, f"its frontend attributes are {said}, not {expected}")
    if "sdy.sharding_rule" in op.attributes:
        _check_sharding_rule(op, target, batch)


def _layout(array: ArrayForm, batch: int, row_major: bool) -> list[int]:
    """The dimensions of an array from the one that changes fastest."""
    if array.dims is None:
        return []
    order = list(reversed(range(batch + len(array.dims))))
    if len(array.dims) == 2 and not row_major:
        order[:2] = order[1::-1]
    return order


def _check_sharding_rule(op: ir.Operation, target: str, batch: int) -> None:
    rule = sdy.OpShardingRuleAttr(op.attributes["sdy.sharding_rule"])
    special = (*rule.reduction_factors, *rule.need_replication_factors, *rule.permutation_factors)
    used: list[int] = []
    fine = not special and not list(rule.blocked_propagation_factors)
    for mapping, value in zip(
        (*rule.operand_mappings, *rule.result_mappings), (*op.operands, *op.results), strict=True
    ):
        dims = sdy.TensorMappingAttr(mapping).dim_mappings
        factors = [list(sdy.DimMappingAttr(dim).factor_indices) for dim in dims]
        shape = ir.RankedTensorType(value.type).shape
        fine &= len(factors) == len(shape) and all(len(each) == 1 for each in factors)
        fine &= factors[:batch] == [[k] for k in range(min(batch, len(factors)))]
        used += [factor for each in factors[batch:] for factor in each]
    if not fine or len(set(used)) != len(used) or any(factor < batch for factor in used):
        raise _refusal(target, f"its sharding rule {rule} partitions more than its {batch} batch dimensions")


# --- results that were not written ------------------------------------------------------------------------------------


def _check_uses(op: ir.Operation, target: str, form: Form, batch: int) -> None:
    for number in form.unwritten:
        if any(True for _ in op.results[number].uses):
            raise _refusal(target, f"result {number} is used, though its kernel does not write it in this mode")
    for number in form.guarded:
        if number not in form.unwritten and not _is_guarded(op.results[number], op.results[len(op.results) - 1], batch):
            raise _refusal(
                target,
                f"result {number} is used without a select by info == 0; when its kernel fails, it does not write it",
            )


def _is_guarded(value: Value, info: Value, batch: int) -> bool:
    """Whether each way of a value leads to a `select` that takes it only where `info` is 0."""
    for use in value.uses:
        owner = use.owner.operation
        if owner.name == "stablehlo.select":
            if use.operand_number != 1 or not _is_success(owner.operands[0], info, batch):
                return False
        elif not (_keeps_places(owner, batch) and _is_guarded(owner.results[0], info, batch)):
            return False
    return True


def _keeps_places(op: ir.Operation, batch: int) -> bool:
    """Whether an element comes from elements of the same matrix of the batch."""
    if op.name in _KEEPS_PLACES:
        return True
    if op.name == "stablehlo.transpose":
        return list(ir.DenseI64ArrayAttr(op.attributes["permutation"]))[:batch] == list(range(batch))
    if op.name == "stablehlo.slice":
        starts, strides = (list(ir.DenseI64ArrayAttr(op.attributes[n])) for n in ("start_indices", "strides"))
        shapes = [list(ir.RankedTensorType(v.type).shape)[:batch] for v in (op.operands[0], op.results[0])]
        return starts[:batch] == [0] * batch and strides[:batch] == [1] * batch and shapes[0] == shapes[1]
    return False


def _is_success(value: Value, info: Value, batch: int) -> bool:
    """Whether a predicate is `info == 0`, for each matrix of the batch in its place."""
    for _ in range(4):
        op = maker(value)
        if op is None:
            return False
        if op.name == "stablehlo.broadcast_in_dim":
            dims = list(ir.DenseI64ArrayAttr(op.attributes["broadcast_dimensions"]))
            if dims[:batch] != list(range(batch)) or dims != sorted(dims):
                return False
            value = op.operands[0]
        elif op.name == "stablehlo.compare":
            if str(op.attributes["comparison_direction"]) != "#stablehlo<comparison_direction EQ>":
                return False
            return bool(op.operands[0] == info) and _is_zero(op.operands[1])
        else:
            return False
    return False


def _is_zero(value: Value) -> bool:
    for _ in range(4):
        op = maker(value)
        if op is None:
            return False
        if op.name == "stablehlo.constant":
            return not any(integers(op.attributes["value"]))
        if op.name != "stablehlo.broadcast_in_dim":
            return False
        value = op.operands[0]
    return False


# --- custom calls with rules of their own -----------------------------------------------------------------------------


def _check_placement(op: ir.Operation, target: str) -> None:
    """The identity, in another kind of memory of the same device."""
    _check_names(op, target, _ALWAYS | {"mhlo.frontend_attributes", "sdy.sharding"})
    if [v.type for v in op.operands] != [v.type for v in op.results]:
        raise _refusal(target, f"it makes {[str(v.type) for v in op.results]} of {[str(v.type) for v in op.operands]}")
    _expect(op, target, "called_computations", ("[]",), "[]")
    places = tuple(f'{{_xla_buffer_placement = "{kind}"}}' for kind in ("pinned_host", "unpinned_host", "device"))
    _expect(op, target, "mhlo.frontend_attributes", places, "{}")


def _check_top_k(op: ir.Operation) -> None:
    """`jax.lax.approx_max_k`: of values and their indices, reduced along one dimension."""
    target = "ApproxTopK"
    _check_names(op, target, _ALWAYS | {"mhlo.backend_config", "sdy.sharding"})
    _expect(op, target, "api_version", ("1 : i32", "4 : i32"), "1 : i32")
    _expect(op, target, "backend_config", ('""',), '""')
    kinds = [ir.RankedTensorType(v.type) for v in op.operands]
    made = [ir.RankedTensorType(v.type) for v in op.results]
    if (len(kinds), len(made)) != (4, 2) or "mhlo.backend_config" not in op.attributes:
        raise _refusal(target, f"it has {len(kinds)} operands and {len(made)} results")
    config = entries(op, "mhlo.backend_config")
    fields = ("aggregate_to_topk", "recall_target", "reduction_dim", "reduction_input_size_override", "top_k")
    if set(config) - {"is_fallback"} != set(fields):
        raise _refusal(target, f"its attributes are {sorted(config)}")
    try:
        dim, override, top = (ir.IntegerAttr(config[name]).value for name in fields[2:])
        aggregate, recall = ir.BoolAttr(config[fields[0]]).value, ir.FloatAttr(config[fields[1]]).value
        shape = list(kinds[0].shape)
        sound = 0 <= dim < len(shape) and 0 <= top <= shape[dim] and 0.0 < recall <= 1.0
        if sound and (override == -1 or override >= shape[dim]):
            shape[dim], _ = _jax.approx_top_k_reduction_output_size(
                shape[dim], len(shape), top, recall, aggregate, override
            )
        else:
            raise ValueError
    except (ValueError, TypeError, _jax.JaxRuntimeError):
        said = {name: str(value) for name, value in config.items()}
        raise _refusal(target, f"its attributes {said} do not fit operand 0, {kinds[0]}") from None
    element = kinds[0].element_type
    wanted = [_tensor(kinds[0].shape, element), _tensor(kinds[0].shape), _tensor((), element), _tensor(())]
    wanted += [_tensor(shape, element), _tensor(shape)]
    if [*kinds, *made] != wanted or math.prod(kinds[0].shape) < 0:
        shown = ", ".join(map(str, [*kinds, *made]))
        raise _refusal(target, f"its arrays are {shown}, not {', '.join(map(str, wanted))}")
    called = list(ir.ArrayAttr(op.attributes["called_computations"])) if "called_computations" in op.attributes else []
    if len(called) != 1:
        raise _refusal(target, f"it compares by {len(called)} functions, not by one")


def _tensor(shape: Sequence[int], element: ir.Type | None = None) -> ir.RankedTensorType:
    return ir.RankedTensorType.get(shape, element or ir.IntegerType.get_signless(32))
