"""`pw.host`: Python beside the devices. The hosts of a slice run a function on NumPy arrays, as a node of a program.

Only for tenants that the operator trusts: hosts run what such a client sends. The function travels pickled, by value
where it is of `__main__` or of a module that is not installed, and is read only by a process of the session's own.
"""

from __future__ import annotations

import contextlib
import os
import site
import sys
import sysconfig
import threading
from collections.abc import Callable, Iterator
from typing import Any

import cloudpickle
import jax
import numpy as np

from pathways_ray import limits
from pathways_ray.client import source_info
from pathways_ray.client.codes import Code
from pathways_ray.client.compiled import CompiledFunction
from pathways_ray.client.export import Exported
from pathways_ray.client.slices import VirtualSlice
from pathways_ray.client.specs import broadcast_specs
from pathways_ray.errors import ProgramRefused, TooLarge, TraceError, UsageError
from pathways_ray.ir.graph import MAX_HOST_LIMIT_MS
from pathways_ray.ir.types import ArrayType, check_layout
from pathways_ray.transport.host_calls import filled

LIMIT_S = 60.0

_PICKLING = threading.RLock()
"""Held by the thread that has changed what cloudpickle pickles by value in this process."""


class HostFunction(CompiledFunction):
    """The result of `pw.host`. Call it with arrays (a program of one node) or inside a `pw.program`."""

    def __init__(
        self,
        fun: Callable[..., Any],
        slice: VirtualSlice | None,
        in_specs: Any,
        out_specs: Any,
        result: Any,
        limit_s: float,
    ) -> None:
        super().__init__(fun, slice, in_specs, out_specs, (), ())
        if isinstance(limit_s, bool) or not isinstance(limit_s, int | float):
            raise UsageError(f"limit_s= of pw.host takes seconds, not {limit_s!r}")
        if not 0.001 <= limit_s <= MAX_HOST_LIMIT_MS / 1000:
            raise UsageError(f"limit_s= of pw.host is from 0.001 to {MAX_HOST_LIMIT_MS // 1000} seconds, not {limit_s}")
        self.result, self.limit_s = result, limit_s

    def _export(
        self, where: VirtualSlice, static: dict[int, Any], tree: Any, avals: tuple[Any, ...], platforms: tuple[str, ...]
    ) -> Exported:
        if not where.session.trusted:
            raise ProgramRefused(
                f"{self.__name__} is a host function, and hosts run Python only of tenants that the operator trusts "
                "(pathways tenants add NAME --trusted)"
            )
        args, kwargs = jax.tree.unflatten(tree, avals)
        results, output_tree = self._results(args, kwargs)
        specs = tuple(self._input_specs(where, args, kwargs, {}))
        numbered = jax.tree.unflatten(output_tree, range(len(results)))
        ranks = [len(kind.shape) for kind in results]
        made = tuple(broadcast_specs(self.out_specs, numbered, where.axes, f"out_specs of {self.__name__}", ranks))
        outputs = [self._array(kind, f"result {k}") for k, kind in enumerate(results)]
        inputs = [self._array(aval, f"argument {k}") for k, aval in enumerate(avals)]
        for k, (array, spec) in enumerate(zip(inputs, specs, strict=True)):
            check_layout(array, spec, where.type, f"{self.__name__}, input {k}")
        for k, (array, spec) in enumerate(zip(outputs, made, strict=True)):
            check_layout(array, spec, where.type, f"{self.__name__}, output {k}")
        blob = self._pickled(jax.tree.unflatten(tree, range(len(avals))), numbered, len(avals), len(results))
        return Exported(
            name=self.__name__,
            code=Code(blob),
            input_specs=specs,
            outputs=tuple(outputs),
            arguments=tuple(avals),
            results=tuple(results),
            output_specs=made,
            output_tree=output_tree,
            donated=(),
            no_fusion=True,
            estimated_us=0,
            run=self._not_jax,
            host_limit_ms=max(1, round(1000 * self.limit_s)),
        )

    def _results(self, args: Any, kwargs: Any) -> tuple[list[jax.ShapeDtypeStruct], Any]:
        """The types of the results, and their tree."""
        said = self.result(*args, **kwargs) if callable(self.result) else self.result
        leaves, tree = jax.tree.flatten(said)
        if not leaves:
            raise UsageError(
                f"result= of {self.__name__} has no array: a host function gives at least one, such as a count"
            )
        for leaf in leaves:
            if not hasattr(leaf, "shape") or not hasattr(leaf, "dtype"):
                raise UsageError(
                    f"result= of {self.__name__} says {leaf!r}; it takes a tree of jax.ShapeDtypeStruct, or a function "
                    "of the arguments' types that gives one"
                )
        return [jax.ShapeDtypeStruct(tuple(leaf.shape), _canonical(leaf.dtype)) for leaf in leaves], tree

    def _array(self, kind: Any, what: str) -> ArrayType:
        if jax.numpy.issubdtype(kind.dtype, jax.dtypes.extended):
            raise UsageError(f"{what} of {self.__name__} has typed keys; pass jax.random.key_data(key)")
        name = np.dtype(kind.dtype).name
        if bits(kind.dtype) < 8:
            raise UsageError(f"{what} of {self.__name__} is of type {name}, which NumPy keeps otherwise; convert it")
        return ArrayType(tuple(kind.shape), name)

    def _pickled(self, arguments: Any, results: Any, taken: int, given: int) -> bytes:
        for skeleton, count, what in ((arguments, taken, "arguments"), (results, given, "results")):
            try:
                filled(skeleton, range(count))
            except TypeError as error:
                raise UsageError(
                    f"{what} of {self.__name__} are arrays in tuples, lists and dicts: {error}. Take it apart before"
                ) from None
        module = sys.modules.get(getattr(self.fun, "__module__", ""))
        try:
            with _by_value(module) if module is not None and _is_users(module) else contextlib.nullcontext():
                blob = pickled(self.fun, arguments, results)
        except Exception as error:
            raise UsageError(f"{self.__name__} cannot be sent to hosts: {type(error).__name__}: {error}") from error
        if len(blob) > limits.MAX_HOST_FUNCTION_BYTES:
            raise TooLarge(
                f"{self.__name__} has {len(blob)} bytes with what it uses; the limit of a host function is "
                f"{limits.MAX_HOST_FUNCTION_BYTES}. Pass arrays as arguments, or have it read a file"
            )
        return blob

    def _not_jax(self, *_: Any) -> Any:
        at = source_info.here()
        raise TraceError(
            f"{self.__name__}{f' ({at})' if at else ''} is Python that runs on hosts: JAX can neither differentiate it "
            "nor batch it. Give it jax.lax.stop_gradient of its arguments, or call it outside of the function that is "
            "differentiated"
        )

    def __repr__(self) -> str:
        return f"pw.host({self.__name__}, slice={self.slice})"


