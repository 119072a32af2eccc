"""Programs with branches and loops, run in this process without a cluster: their graphs, and the scripts that come of
these.

    python -m tests.unit.control_runs 0 200     # random programs 0 to 199 beside jax.lax, on one, two and three slices
"""

from __future__ import annotations

import random
import sys
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import pathways_ray as pw
from pathways_ray.client import context, prng
from pathways_ray.client.slices import VirtualSlice
from pathways_ray.client.stages import Lowered
from pathways_ray.ir.evaluate import evaluate_control
from pathways_ray.ir.graph import Argument, Branch, Compute, Graph, Ref, Repeat, Result, Transfer, inputs_of
from pathways_ray.ir.verify import verify
from tests.unit.client.test_graph_size import NoCluster
from tests.unit.control_programs import arguments, compiled_functions, expected, random_program
from tests.unit.courses import run_course
from tests.unit.functions import functions_of

Code = dict[str, Any]


class Nowhere(NoCluster):
    """A session whose default slice is one device."""

    def default_slice(self) -> VirtualSlice:
        return self.slice(1, 99)


def opened(monkeypatch: pytest.MonkeyPatch) -> Nowhere:
    """Makes such a session the current one of a test."""
    made = Nowhere()
    monkeypatch.setattr(context, "sessions", [made])
    return made


def run(lowered: Lowered, *leaves: Any) -> list[np.ndarray[Any, Any]]:
    """The results of a program's graph, node by node on this process's device."""
    graph, given, code = _opened(lowered, leaves)
    return [np.asarray(value) for value in run_graph(graph, given, code)]


def run_script(lowered: Lowered, *leaves: Any, late: random.Random) -> list[np.ndarray[Any, Any]]:
    """The same by the script of the program, segment by segment."""
    graph, given, code = _opened(lowered, leaves)
    results, left = run_course(verify(graph), given, late, lambda segment, taken: run_graph(segment, taken, code))
    assert not left, "buffers were never freed"
    return [np.asarray(value) for value in results]


def _opened(lowered: Lowered, leaves: Sequence[Any]) -> tuple[Graph, list[Any], Code]:
    program: Any = lowered.program
    built = program._built
    given = [leaves[source.leaf] if source.leaf >= 0 else source.held for source in built.sources]
    code = {name: jax.jit(function.call) for name, function in functions_of(built.graph, built.functions).items()}
    return built.graph, [prng.to_data(jnp.asarray(value)) for value in given], code


def run_graph(graph: Graph, arguments: Sequence[Any], code: Code) -> list[Any]:
    """The results of a graph. What was donated is gone: a later use is a KeyError."""
    values: dict[Ref, Any] = {}
    for index, node in enumerate(graph.nodes):
        match node:
            case Argument():
                values[Ref(index)] = arguments[node.index]
            case Transfer():
                values[Ref(index)] = values[node.input]
            case Compute():
                (part,) = graph.recipes[node.recipe].parts
                made = code[part.function](*[values[ref] for ref in node.inputs])  # type: ignore[union-attr]
                for k in node.donated:
                    del values[node.inputs[k]]
                values.update({Ref(index, k): value for k, value in enumerate(made)})
            case Branch() | Repeat():
                taken = [values[ref] for ref in inputs_of(node)]
                made = evaluate_control(graph, node, taken, lambda g, given: run_graph(g, given, code), int)
                values.update({Ref(index, k): value for k, value in enumerate(made)})
            case Result():
                return [values[ref] for ref in node.inputs]
    raise AssertionError("no result")


def compare(session: NoCluster, seed: int, slices: int, depth: int) -> None:
    """Compares the random program of a seed, over some slices, with `jax.lax`: by its graph and by its script.

    Raises:
        AssertionError: a bit is different.
    """
    code = random_program(seed, depth)
    places = [session.slice(1, k + 1) for k in range(slices)]
    functions = compiled_functions(places, P())
    x, y = arguments(seed)
    given = pw.like(y, places[-1], P()) if seed % 2 else y  # on a slice, or still with the client
    lowered = pw.program(lambda x, y: code(pw, functions, x, y)).lower(x, given)
    wanted = np.asarray(expected(code, x, y))
    for found in (*run(lowered, x, y), *run_script(lowered, x, y, late=random.Random(seed))):
        assert (found.dtype, found.tobytes()) == (wanted.dtype, wanted.tobytes()), f"seed {seed}: {found}, not {wanted}"


def main(first: int, last: int) -> int:
    session = Nowhere()
    context.sessions.append(session)  # type: ignore[arg-type]
    failed = 0
    for seed in range(first, last):
        for slices in (1, 2, 3):
            try:
                compare(session, seed, slices, depth=2 + (slices == 1))
            except Exception as error:
                failed += 1
                print(f"seed {seed} on {slices} slices: {type(error).__name__}: {error}", flush=True)
    print(f"programs {first} to {last - 1} on one, two and three slices: {failed} differ or fail")
    return min(failed, 1)


if __name__ == "__main__":
    raise SystemExit(main(int(sys.argv[1]), int(sys.argv[2])))
