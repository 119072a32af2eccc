"""Computations that a GPU is to run as plain JAX does, and what plain JAX says of them.

Run as `python tests/gpu/computations.py FILE`, this writes what plain JAX gives on this machine's GPU, in a process of
its own: that of the tests, like a client, need not see the GPU.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np


class Computation(NamedTuple):
    """A function and its arguments. With `close`, the two are compared by value: the compiler chooses among kernels,
    which round differently, by what is fastest at the moment."""

    run: Callable[..., Any]
    arguments: tuple[Any, ...]
    close: bool = False


RANDOM = np.random.default_rng(15)
A = RANDOM.standard_normal((64, 64)).astype(np.float32)
POSITIVE = A @ A.T + 64 * np.eye(64, dtype=np.float32)
SIGNAL = RANDOM.standard_normal((2, 3, 16, 16)).astype(np.float32)
KERNEL = RANDOM.standard_normal((4, 3, 3, 3)).astype(np.float32)


def attention(q: Any, k: Any, v: Any) -> Any:
    return jax.nn.dot_product_attention(q, k, v, is_causal=True)


def scanned(v: Any) -> Any:
    return jax.lax.scan(lambda total, x: (total * 0.5 + x, total), jnp.zeros(v.shape[1]), v)


def draws(key: Any) -> Any:
    return jax.random.normal(key, (128,)), jax.random.permutation(key, 64), jax.random.uniform(key, (7,), jnp.bfloat16)


def eigen(a: Any) -> Any:
    """Eigenvalues, and what the vectors span: their signs are free."""
    values, vectors = jnp.linalg.eigh(a)
    return values, vectors @ jnp.diag(values) @ vectors.T


COMPUTATIONS = {
    "arithmetic": Computation(lambda v: (jnp.sin(v) * 2 + v / 3, jnp.exp(v), v > 0), (A,)),
    "bfloat16": Computation(lambda v: v.astype(jnp.bfloat16) * 3 + 1, (A,)),
    "float8": Computation(lambda v: v.astype(jnp.float8_e4m3fn), (A,)),
    "int4": Computation(lambda v: v + v, (np.arange(8, dtype=np.int32).astype(jnp.int4),)),
    "int8": Computation(lambda v: v // 3 - 1, (np.arange(-50, 50, dtype=np.int8),)),
    "float64": Computation(lambda v: jnp.cos(v) @ v, (A.astype(np.float64),), close=True),
    "complex": Computation(lambda v: (v * 1j).conj() + v, (A.astype(np.complex64),)),
    "scalar": Computation(lambda v: v + 1, (np.float32(1),)),
    "empty": Computation(lambda v: v * 2, (np.zeros((0, 4), np.float32),)),
    "matrix product": Computation(lambda a: a @ a.T, (A,), close=True),
    "matrix product, bfloat16": Computation(
        lambda a: a.astype(jnp.bfloat16) @ a.astype(jnp.bfloat16), (A,), close=True
    ),
    "convolution": Computation(lambda x, k: jax.lax.conv(x, k, (1, 1), "SAME"), (SIGNAL, KERNEL), close=True),
    "sort": Computation(lambda v: (jnp.sort(v, axis=0), jnp.argsort(v.ravel()), jax.lax.top_k(v, 3)), (A,)),
    "sum": Computation(lambda v: (v.sum(), jnp.cumsum(v, axis=1), v.max(axis=0)), (A,), close=True),
    "gather and scatter": Computation(lambda v, i: (v[i], v.at[i].add(1.0)), (A, np.array([3, 1, 3]))),
    "scan": Computation(scanned, (A,)),
    "while": Computation(lambda v: jax.lax.while_loop(lambda x: x.max() < 1e6, lambda x: x * 2, v), (np.abs(A),)),
    "cond": Computation(lambda v: jax.lax.cond(v[0, 0] > 0, jnp.sin, jnp.cos, v), (A,)),
    "fft": Computation(lambda v: jnp.fft.fft2(v), (A,), close=True),
    "cholesky": Computation(jnp.linalg.cholesky, (POSITIVE,), close=True),
    "qr": Computation(lambda a: jnp.matmul(*jnp.linalg.qr(a)), (A,), close=True),
    "svd": Computation(lambda a: jnp.linalg.svd(a, compute_uv=False), (A,), close=True),
    "eigh": Computation(eigen, (POSITIVE,), close=True),
    "solve": Computation(lambda a, b: jnp.linalg.solve(a, b), (POSITIVE, A), close=True),
    "triangular solve": Computation(
        lambda a, b: jax.scipy.linalg.solve_triangular(a, b, lower=True), (POSITIVE, A), close=True
    ),
    "random": Computation(draws, (np.array([0, 15], np.uint32),)),
    "attention": Computation(attention, tuple(A.reshape(2, 16, 4, 32) for _ in range(3)), close=True),
    "gradient": Computation(jax.grad(lambda a: jnp.tanh(a @ a).sum()), (A / 8,), close=True),
}


def bits(value: Any) -> np.ndarray[Any, Any]:
    """The bytes of an array, behind each other."""
    return np.frombuffer(np.ascontiguousarray(np.asarray(value)).tobytes(), np.uint8)


def _comparable(value: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Of a type that NumPy can store."""
    return value.astype(np.float32) if value.dtype.kind == "V" else value


def main(file: str) -> None:
    jax.config.update("jax_enable_x64", True)
    (device, *_), found = jax.devices("gpu"), dict[str, Any]()
    for name, (run, arguments, close) in COMPUTATIONS.items():
        with jax.default_device(device):
            results = jax.tree.leaves(jax.jit(run)(*map(jnp.asarray, arguments)))
        for k, value in enumerate(results):
            found[f"{name} {k}"] = _comparable(np.asarray(value)) if close else bits(value)
    np.savez(file, allow_pickle=False, **found)


if __name__ == "__main__":
    main(sys.argv[1])
