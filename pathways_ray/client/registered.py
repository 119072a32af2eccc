"""A program as the cluster has it: registered, compiled, placed; and what can be asked of it without a launch."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding

from pathways_ray.client import notebook, prng
from pathways_ray.client.argument_types import ArgumentType, extended_dtype, keeping_width, to_numpy
from pathways_ray.client.array import Array
from pathways_ray.client.estimates import Work
from pathways_ray.client.explanation import explanation
from pathways_ray.client.export import stablehlo
from pathways_ray.client.graph_builder import BuiltProgram
from pathways_ray.client.session import Session
from pathways_ray.client.slices import slice_of
from pathways_ray.client.specs import spec_from_user
from pathways_ray.errors import InvalidArray, UsageError
from pathways_ray.ir.graph import host_part
from pathways_ray.ir.text import graph_text
from pathways_ray.jax_hooks import setting
from pathways_ray.jax_types import array_type, partition_spec
from pathways_ray.observe.computations import Computation
from pathways_ray.transport.messages import encode


class RegisteredProgram:
    """The graph of a program for given argument types, which is sent to the cluster once, when it is first needed."""

    _number = -1  # also of one that was never made whole

    def __init__(self, session: Session, built: BuiltProgram) -> None:
        self.session = session
        self._built = built
        self._encoded = encode(built.graph)

    @property
    def graph(self) -> Any:
        """The traced graph (`pathways_ray.ir.graph.Graph`)."""
        return self._built.graph

    def __del__(self) -> None:
        if self._number >= 0:
            self.session.unregister(self._number)

    def __repr__(self) -> str:
        return f"pw.LoweredProgram({self.graph.name}, {len(self.graph.nodes)} nodes)"

    def _repr_html_(self) -> str:
        return notebook.graph_html(self.graph)

    def register(self) -> None:
        """Sends the program, so that its hosts compile it, unless that was done."""
        if self._number < 0:
            number = self.session.register(self._built.graph, self._encoded, self._built.functions)
            if self.__dict__.setdefault("_number", number) != number:  # another thread was faster
                self.session.unregister(number)

    def wait_compiled(self) -> dict[int, int]:
        """Waits until the hosts have compiled the program; returns the bytes that computations need inside, for each
        host. Raises `CompileError` if they cannot."""
        self.register()
        found: dict[int, int] = self.session.explain(self._number, self._encoded).temporary_bytes
        return found

    def computations(self, text: bool = False) -> list[Computation]:
        """Its computations, with what the hosts' compilers say of them, and with `text` their code. Waits for them."""
        self.wait_compiled()  # again, where slices have moved since
        return self.session.computations(self._number, text)

    @property
    def donated_leaves(self) -> tuple[int, ...]:
        """The leaves of the arguments that a call donates."""
        return tuple(self._built.donated_leaves)

    @property
    def work(self) -> Work:
        """The work of its computations."""
        return self._built.work

    def kind_of(self, leaf: Any) -> ArgumentType:
        """The type of an argument."""
        return type_of(leaf)

    def places_of(self, number: int) -> list[NamedSharding]:
        """The layouts in which a launch takes a leaf of the arguments."""
        found = [source for source in self._built.sources if source.leaf == number]
        return [NamedSharding(source.slice.mesh, partition_spec(source.spec)) for source in found]

    def output_kinds(self, kinds: Sequence[ArgumentType]) -> list[ArgumentType]:
        """The types of the results, given those of the arguments."""
        return [
            self._built.result_kinds[output.result]
            if output.result >= 0
            else kinds[output.leaf]
            if output.leaf >= 0
            else _type_of_held(output.held)
            for output in self._built.outputs
        ]

    def as_text(self, stage: str = "graph") -> str:
        """The program as text: "graph" as traced, "plan" as placed, step by step for each island, "stablehlo" the code
        of its functions."""
        if stage == "graph":
            return graph_text(self._built.graph)
        if stage == "plan":
            return self.session.explain(-1, self._encoded).plan
        if stage == "stablehlo":
            python = {part.function for recipe in self.graph.recipes if (part := host_part(recipe)) is not None}
            return "\n".join(stablehlo(code) for name, code in self._built.functions.items() if name not in python)
        raise UsageError(
            f"as_text shows 'graph', 'plan' or 'stablehlo', not {stage!r}; lower(...).compile().as_text() shows XLA's"
        )

    def explain(self) -> str:
        """Devices, bytes, order and peak memory, as the cluster would run it now. Compiles the program.

        Raises:
            CompileError: it cannot be compiled.
        """
        self.register()
        reply = self.session.explain(self._number, self._encoded)
        return explanation(self._built, reply)


_WIDE = setting("jax_enable_x64")

_of_numpy: weakref.WeakValueDictionary[Any, ArgumentType] = weakref.WeakValueDictionary()
"""The types of NumPy arrays that were seen, by all that they depend on: to find one out takes some 30 calls."""


def type_of(leaf: Any) -> ArgumentType:
    """The type of a value, or of a `jax.ShapeDtypeStruct` with the sharding of a slice or without."""
    if type(leaf) is np.ndarray:
        key = leaf.dtype, leaf.shape, _WIDE.value
        found = _of_numpy.get(key)
        if found is None:
            found = _of_numpy[key] = _type_of(leaf)
        return found
    return leaf._type if isinstance(leaf, Array) else _type_of(leaf)


def _type_of_held(value: Any) -> ArgumentType:
    """The type of what a program holds."""
    with keeping_width((value,)):
        return type_of(value)


def _type_of(leaf: Any) -> ArgumentType:
    if isinstance(leaf, jax.ShapeDtypeStruct):
        if not all(isinstance(size, int) for size in leaf.shape):
            raise InvalidArray(
                f"{leaf.dtype}{leaf.shape} has sizes that are not numbers, for which hosts cannot compile; pw.padded "
                "takes batches of any size, and compiles for a few"
            )
        data = prng.data_type(leaf)
        where = slice_of(getattr(leaf.sharding, "mesh", None))
        spec = spec_from_user(leaf.sharding.spec, where.axes) if where is not None else ()
        return ArgumentType.of(array_type(data), bool(leaf.weak_type), where, spec, extended_dtype(leaf))
    if prng.is_zeros(leaf):
        return ArgumentType.of(array_type(prng.data_type(leaf)), False, None, (), leaf.dtype)
    array, weak = to_numpy(leaf)
    return ArgumentType.of(array_type(array), weak, None, (), extended_dtype(leaf))
