"""Options of the cluster that may change speed and nothing else: sequential dispatch, and no fusion.

One script computes the same things on a cluster with the given options; its results must have the same bits on all.
"""

from __future__ import annotations

import json

import pytest

BATTERY = """
    import hashlib
    import json
    import sys
    import time
    import jax, jax.numpy as jnp, numpy as np
    import pathways_ray as pw
    from jax.sharding import PartitionSpec as P
    from examples import language_model

    options = json.loads(sys.argv[1])
    url = options.pop("url", None)
    session = pw.connect(url, options["token"]) if url else pw.init(2, 1, 4, **options)
    random = np.random.default_rng(0)
    V, W = random.standard_normal((2, 64)).astype(np.float32)
    a4, b4 = (pw.virtual_slice((4,), ("x",), island=k) for k in (0, 1))
    a22, b2 = pw.virtual_slice((2, 2), ("x", "y"), island=0), pw.virtual_slice((2,), ("x",), island=1)

    def on(where, f, spec=P("x")):
        return pw.compiled(f, slice=where, in_specs=spec, out_specs=spec)

    square, less = on(a4, lambda v: v * v), on(a4, lambda v, w: v - w)
    there, cut = on(b2, lambda v: jnp.tanh(v) * 3), on(a22, lambda v: v + v.sum(), P(("y", "x")))
    total = pw.compiled(lambda v: v.sum(), slice=b4, in_specs=P("x"))
    bump = on(a4, lambda v: v * 0.999 + 0.01)

    @pw.program
    def mixed(v, w):
        x = less(square(less(square(v), w)), w)
        y = there(cut(there(x)))
        return {"x": x, "y": y, "total": total(less(x, y)), "operations": jnp.where(x > 0, x * 2 - w, y)}

    @pw.program
    def long(v):
        for _ in range(1500):
            v = bump(v)
        return v

    @pw.program
    def back_and_forth(v):
        for _ in range(100):
            v = there(square(v))
        return v

    found = {}

    def note(name, run):
        start = time.perf_counter()
        leaves = [np.asarray(leaf) for leaf in jax.tree.leaves(run())]
        found[name] = hashlib.sha256(b"".join(leaf.tobytes() for leaf in leaves)).hexdigest()
        print(f"{name}: {time.perf_counter() - start:.2f} s", file=sys.stderr)

    note("mixed", lambda: mixed(V, W))
    note("again", lambda: [mixed(V * np.float32(k), W) for k in range(8)])
    note("long", lambda: long(V))
    note("back and forth", lambda: back_and_forth(V))
    note("training", lambda: language_model.train_pathways(3))

    bad = pw.compiled(lambda v: jnp.sort(v[0] * jnp.arange(1 << 42, dtype=jnp.float32))[:64], slice=a4)
    for f in (lambda v: there(square(bad(v))), lambda v: bad(there(v))):
        try:
            np.asarray(pw.program(f)(V))
        except pw.errors.ExecutionError as error:
            found.setdefault("failures", []).append("17592186044416" in str(error))
    note("after failures", lambda: mixed(W, V))
    status = session.status()
    found["dispatch"] = status["controller"]["dispatch"]
    session.close()
    print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def expected(cluster, python) -> dict:
    """What the shared cluster computes: parallel dispatch, fused."""
    return run(python, url=cluster.url, token=cluster.token)


def run(python, **options) -> dict:
    return json.loads(python.run(BATTERY, json.dumps(options), timeout=110).splitlines()[-1])


@pytest.mark.timeout(240)  # two runs
@pytest.mark.parametrize(
    "options", [{"dispatch": "sequential"}, pytest.param({"fusion": False}, marks=pytest.mark.long)], ids=str
)
def test_options_do_not_change_a_bit(python, expected, options) -> None:
    found = run(python, **options)
    assert found.pop("dispatch") == options.get("dispatch", "parallel")
    assert found == {name: value for name, value in expected.items() if name != "dispatch"}
    assert found["failures"] == [True, True]
    python.assert_none_left()