@contextlib.contextmanager
def _by_value(module: Any) -> Iterator[None]:
    """Has what is of a module be pickled by value; behind that, as before: the user may have asked for it."""
    with _PICKLING:
        was_asked = module.__name__ in cloudpickle.list_registry_pickle_by_value()
        cloudpickle.register_pickle_by_value(module)
        try:
            yield
        finally:
            if not was_asked and module.__name__ in cloudpickle.list_registry_pickle_by_value():
                cloudpickle.unregister_pickle_by_value(module)


def pickled(fun: Callable[..., Any], arguments: Any, results: Any) -> bytes:
    """A function for the process of a session's host functions, with the skeletons of what it takes and gives."""
    return bytes(cloudpickle.dumps((fun, arguments, results)))


def _canonical(dtype: Any) -> Any:
    """The dtype that JAX gives a result, by its setting of 64 bits."""
    return dtype if jax.numpy.issubdtype(dtype, jax.dtypes.extended) else jax.dtypes.canonicalize_dtype(dtype)


def bits(dtype: Any) -> int:
    """Bits of a number; those of less than a byte lie on hosts as bytes."""
    if jax.numpy.issubdtype(dtype, jax.numpy.integer):
        return int(jax.numpy.iinfo(dtype).bits)
    return int(jax.numpy.finfo(dtype).bits) if jax.numpy.issubdtype(dtype, jax.numpy.inexact) else 8


def _is_users(module: Any) -> bool:
    """Whether a module is one that hosts may not have: neither Python's own, nor installed."""
    file = getattr(module, "__file__", None)
    if module.__name__ == "__main__" or file is None:
        return False  # pickled by value anyhow, or built in
    installed = [*site.getsitepackages(), site.getusersitepackages(), sysconfig.get_path("stdlib")]
    return not any(os.path.abspath(file).startswith(os.path.join(path, "")) for path in installed)


def host(
    fun: Callable[..., Any] | None = None,
    *,
    slice: VirtualSlice | None = None,
    result: Any,
    in_specs: Any = None,
    out_specs: Any = None,
    limit_s: float = LIMIT_S,
) -> Any:
    """Makes a Python function one that the hosts of a slice run beside the devices: a reward, a tokeniser, an
    environment, a loader of data. Only for tenants that the operator trusts.

        @pw.host(slice=s, in_specs=P("x"), out_specs=P("x"), result=lambda text: jax.ShapeDtypeStruct(text.shape, "f4"))
        def reward(text):
            return np.array([grade(line) for line in text], np.float32)

    Each host of the slice makes one call, with NumPy arrays: its part of each argument, as `in_specs` partition it. It
    gives its part of each result, as `out_specs` do. On one host these are whole arrays. A call begins when its
    arguments are computed; devices run other work meanwhile, and whatever takes its results waits for it. Calls of a
    session on a host are made one after the other, in a process of their own, which keeps what they leave in modules
    and closures until the session ends. What they print goes to the log of the host's process (`pathways logs`). A call
    none of whose results is used is not made.

    Args:
        fun: takes and gives arrays in tuples, lists and dicts. It is pickled with what it uses (at most
            16 MiB) when it is called first with such types; modules that it imports have to be on the hosts.
        slice: as in `pw.compiled`.
        result: the types of the results, whole arrays: a tree of `jax.ShapeDtypeStruct`, or a function that gives one
            for the types of the arguments.
        in_specs, out_specs: as in `pw.compiled`.
        limit_s: seconds for one call, after which its process is killed.

    Raises:
        ProgramRefused: when called: the operator does not trust the tenant.
        UsageError: an option of the wrong kind; the function cannot be pickled.

    A result raises `HostFunctionError`, with the function's traceback, where the function raised, gave something else
    than it should, or ended its process; `HostFunctionTimeout` after the limit.
    """
    if fun is None:
        return lambda f: HostFunction(f, slice, in_specs, out_specs, result, limit_s)
    return HostFunction(fun, slice, in_specs, out_specs, result, limit_s)
