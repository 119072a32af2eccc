"""Joint exports: small functions that are exported as one, whose main function calls each of them.

To export a function costs its client some 7 ms and a host about as much to take it in, however small it is; as members
of one export each costs a fraction. Member k of the export named DIGEST is the function `DIGEST#k`. It takes and gives
what call k of the main function does, and that does nothing but to call. So a joint export says no types beside its
module, which `jax.export` writes and reads one by one.

Uses parts of JAX that have no public name: one that puts a module into another one, and one that calls what was
traced.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import msgspec
import numpy as np
from jax.extend import core as jex_core

from pathways_ray.compat import module_of
from pathways_ray.errors import ProgramRefused

_LOOP = "stablehlo.while"
_CALL = "call @"

_MARK = b"pathways joint export 1\n"
"""The beginning of each, by which its readers know it from an export of one function."""


class Packed(msgspec.Struct, frozen=True, array_like=True):
    """A joint export: where its functions run, and the StableHLO of all, in the portable form."""

    platforms: tuple[str, ...]
    devices: int
    code: bytes

    def packed(self) -> bytes:
        """Its bytes."""
        return _MARK + msgspec.msgpack.encode(self)

    @staticmethod
    def read(blob: bytes) -> Packed:
        """A joint export from its bytes; its code is not looked at. Raises `ProgramRefused` for any others."""
        if not is_joint_export(blob):
            raise ProgramRefused("it is an export of one function, which has no members")
        try:
            return _PACKED.decode(memoryview(blob)[len(_MARK) :])
        except msgspec.MsgspecError as error:
            raise ProgramRefused(f"it is no joint export ({error})") from None


_PACKED = msgspec.msgpack.Decoder(Packed)


def is_joint_export(blob: bytes) -> bool:
    """Whether bytes of a function are said to be a joint export."""
    return blob.startswith(_MARK)


class Member(NamedTuple):
    """A function of a joint export."""

    joint: Joint
    number: int

    @property
    def nr_devices(self) -> int:
        """The devices that it was exported for."""
        return self.joint.packed.devices

    @property
    def in_avals(self) -> Sequence[Any]:
        """The types that it takes."""
        return self.joint.members[self.number].arguments

    @property
    def out_avals(self) -> Sequence[Any]:
        """The types that it gives."""
        return self.joint.members[self.number].results

    @property
    def mlir_module_serialized(self) -> bytes:
        """Raises `ProgramRefused`: a member has no module of its own."""
        raise ProgramRefused("a member of a joint export cannot be compiled as it is")

    def call(self, *values: Any) -> tuple[jax.Array, ...]:
        """Its results, in a function that is traced."""
        return tuple(called_p().bind(*values, called=self))

    def emitted(self, context: Any, values: Sequence[Any]) -> list[Any]:
        """Its results as operations of a module, whose `ModuleContext` is given, put where JAX puts some at the
        moment."""
        return emitted_call(context, self, values)


class _Reads(threading.local):
    """The modules that this thread has read since `read_once` began; None outside of it."""

    modules: dict[Joint, Any] | None = None


_reads = _Reads()


@contextlib.contextmanager
def read_once() -> Iterator[None]:
    """Has this thread, inside, read the module of a joint export once, and keep it: to be looked at, not changed."""
    before, _reads.modules = _reads.modules, {}
    try:
        yield
    finally:
        _reads.modules = before


class Joint:
    """An export whose main function only calls others.

    Args:
        module: what was read of it already.

    Raises:
        ProgramRefused: it does anything else.
    """

    def __init__(self, packed: Packed, module: Any = None) -> None:
        self.packed = packed
        read = module if module is not None else self.module()  # whose operations are gone when it is
        self.members = _called(_main_of(read))
        self.names = [one.name for one in self.members]

    def module(self) -> Any:
        """Its module, to be looked at."""
        found = _reads.modules.get(self) if _reads.modules is not None else None
        if found is None:
            found = module_of(self.packed.code)
            if _reads.modules is not None:
                _reads.modules[self] = found
        return found

    def member(self, number: str) -> Member:
        """A member, by the end of its name. Raises `ProgramRefused` for a number that it does not have."""
        if not (number.isascii() and number.isdigit() and int(number) < len(self.names)):
            raise ProgramRefused(f"a joint export of {len(self.names)} functions has no number {number[:20]!r}")
        return Member(self, int(number))

    def kinds(self, texts: Mapping[str, str]) -> list[tuple[int, bool]]:
        """For each member the first one with its code, and whether it may have a loop; by the text of each function."""
        texts = {name: text.replace(f"@{name}(", "@(", 1) for name, text in texts.items()}
        loops = {name: _LOOP in text for name, text in texts.items()}
        somewhere = any(loops.values())
        first: dict[str, int] = {}
        return [
            (first.setdefault(texts[name], number), loops[name] or (somewhere and _CALL in texts[name]))
            for number, name in enumerate(self.names)
        ]


def texts_of(module: Any) -> dict[str, str]:
    """The functions of a module, each as text without lines of source."""
    return {
        op.attributes["sym_name"].value: op.get_asm(enable_debug_info=False, use_local_scope=True, assume_verified=True)
        for op in (entry.operation for entry in module.body)
        if op.name == "func.func"
    }


def call_of(traced: Any, *values: Any) -> tuple[jax.Array, ...]:
    """The results of a call of a function, by its `jax.stages.Traced`, in another one that is traced.

    To call the function itself traces it again, wherever JAX does not find what it traced before.
    """
    from jax._src.pjit import jit_p

    return tuple(jit_p.bind(*traced._consts, *values, **traced._params))


def lowered_for_export(traced: Any, platforms: tuple[str, ...]) -> tuple[Any, int]:
    """The module of a `jax.stages.Traced`, as `jax.export` has it lowered, and the number of its devices.

    `jax.export` copies it, checks it, and reads the layouts of all arguments and results, which takes as long again.

    Raises:
        NotImplementedError: it calls back to this process.
    """
    from jax._src import config
    from jax._src.interpreters import mlir

    parameters = mlir.LoweringParameters(
        for_export=True,
        hoist_constants_as_args=False,
        export_ignore_forward_compatibility=config.export_ignore_forward_compatibility.value,
    )
    lowered = traced.lower(lowering_platforms=platforms, _private_parameters=parameters)
    said = lowered._lowering.compile_args
    if any(said[name] for name in ("host_callbacks", "keepalive", "ordered_effects", "unordered_effects")):
        raise NotImplementedError("it calls back to the process that exports it")
    return lowered.compiler_ir("stablehlo"), said["num_devices"]


def only_called(lowered: Any) -> Any:
    """A `jax.stages.Lowered` without functions that nothing in it calls: the other members of a joint export. What is
    compiled, and kept on disk, then depends on those alone that it runs."""
    from jaxlib.mlir import passmanager

    module = lowered.compiler_ir("stablehlo")
    with module.context:
        passmanager.PassManager.parse("builtin.module(symbol-dce)").run(module.operation)
    return lowered


def _main_of(module: Any) -> Any:
    return next(
        entry.operation
        for entry in module.body
        if entry.operation.name == "func.func" and entry.operation.attributes["sym_name"].value == "main"
    )


class _Called(NamedTuple):
    """A function that a main function calls, and the types that it takes and gives."""

    name: str
    arguments: list[Any]
    results: list[Any]


def _called(main: Any) -> list[_Called]:
    """The calls of a main function: what each takes are arguments of its own, and it gives what they all give."""
    block = main.regions[0].blocks[0]
    calls: list[_Called] = []
    taken: list[Any] = []
    made: list[Any] = []
    kinds = _Kinds()
    for op in (entry.operation for entry in block):
        if op.name == "func.call":
            operands, results = list(op.operands), list(op.results)
            calls.append(_Called(op.attributes["callee"].value, kinds.of(operands), kinds.of(results)))
            taken += operands
            made += results
        elif op.name != "func.return":
            raise ProgramRefused(f"the main function of a joint export has the operation {op.name}; it only calls")
        elif list(op.operands) != made:
            raise ProgramRefused("the main function of a joint export gives other values than it has called for")
    if taken != list(block.arguments):
        raise ProgramRefused("the main function of a joint export passes other values than its arguments, each once")
    return calls


class _Kinds:
    """Types of values of MLIR, as JAX has them; most values of a module are of few types."""

    def __init__(self) -> None:
        self._known: dict[Any, Any] = {}

    def of(self, values: Sequence[Any]) -> list[Any]:
        return [self._kind(value.type) for value in values]

    def _kind(self, said: Any) -> Any:
        found = self._known.get(said)
        if found is None:
            from jaxlib.mlir import ir

            kind = ir.RankedTensorType(said)
            name = str(kind.element_type)
            if (dtype := _dtypes().get(name)) is None:
                raise ProgramRefused(f"a member of a joint export takes or gives values of type {name}")
            found = self._known[said] = jax.core.ShapedArray(tuple(kind.shape), dtype)
        return found


@functools.cache
def _dtypes() -> dict[str, np.dtype[Any]]:
    """The dtypes by the names that MLIR has for them."""
    from jax._src.interpreters import mlir

    with mlir.make_ir_context():
        known = [dtype for dtype in mlir._dtype_to_ir_type if dtype.name not in ("void", "int1")]  # "i1" is bool
        return {str(mlir.dtype_to_ir_type(dtype)): dtype for dtype in known}


@functools.cache
def called_p() -> Any:
    """The primitive that a call of a function is that hosts write down themselves: of a member, or of a formula."""
    from jax._src.interpreters import mlir

    made = jex_core.Primitive("pathways_called")
    made.multiple_results = True

    @made.def_abstract_eval
    def types(*_: Any, called: Any) -> list[Any]:
        return [jax.core.ShapedArray(kind.shape, kind.dtype) for kind in called.out_avals]

    def lowered(ctx: Any, *values: Any, called: Any) -> Sequence[Any]:
        return called.emitted(ctx.module_context, values)

    mlir.register_lowering(made, lowered, cacheable=False)
    return made


def emitted_call(context: Any, member: Member, values: Sequence[Any]) -> list[Any]:
    """The results of a call of a member that is put into a module, whose `ModuleContext` is given, where JAX puts
    operations at the moment."""
    from jaxlib.mlir import ir
    from jaxlib.mlir.dialects import func

    key = (emitted_call, member.joint)
    functions = context.cached_primitive_lowerings.get(key)
    if functions is None:
        names = _merged(context, member.joint)
        kinds = [ir.TypeAttr(context.symbol_table[name].attributes["function_type"]).value for name in names]
        functions = [
            (ir.FlatSymbolRefAttr.get(name), ir.FunctionType(kind).results)
            for name, kind in zip(names, kinds, strict=True)
        ]
        context.cached_primitive_lowerings[key] = functions
    name, results = functions[member.number]
    return list(func.CallOp(results, name, values).results)


def _merged(context: Any, joint: Joint) -> list[str]:
    """Puts the functions of a joint export into a module that is being made; their names there."""
    from jax._src.export import _export
    from jax._src.interpreters import mlir
    from jaxlib import _jax
    from jaxlib.mlir import passmanager

    _export._ensure_backends_initialized(joint.packed.platforms)
    with context.module.context as here:
        module = joint.module()
        if module.context is here:
            module = module.operation.clone(ip=False)
        else:
            module = _jax.mlir.deserialize_portable_artifact(joint.packed.code)
        passmanager.PassManager.parse("builtin.module(sdy-lift-inlined-meshes)").run(module.operation)
    name = mlir.merge_mlir_modules(context.module, "joint", module, dst_symtab=context.symbol_table)
    main = context.symbol_table[name]
    calls = [op.operation for op in main.regions[0].blocks[0] if op.operation.name == "func.call"]
    names = [call.attributes["callee"].value for call in calls]
    context.symbol_table.erase(main)
    return names
