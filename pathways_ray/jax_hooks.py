"""Parts of JAX without a public name that `pw.Array` is built on: how JAX leaves arrays that are not its own to others.

Each entry says why the project needs it. Only the client loads this; what other processes need is in `compat`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NoReturn, Protocol

if TYPE_CHECKING:
    import jax
    from jax.sharding import AbstractMesh


class ArrayRules(Protocol):
    """The part of evaluation that JAX leaves to arrays that are not its own."""

    def concerns(self, arguments: Sequence[Any], closed: Any, params: Any) -> bool:
        """Whether a jaxpr with such arguments is to be evaluated by `evaluate`; `params` are those of `jax.jit`."""

    def evaluate(self, arguments: Sequence[Any], closed: Any, params: Any) -> list[Any]:
        """The results of a jaxpr."""

    def full_like(self, value: Any, fill: Any, dtype: Any) -> Any:
        """An array of one value that lies as another does, for `jnp.full_like`."""

    def fetch(self, value: Any) -> Any:
        """Typed keys in this process, for `jax.device_get`."""

    def place(self, values: Sequence[Any], targets: Sequence[Any], own: Sequence[bool]) -> list[Any]:
        """Each value at a device or sharding, as `jax.device_put` has it, perhaps as an array of its `own`;
        `NotImplemented` leaves it to JAX."""

    def lower(self, traced: Any) -> Any:
        """The result of `jax.jit(f).lower(...)` for a traced function; `NotImplemented` leaves it to JAX."""

    def nonzero(self, value: Any, size: int | None, of: Callable[[Any], tuple[Any, ...]]) -> tuple[Any, ...]:
        """The result of `jnp.nonzero`, which `of` makes of an array of this process, or of one that is whole on each
        device."""

    def refuse(self, value: Any) -> NoReturn:
        """Raises an error: JAX wants the value in this process."""


def make_jax_value(kind: type[jax.Array], rules: ArrayRules) -> None:
    """Has JAX take instances of a subclass of `jax.Array` wherever it takes arrays, and leave to `rules` what it would
    compute with them. They get the operators, methods and properties of its own arrays that the class does not have.
    The public `__jax_array__` takes values in this process only. All evaluation comes through one function, as a jaxpr.
    """
    import jax
    from jax._src import ad_util, config, core, dtypes, pjit
    from jax._src.interpreters import mlir, pxla
    from jax._src.lax import lax
    from jax._src.numpy import array_methods

    own = {name for base in kind.__mro__[: kind.__mro__.index(jax.Array)] for name in vars(base)}
    array_methods._set_array_base_attributes(kind, exclude=own)
    core.pytype_aval_mappings[kind] = lambda value: value.aval
    dtypes.register_canonicalize_value_handler(kind, None)
    ad_util.raw_jaxval_adders[kind] = lax.add
    pxla.shard_arg_handlers[kind] = lambda values, *_: rules.refuse(values[0])
    mlir.register_constant_handler(kind, lambda value, _: rules.refuse(value))
    by_jax = pjit._pjit_call_impl_python

    def call(*arguments: Any, jaxpr: Any, **params: Any) -> Any:
        if not rules.concerns(arguments, jaxpr, params):
            return by_jax(*arguments, jaxpr=jaxpr, **params)
        return rules.evaluate(arguments, jaxpr, params), None, None, []

    evaluate = pjit.jit_p.impl

    def whole(*arguments: Any, jaxpr: Any, **params: Any) -> Any:
        if not (config.disable_jit.value and rules.concerns(arguments, jaxpr, params)):
            return evaluate(*arguments, jaxpr=jaxpr, **params)
        with config.disable_jit(False):  # a derivative of a call on a slice, taken apart, would not be on that slice
            return evaluate(*arguments, jaxpr=jaxpr, **params)

    pjit._pjit_call_impl_python = call
    pjit.jit_p.def_impl(whole)
    _compile_key_primitives(kind)
    _leave_functions(kind, rules)
    _leave_nonzero(kind, rules)
    _compile_shard_map(kind)


def _compile_key_primitives(kind: type[jax.Array]) -> None:
    """Has primitives of typed keys, which look into arrays of JAX, be compiled as others are for those of `kind`."""
    from jax._src import core, dispatch
    from jax._src.random import prng

    def compiled(primitive: Any) -> Any:
        by_itself = primitive.impl

        def evaluate(*arguments: Any, **params: Any) -> Any:
            if not any(type(argument) is kind for argument in arguments):
                return by_itself(*arguments, **params)
            return dispatch.apply_primitive(primitive, *arguments, **params)

        return evaluate

    for primitive in vars(prng).values():
        if isinstance(primitive, core.Primitive):
            primitive.def_impl(compiled(primitive))


def _compile_shard_map(kind: type[jax.Array]) -> None:
    """Has `jax.shard_map` outside of a jitted function be one where it is over a slice: JAX would run it shard by shard
    in this process."""
    import jax
    from jax._src import core

    trace: Any = core.EvalTrace
    by_itself = trace.process_shard_map

    def process(current: Any, primitive: Any, fun: Any, values: Any, *, mesh: Any, **params: Any) -> Any:
        if not isinstance(mesh, _own_meshes()) and not any(type(value) is kind for value in values):
            return by_itself(current, primitive, fun, values, mesh=mesh, **params)
        trees: list[Any] = []

        def run(*given: Any) -> list[Any]:
            trees.append(primitive.bind(*given, subfuns=(fun,), mesh=mesh, **params))
            return list(trees[-1])

        with jax.disable_jit(False):
            made = jax.jit(run)(*values)
        return trees[-1].map2(lambda _, value: value, made)

    trace.process_shard_map = process


def _putting(rules: ArrayRules, by_jax: Callable[..., list[Any]], always_copy: Any) -> Callable[..., list[Any]]:
    """The function that `jax.device_put` calls for all leaves of a tree. JAX gets those that are not for `rules`."""

    def device_put(*values: Any, **params: Any) -> list[Any]:
        own = [copy == always_copy for copy in params["copy_semantics"]]
        placed = rules.place(values, params["devices"], own)
        if left := [n for n, one in enumerate(placed) if one is NotImplemented]:
            of_left = {name: [each[n] for n in left] for name, each in params.items()}
            for n, one in zip(left, by_jax(*(values[n] for n in left), **of_left), strict=True):
                placed[n] = one
        return placed

    return device_put


def _leave_functions(kind: type[jax.Array], rules: ArrayRules) -> None:
    """Leaves to `rules` the functions of JAX that evaluate no jaxpr."""
    import jax
    from jax._src import api, callback, debugging, dispatch, dtypes, pjit, stages
    from jax._src.lax import lax

    modules: tuple[Any, ...] = dispatch, lax, api, stages
    jax_dispatch, jax_lax, jax_api, jax_stages = modules
    full_by_jax, get_by_jax = jax_lax.full_like, jax_api._device_get
    lower_by_jax = jax_stages.Traced.lower

    def is_key(value: Any) -> bool:
        return dtypes.issubdtype(value.dtype, dtypes.extended)

    constrained_by_jax = pjit.sharding_constraint_p.impl

    def constrained(value: Any, *, sharding: Any, unconstrained_dims: Any, **params: Any) -> Any:
        # Outside of traces it places, as jax.device_put does.
        (placed,) = (NotImplemented,) if unconstrained_dims else rules.place((value,), (sharding,), (False,))
        if placed is not NotImplemented:
            return placed
        return constrained_by_jax(value, sharding=sharding, unconstrained_dims=unconstrained_dims, **params)

    def full_like(x: Any, fill_value: Any, dtype: Any = None, shape: Any = None, sharding: Any = None) -> Any:
        if type(x) is kind and shape is None and sharding is None and not is_key(x):
            return rules.full_like(x, fill_value, dtype)
        return full_by_jax(x, fill_value, dtype, shape, sharding)

    def device_get(x: Any) -> Any:
        return rules.fetch(x) if type(x) is kind and is_key(x) else get_by_jax(x)

    def lower(traced: Any, **options: Any) -> Any:
        lowered = rules.lower(traced) if not options else NotImplemented
        return lower_by_jax(traced, **options) if lowered is NotImplemented else lowered

    def fetched_for(primitive: Any) -> Callable[..., Any]:
        by_jax = primitive.impl
        return lambda *values, **params: by_jax(*(device_get(x) if type(x) is kind else x for x in values), **params)

    always_copy = jax_dispatch.ArrayCopySemantics.ALWAYS_COPY
    jax_dispatch._batched_device_put_impl = _putting(rules, jax_dispatch._batched_device_put_impl, always_copy)
    jax_lax.full_like, jax_api._device_get = _placing(full_like), device_get
    # With these, jnp.zeros, jnp.asarray, jnp.arange and others take `device=`.
    jax_lax.full, jax_lax._convert_element_type = _placing(jax_lax.full), _placing(jax_lax._convert_element_type)
    jax_lax.broadcasted_iota = _placing(jax_lax.broadcasted_iota, "out_sharding")
    for name in ("full", "full_like", "broadcasted_iota"):  # the names that users have of them
        setattr(jax.lax, name, getattr(jax_lax, name))
    jax_stages.Traced.lower = lower
    pjit.sharding_constraint_p.def_impl(constrained)
    calling = debugging.debug_print_p, debugging.debug_callback_p, callback.pure_callback_p, callback.io_callback_p
    for primitive in calling:
        primitive.def_impl(fetched_for(primitive))


def _leave_nonzero(kind: type[jax.Array], rules: ArrayRules) -> None:
    """Leaves to `rules` what `jnp.nonzero`, `flatnonzero`, `argwhere` and others are made of: JAX adds up all that is
    before each element, for which XLA takes time that grows with the square of a partitioned dimension on CPUs."""
    import jax
    from jax._src.numpy import lax_numpy, setops

    by_jax = lax_numpy.nonzero

    @functools.wraps(by_jax)
    def nonzero(a: Any, *, size: Any = None, fill_value: Any = None) -> Any:
        of = functools.partial(by_jax, size=size, fill_value=fill_value)
        return rules.nonzero(a, size, of) if type(a) is kind else of(a)

    for module in (jax.numpy, lax_numpy, setops):
        module.nonzero = nonzero  # type: ignore[attr-defined]


def _placing(by_jax: Callable[..., Any], keyword: str = "sharding") -> Callable[..., Any]:
    """A function of JAX that makes an array. What is to lie on a slice is made in this process, and put there then."""
    import jax

    @functools.wraps(by_jax)
    def made(*arguments: Any, **params: Any) -> Any:
        where = params.get(keyword)
        if where is None or not isinstance(getattr(where, "mesh", None), _own_meshes()):
            return by_jax(*arguments, **params)
        return jax.device_put(by_jax(*arguments, **{**params, keyword: None}), where)

    return made


def outside_of_traces() -> Callable[[], bool]:
    """A function that says whether JAX traces nothing on its thread: to look at all arguments would take longer."""
    from jax._src import core

    trace, axes, evaluating, none = core.trace_state_strong_ref, core.axis_env_state, core.eval_trace, core.top_axis_env
    return lambda: trace.value is evaluating and axes.value is none  # `core.trace_state_clean` in one call, not in four


def setting(name: str) -> Any:
    """The holder of a setting of JAX, whose `value` is that of this thread. `jax.config` has it as an attribute, at the
    cost of a call of Python each time."""
    import jax

    return jax.config._value_holders[name]


def trace_context() -> Callable[[], Any]:
    """A function that returns all settings of JAX, on its thread, by which JAX tells its own traces apart."""
    from jax._src import config

    return config.trace_context


def transform_like_jit(primitive: Any, parameters: Callable[..., dict[str, Any]]) -> None:
    """Has JAX differentiate and batch a primitive as it does a call of a jitted function, with these parameters."""
    from jax._src import config
    from jax._src.interpreters import ad, batching
    from jax._src.pjit import jit_p

    def by(rule: Callable[..., Any]) -> Callable[..., Any]:
        def run(*arguments: Any, **params: Any) -> Any:
            # What a program keeps of its trace is looked for. JAX itself keeps some of that of a `jax.shard_map` that
            # takes whole numbers, where it finds its derivative. The call stays one where the user's are not jitted.
            with config.check_tracer_leaks(False), config.disable_jit(False):
                return rule(*arguments, **parameters(**params))

        return run

    tables: list[Any] = [ad.primitive_jvps, ad.primitive_linearizations, batching.fancy_primitive_batchers]
    tables += [ad.primitive_transposes, ad.fancy_transposes]
    for table in tables:
        if jit_p in table:
            table[primitive] = by(table[jit_p])


@functools.cache
def _own_meshes() -> type[AbstractMesh]:
    from jax.sharding import AbstractMesh

    class OwnMesh(AbstractMesh):
        """A mesh that equals no other one. The shared one of its sizes and axes is to it, for JAX, as it is to a mesh
        of devices: its `abstract_mesh`."""

        @property
        def abstract_mesh(self) -> AbstractMesh:
            return AbstractMesh(self.axis_sizes, self.axis_names)

        @property
        def is_scalar(self) -> bool:
            """A question of JAX for meshes of devices, which it asks others too."""
            return self.abstract_mesh.size == 1 and not self.axis_names

    return OwnMesh


def mesh_of_its_own(sizes: tuple[int, ...], axes: tuple[str, ...]) -> AbstractMesh:
    """An abstract mesh that equals no other one: a sharding over it says which slice is meant."""
    from jax.sharding import AbstractMesh

    shared = AbstractMesh(sizes, axes)
    mesh = object.__new__(_own_meshes())
    for name in ("axis_sizes", "axis_names", "axis_types", "abstract_device", "size"):
        object.__setattr__(mesh, name, getattr(shared, name))
    return mesh


def keep_weakly(kind: type) -> None:
    """Has JAX's cache of what operations give hold parameters of this type weakly, as it does jaxprs. Of 2,048
    operations that were traced last it keeps the parameters, and with a function of the user all that this has."""
    from jax._src import util

    util.weakref_cache_key_types.add(kind)


def at_effects_barrier(flush: Callable[[], None]) -> None:
    """Has `jax.effects_barrier()` call a function as well, in whatever thread: each has its own tokens."""
    from jax._src import dispatch

    kind: Any = dispatch.RuntimeTokenSet
    by_jax = kind.block_until_ready

    def wait(tokens: Any) -> None:
        by_jax(tokens)
        flush()

    kind.block_until_ready = wait


def lying(traced: Any) -> list[Any]:
    """The shardings of the arguments that a `jax.stages.Traced` was traced with; None where one says none."""
    return [kind.sharding for kind in traced._meta_tys_flat]
